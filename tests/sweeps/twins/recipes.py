"""Recipes of papers: distillation, perceptual losses, recomputation by hand, tied weights, early exits, experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.sweeps.twins.base import BY_FUNCTION, CLASSES, WIDTH, Block, Manual, Natural, Net, case


class Collects:
    """Keeps the outputs of modules, by forward hooks."""

    def __init__(self, modules: list[nn.Module], *, detach: bool = False) -> None:
        self.found: list[Tensor] = []
        self.detach = detach
        self.handles = [module.register_forward_hook(self) for module in modules]

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found.append(output.detach() if self.detach else output)

    def take(self) -> list[Tensor]:
        found, self.found = self.found, []
        return found

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


# ── distillation ────────────────────────────────────────────────────────────────────────────────────────────────────


@case()
class DistillsFeatures(Natural):
    """The student's layers follow those of a frozen teacher; hooks of both collect their outputs."""

    def build(self) -> None:
        self.teacher = Net().requires_grad_(False).eval()
        self.net = Net()
        self.of_teacher = Collects([*self.teacher.layers, self.teacher.norm], detach=True)
        self.of_student = Collects([*self.net.layers, self.net.norm])

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            self.teacher(batch[0])
        hard = F.cross_entropy(self.net(batch[0]), batch[1])
        pairs = zip(self.of_student.take(), self.of_teacher.take(), strict=True)
        return hard + 0.5 * sum(F.mse_loss(student, teacher) for student, teacher in pairs)


# ── perceptual losses ───────────────────────────────────────────────────────────────────────────────────────────────


class Autoencoder(Natural):
    def build(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3))
        self.decoder = nn.Sequential(nn.Linear(3, WIDTH), nn.GELU(), nn.Linear(WIDTH, 6))

    def rebuilt(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


# ── teachers inside of modules ──────────────────────────────────────────────────────────────────────────────────────


class WithTeacher(nn.Module):
    """A layer with an average of itself, which follows in each forward."""

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.student, self.decay = Block(), decay
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for mean, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.mul_(self.decay).add_(p, alpha=1 - self.decay)
            target = self.teacher(x)
        found = self.student(x)
        return found, F.mse_loss(found, target)


@case()
class FollowsItselfInLayers(Natural):
    def build(self) -> None:
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(WithTeacher() for _ in range(2))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, consistency = self.embed(batch[0]), []
        for layer in self.layers:
            x, difference = layer(x)
            consistency.append(difference)
        return F.cross_entropy(self.head(x), batch[1]) + torch.stack(consistency).sum()


@case()
class AveragesWeightsInBuffers(Natural):
    """The average that a layer keeps of its weight is a buffer, and takes part in its output."""

    class Anchored(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.register_buffer("anchor", self.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.anchor.mul_(0.8).add_(self.weight.detach(), alpha=0.2)
            return F.linear(x, 0.5 * (self.weight + self.anchor), self.bias)

    def build(self) -> None:
        super().build()
        for layer in self.net.layers:
            layer.a = self.Anchored(WIDTH, 12)


# ── recomputation by hand ───────────────────────────────────────────────────────────────────────────────────────────


class Recompute(torch.autograd.Function):
    """Runs a module again in its backward, and keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.run(x)
        return (None, *torch.autograd.grad(found, (x, *ctx.parameters), gradient))


@case()
class RecomputesByFunction(Natural):
    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        for layer in self.net.layers:
            x = Recompute.apply(layer, x, *layer.parameters())  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.net.head(self.net.norm(x) * self.net.scale), batch[1])


class RecomputeInto(torch.autograd.Function):
    """The same, as the first versions of torch's checkpoint had it: its backward runs another backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.run(x)
        torch.autograd.backward(found, gradient)
        return None, x.grad


@case()
class RecomputesIntoGradients(Natural):
    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        for layer in self.net.layers:
            x = RecomputeInto.apply(layer, x)  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.net.head(self.net.norm(x) * self.net.scale), batch[1])


class Adjoint(torch.autograd.Function):
    """Goes back along a differential equation, as torchdiffeq does, and sums the gradients that it finds."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.field = field
        with torch.no_grad():
            for _ in range(3):
                x = x + 0.1 * field(x)
        ctx.save_for_backward(x, *parameters)
        return x

    @classmethod
    def parameters(cls, ctx: Any) -> list[Tensor]:
        return list(ctx.saved_tensors[1:])

    @classmethod
    def sums(cls, ctx: Any, gradient: Tensor) -> Any:
        x, parameters = ctx.saved_tensors[0], cls.parameters(ctx)
        sums = [torch.zeros_like(p) for p in parameters]
        for _ in range(3):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.field(x)
                of_x, *found = torch.autograd.grad(y, (x, *parameters), gradient, allow_unused=True)
            sums = [a if b is None else a + 0.1 * b for a, b in zip(sums, found, strict=True)]
            gradient, x = gradient + 0.1 * of_x, x - 0.1 * y
        return None, gradient, *sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Adjoint.sums(ctx, gradient)


class AdjointOfModule(Adjoint):
    """The same, for the parameters of the module itself."""

    @classmethod
    def parameters(cls, ctx: Any) -> list[Tensor]:
        return list(ctx.field.parameters())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return AdjointOfModule.sums(ctx, gradient)


@case()
class GoesBackAlongLayers(Natural):
    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        for layer in self.net.layers:
            x = Adjoint.apply(layer, x, *layer.parameters())  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.net.head(x), batch[1])


class AdjointLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Adjoint.apply(self.field, x, *self.field.parameters())  # type: ignore[no-any-return, no-untyped-call]


@case()
class GoesBackInLayers(Natural):
    def build(self) -> None:
        super().build()
        self.net.layers = nn.ModuleList(AdjointLayer() for _ in range(2))


@case(whole=BY_FUNCTION)
class GoesBackByItself(Natural):
    def build(self) -> None:
        self.embed, self.net, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = AdjointOfModule.apply(self.net, self.embed(batch[0]), *self.net.parameters())  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.head(x), batch[1])


class Halved(nn.Module):
    """A layer that checkpoints its own second half, in either way of torch."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.use_reentrant = use_reentrant

    def second(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return x + checkpoint(self.second, x, use_reentrant=self.use_reentrant)


def checkpointed(use_reentrant: bool) -> Any:
    class Checkpointed(Natural):
        def build(self) -> None:
            super().build()
            self.net.layers = nn.ModuleList(Halved(use_reentrant) for _ in range(2))

    return Checkpointed


case("ChecksPointsInLayers")(checkpointed(False))
case("ChecksPointsReentrantly")(checkpointed(True))


# ── tied weights ────────────────────────────────────────────────────────────────────────────────────────────────────


@case()
class TiesByFunctionalCall(Autoencoder):
    """A decoder that runs with the weights of the encoder, transposed."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        weights = {"0.weight": self.encoder[2].weight.t(), "2.weight": self.encoder[0].weight.t()}
        return F.mse_loss(functional_call(self.decoder, weights, (self.encoder(batch[0]),)), batch[0])


# ── functions of users inside of layers ─────────────────────────────────────────────────────────────────────────────


class LinearByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class LinearOfContext(torch.autograd.Function):
    """The same with the weight as an attribute of the context, as many write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.mm(ctx.weight), gradient.t().mm(ctx.x), gradient.sum(0)


class ByHand(nn.Linear):
    def __init__(self, function: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.function.apply(x, self.weight, self.bias))


def of_layers(make: Callable[[], nn.Module]) -> Any:
    class OfLayers(Natural):
        def build(self) -> None:
            super().build()
            self.net.layers = nn.ModuleList(make() for _ in range(2))

    return OfLayers


case("MultipliesByHand")(of_layers(lambda: ByHand(LinearByHand)))
case("MultipliesByContext")(of_layers(lambda: ByHand(LinearOfContext)))


# ── early exits ─────────────────────────────────────────────────────────────────────────────────────────────────────


@case(max_epochs=2)
class DropsLayers(Natural):
    """Stochastic depth by a generator of its own."""

    def on_fit_start(self) -> None:
        self.draws = torch.Generator().manual_seed(5)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        for layer in self.net.layers:
            if torch.rand((), generator=self.draws) < 0.6:
                x = layer(x)
        return F.cross_entropy(self.net.head(self.net.norm(x) * self.net.scale), batch[1])


# ── what layers tell besides their output ───────────────────────────────────────────────────────────────────────────


@case()
class BalancesExperts(Natural):
    """Each layer leaves a loss for the balance of its experts on itself."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            self.aux = (weights * weights).sum(-1).mean()
            return x + sum(weights[:, n, None] * expert(x) for n, expert in enumerate(self.experts))

    def build(self) -> None:
        super().build()
        self.net.layers = nn.ModuleList(self.Experts() for _ in range(2))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * sum(layer.aux for layer in self.net.layers)


@case()
class PenalizesWhereHooksAre(Natural):
    """Hooks of the modules in a layer collect a penalty of their weights while it runs."""

    def build(self) -> None:
        super().build()
        self.penalties: list[Tensor] = []
        for layer in self.net.layers:
            for module in (layer.a, layer.b):
                module.register_forward_hook(lambda m, args, out: self.penalties.append(m.weight.abs().mean()))

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        loss = loss + 0.1 * torch.stack(self.penalties).sum()
        self.penalties.clear()
        return loss


class Output:
    """What a layer returns: its output, and the weight that made it."""

    def __init__(self, value: Tensor, weight: Tensor) -> None:
        self.value, self.weight = value, weight


class Tells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        return Output(x + torch.tanh(self.linear(x)), self.linear.weight)


@case()
class PenalizesWhatIsReturned(Natural):
    def build(self) -> None:
        super().build()
        self.net.layers = nn.ModuleList(Tells() for _ in range(2))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, penalty = self.net.embed(batch[0]), batch[0].new_zeros(())
        for layer in self.net.layers:
            found = layer(x)
            x, penalty = found.value, penalty + found.weight.square().mean()
        return F.cross_entropy(self.net.head(x), batch[1]) + penalty


@case()
class ChangesWhatIsReturned(PenalizesWhatIsReturned):
    """After the optimizer's step, the weights that the layers returned are made of norm one."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.embed(batch[0])
        self.returned = []
        for layer in self.net.layers:
            found = layer(x)
            x = found.value
            self.returned.append(found)
        return F.cross_entropy(self.net.head(x), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for found in self.returned:
                found.weight.div_(found.weight.norm(dim=1, keepdim=True))
                self.seen.append(float(found.weight.sum()))


@case()
class PowerIterates(Natural):
    """A penalty of the largest singular value, with the vector of the iteration as a buffer of the layer."""

    class Lipschitz(nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.register_buffer("u", F.normalize(torch.linspace(1, 2, self.out_features), dim=0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                v = F.normalize(self.weight.t() @ self.u, dim=0)
                self.u.copy_(F.normalize(self.weight @ v, dim=0))
            self.sigma = torch.dot(self.u.clone(), self.weight @ v)
            return super().forward(x)

    def build(self) -> None:
        super().build()
        for layer in self.net.layers:
            layer.a = self.Lipschitz(WIDTH, 12)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * sum(layer.a.sigma**2 for layer in self.net.layers)


# ── steps that fail, and go on ──────────────────────────────────────────────────────────────────────────────────────


class Fails(Exception):
    pass


@case()
class SkipsWhatFails(Manual):
    """A forward and a backward that fail half-way, each skipped."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        if index == 1:
            handle = self.net.layers[1].register_forward_pre_hook(self.fail)
            self.attempt(lambda: self.loss(batch))
            handle.remove()
        if index == 2:
            x = self.net.embed(batch[0])
            x.register_hook(self.fail)
            for layer in self.net.layers:
                x = layer(x)
            self.attempt(lambda: self.manual_backward(F.cross_entropy(self.net.head(x), batch[1])))
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def fail(self, *args: Any) -> None:
        raise Fails

    def attempt(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except Fails:
            self.seen.append(1.0)


@case()
class FreezesItsHeadForALoss(Natural):
    """A head that trains on classes, and is frozen while a second loss goes through it."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        features = self.net.features(batch[0])
        loss = F.cross_entropy(self.net.head(features), batch[1])
        self.net.head.requires_grad_(False)
        loss = loss + 0.1 * self.net.head(features).square().mean()
        self.net.head.requires_grad_(True)
        return loss


@case()
class FreezesBetweenForwards(Natural):
    """A layer is frozen for the second of two forwards, and trained again when their losses go back."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        first = self.net(batch[0])
        self.net.layers[0].requires_grad_(False)
        second = self.net(batch[2])
        self.net.layers[0].requires_grad_(True)
        penalty = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(first, batch[1]) + F.cross_entropy(second, batch[1]) + 0.1 * penalty
