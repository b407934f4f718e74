"""Hooks on gradients and modules, registered before a module is sharded and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.sweeps.twins.base import CLASSES, Block, Manual, Natural


class ScalesByHook(Natural):
    def on_fit_start(self) -> None:
        for p in (self.net.layers[0].a.weight, self.net.head.weight, self.net.scale):
            p.register_hook(lambda g: g * 0.1)


class MasksByHook(Natural):  # registered in ``__init__``, as gradient masks of pruned or adapted weights are
    def build(self) -> None:
        super().build()
        for p in (self.net.layers[1].b.weight, self.net.head.weight, self.net.embed.bias):
            mask = (torch.arange(p.numel()) % 2).view_as(p)
            p.register_hook(lambda g, mask=mask: g * mask.to(g))


class ClampsByHook(Natural):  # not linear: it must see the gradient of all batches
    def build(self) -> None:
        super().build()
        self.handles = [p.register_hook(lambda g: g.clamp(-1e-2, 1e-2)) for p in self.net.parameters()]

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            for handle in self.handles[::2]:
                handle.remove()


class ReadsInHook(Natural):
    def on_fit_start(self) -> None:
        self.norms: dict[str, float] = {}
        for name, p in self.net.head.named_parameters():
            p.register_hook(lambda g, name=name: self.norms.update({name: g.norm().item()}))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [self.norms["weight"], self.norms["bias"]]


HOOKED = {"replicas": "norm of the gradient of a replicated parameter, which has"}


class HooksWhileItAccumulates(Natural, accumulate_grad_batches=2, refused=HOOKED):
    def build(self) -> None:
        super().build()
        for p in self.net.layers[0].parameters():
            p.register_hook(lambda g: g.sign() * 1e-2)

    def on_after_backward(self) -> None:
        self.seen += [p.grad.norm().item() for p in self.net.head.parameters()]


class EditsAfterAccumulation(Natural):
    def on_fit_start(self) -> None:
        def halve(p: Tensor) -> None:
            p.grad.mul_(0.5)

        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(halve)


class StepsInBackward(Manual):  # one optimizer for each parameter, which steps when its gradient is there
    def configure_optimizers(self) -> None: ...

    def on_fit_start(self) -> None:
        def step(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in self.net.parameters()}
        for p in optimizers:
            p.register_post_accumulate_grad_hook(step)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))


class HooksTied(Natural):  # what the first and the last layer share has a hook that isn't linear
    def build(self) -> None:
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.head.weight.register_hook(lambda g: g.clamp(-1e-2, 1e-2))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.embed(batch[3]).mean(1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), batch[3][:, 0])


EVERYWHERE = ("fsdp2", "replicas", "tp2", "hsdp", "fsdp2 x tp2")


class StepsInBackwardByTorch(Natural, refused=dict.fromkeys(EVERYWHERE, "is registered on a node of autograd's graph")):
    """Parameters that torch updates when their gradient is there."""

    def on_fit_start(self) -> None:
        from torch.distributed.optim import _apply_optimizer_in_backward  # which warns of torch.jit

        _apply_optimizer_in_backward(torch.optim.SGD, [self.net.scale], {"lr": self.lr})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p is not self.net.scale], lr=self.lr)


class HooksInForward(Natural):
    class Layer(Block):
        """Hooks its own weights in its first forward, as modules do that know their parameters only then."""

        handle: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.handle is None:
                self.handle = self.b.weight.register_hook(lambda g: g.sign() * 1e-2)
            return super().forward(x)


class HooksInStep(Natural):  # for one backward
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.handle = self.net.head.weight.register_hook(lambda g: g.clamp(-1e-2, 1e-2) / 2)
        return self.loss(batch)

    def on_after_backward(self) -> None:
        self.handle.remove()


class WatchesModules(Natural):  # forward hooks that change what passes, and backward hooks that look at it
    def build(self) -> None:
        super().build()
        self.net.layers[0].register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
        self.net.layers[1].register_forward_hook(lambda m, args, out: out * 0.9)
        self.net.head.register_forward_hook(lambda m, args, out: out + m.weight.sum())
        self.net.layers[0].register_full_backward_hook(self.watch)

    def watch(self, module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        total = self.all_gather(grad_out[0].square().sum()).sum()
        self.calls = getattr(self, "calls", 0) + int(total > 0)

    def on_train_end(self) -> None:
        self.seen.append(float(self.calls))


class WatchesEveryModule(Natural):
    def on_fit_start(self) -> None:
        self.handle = nn.modules.module.register_module_forward_hook(self.count)

    def count(self, module: nn.Module, args: Any, out: Any) -> None:
        self.calls = getattr(self, "calls", 0) + int(isinstance(module, nn.Linear))

    def on_train_end(self) -> None:
        self.handle.remove()
        self.seen.append(float(self.calls))


class PenalizesInBackward(Natural):  # LightningModule.backward, done in its own way
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()
        sum(1e-2 * p.square().sum() for p in self.net.head.parameters()).backward()


class ZeroesNanInHook(Natural):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0.0, posinf=0.0, neginf=0.0, out=p.grad)
                p.grad.data.clamp_(-0.05, 0.05)


class AccumulatesAutomatically(Natural, accumulate_grad_batches=2, gradient_clip_val=0.2): ...


class ConfiguresClipping(Natural):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.net.layers.parameters(), 0.05)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="value")


class OverridesTheStep(Natural):  # learning rates that warm up by hand, and an optimizer step of its own
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (index + 2)

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class PenalizesAHookedLayer(Natural):  # a layer that is never called: its hooked weight is only in a penalty
    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(6, CLASSES)

    def on_fit_start(self) -> None:
        self.extra.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def loss(self, batch: list[Tensor]) -> Tensor:
        weight = self.extra.weight
        return super().loss(batch) + (weight**2).sum() + (weight.mul(2) + weight).abs().sum()
