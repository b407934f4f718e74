"""Parameters that change between the forward and the backward: an error, as on one process, or the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_shardckpt import FSDP
from tests.support import tiny
from tests.support.pool import run_each
from tests.sweeps.twins.base import Block, Natural

CASES: dict[str, tuple[int, dict[str, Any] | str]] = {
    "auto": (1, "auto"),
    "fsdp2": (2, {}),
    "fsdp2, kept": (2, {"fsdp": FSDP(reshard_after_forward=False)}),
    "replicas": (2, {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}),
    "tp2": (2, {"data_parallel_shard_size": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}),
}


def on_each(names: Iterable[str], fn: Callable[..., Any], *args: Any) -> dict[str, list[Any]]:
    """What each rank returned of a function of a strategy, by case."""
    return run_each({name: (CASES[name][0], fn, CASES[name][1], *args) for name in names})


class Changing(tiny.TinyLM):
    """Changes parameters after its forward; the names decide which."""

    def __init__(self, suffix: str) -> None:
        super().__init__(frozen=False)
        self.suffix = suffix

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(self.suffix):
                    parameter.mul_(0.5)
        return loss


def changes(strategy: dict[str, Any] | str, suffixes: list[str]) -> list[str]:
    """The error of each run."""
    found = []
    for suffix in suffixes:
        try:
            tiny.trainer(strategy, max_steps=1, limit_val_batches=0).fit(Changing(suffix), tiny.loader())
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_weight_that_autograd_needs_must_not_change_before_its_backward() -> None:
    found = on_each(["auto", "fsdp2", "fsdp2, kept", "tp2"], changes, ["head.weight", ".up.bias"])
    for error, bias in (rank for ranks in found.values() for rank in ranks):
        assert error.startswith("RuntimeError") and "modified by an inplace operation" in error, found
        assert bias == "", "no gradient needs it"


class Converts(Natural):
    """Modules change their dtype while they train, and after it."""

    class Casts(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x.to(self.a.weight.dtype)).to(x.dtype)

    def build(self) -> None:
        super().build()
        self.net.layers = nn.ModuleList(self.Casts() for _ in range(2))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            self.net.layers.float()
        elif index == 2:
            self.net.layers.to(torch.float64)
            self.net.cpu()
        self.seen.append(float(self.net.layers[0].a.weight.detach().sum()))


def convert(strategy: dict[str, Any] | str) -> tuple[list[float], Tensor, Tensor]:
    pl.seed_everything(3, verbose=False)
    module = Converts()
    tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False).fit(module)
    example = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    with torch.no_grad():
        return module.seen, module.to("cpu").net(example), module.half().float().net(example.float())


def test_modules_move_and_change_their_dtype_as_on_one_process() -> None:
    (alone,), *ranks = on_each(["auto", "fsdp2", "fsdp2, kept", "replicas"], convert).values()
    for found in (rank for of in ranks for rank in of):
        torch.testing.assert_close(found[0], alone[0], rtol=1e-6, atol=1e-6)  # gradients of float32, for two batches
        torch.testing.assert_close(found[1:], alone[1:], rtol=1e-5, atol=1e-5)
