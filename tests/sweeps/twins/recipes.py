"""Recipes of papers: recomputation by hand, functions of users, dropped layers, failing steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.sweeps.twins.base import BY_FUNCTION, CLASSES, WIDTH, Manual, Natural
from tests.sweeps.twins.models import ByLayers


class PowerIterates(Natural):
    """A penalty of the largest singular value, with the vector of the iteration as a buffer of the layer."""

    class Linear(nn.Linear):
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
            layer.a = self.Linear(WIDTH, 12)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * sum(layer.a.sigma**2 for layer in self.net.layers)


# ── recomputation by hand ───────────────────────────────────────────────────────────────────────────────────────────


class Recompute(torch.autograd.Function):  # runs a module again in its backward, and keeps its input alone
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.run(x)
        if ctx.parameters:
            return (None, *torch.autograd.grad(found, (x, *ctx.parameters), gradient))
        torch.autograd.backward(found, gradient)  # as the first versions of torch's checkpoint had it
        return None, x.grad


class RecomputesByFunction(ByLayers):
    gives_parameters = True

    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = Recompute.apply(layer, x, *(layer.parameters() if self.gives_parameters else ()))
        return x


class RecomputesIntoGradients(RecomputesByFunction):
    gives_parameters = False


class Adjoint(torch.autograd.Function):
    """Goes back along a differential equation, as torchdiffeq does, and sums the gradients that it finds."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, of_module: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.field, ctx.of_module = field, of_module
        with torch.no_grad():
            for _ in range(3):
                x = x + 0.1 * field(x)
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        if ctx.of_module:  # the parameters of the module itself
            parameters = list(ctx.field.parameters())
        sums = [torch.zeros_like(p) for p in parameters]
        for _ in range(3):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.field(x)
                of_x, *found = torch.autograd.grad(y, (x, *parameters), gradient, allow_unused=True)
            sums = [a if b is None else a + 0.1 * b for a, b in zip(sums, found, strict=True)]
            gradient, x = gradient + 0.1 * of_x, x - 0.1 * y
        return None, None, gradient, *sums


class GoesBackAlongLayers(ByLayers):
    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = Adjoint.apply(layer, False, x, *layer.parameters())
        return x


class GoesBackInLayers(Natural):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Adjoint.apply(self.field, False, x, *self.field.parameters())


class GoesBackByItself(Natural, whole=BY_FUNCTION):
    def build(self) -> None:
        self.embed, self.net, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = Adjoint.apply(self.net, True, self.embed(batch[0]), *self.net.parameters())
        return F.cross_entropy(self.head(x), batch[1])


class ChecksPointsInLayers(Natural):
    class Layer(nn.Module):  # checkpoints its own second half
        use_reentrant = False

        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

        def second(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x)))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return x + checkpoint(self.second, x, use_reentrant=self.use_reentrant)


class ChecksPointsReentrantly(Natural):
    class Layer(ChecksPointsInLayers.Layer):
        use_reentrant = True


# ── functions of users inside of layers ─────────────────────────────────────────────────────────────────────────────


class LinearByHand(torch.autograd.Function):
    """Keeps the weight by ``save_for_backward``, or as an attribute of the context, as many write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, as_attribute: bool) -> Tensor:
        if as_attribute:
            ctx.kept = x, weight
        else:
            ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = getattr(ctx, "kept", None) or ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0), None


class MultipliesByHand(Natural):
    class Layer(nn.Linear):
        as_attribute = False

        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(LinearByHand.apply(x, self.weight, self.bias, self.as_attribute))


class MultipliesByContext(Natural):
    class Layer(MultipliesByHand.Layer):
        as_attribute = True


# ── what layers tell besides their output ───────────────────────────────────────────────────────────────────────────


class DropsLayers(ByLayers, max_epochs=2):  # stochastic depth by a generator of its own
    def on_fit_start(self) -> None:
        self.draws = torch.Generator().manual_seed(5)

    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            if torch.rand((), generator=self.draws) < 0.6:
                x = layer(x)
        return x


# ── steps that fail, and go on; parts that are frozen in between ────────────────────────────────────────────────────


class Fails(Exception):
    pass


class SkipsWhatFails(Manual):  # a forward and a backward that fail half-way, each skipped
    def training_step(self, batch: list[Tensor], index: int) -> None:
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
        self.optimizers().zero_grad()
        super().training_step(batch, index)

    def fail(self, *args: Any) -> None:
        raise Fails

    def attempt(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except Fails:
            self.seen.append(1.0)


class FreezesItsHeadForALoss(Natural):
    """A head that trains on classes, and is frozen while a second loss goes through it."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        features = self.net.features(batch[0])
        loss = F.cross_entropy(self.net.head(features), batch[1])
        self.net.head.requires_grad_(False)
        loss = loss + 0.1 * self.net.head(features).square().mean()
        self.net.head.requires_grad_(True)
        return loss


class FreezesBetweenForwards(Natural):
    """A layer is frozen for the second of two forwards, and trained again when their losses go back."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        first = self.net(batch[0])
        self.net.layers[0].requires_grad_(False)
        second = self.net(batch[2])
        self.net.layers[0].requires_grad_(True)
        penalty = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(first, batch[1]) + F.cross_entropy(second, batch[1]) + 0.1 * penalty
