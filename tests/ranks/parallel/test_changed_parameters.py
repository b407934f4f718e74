"""Parameters that change between the forward and the backward: an error, as on one process, or the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.pool import run_ranks

CASES: dict[str, tuple[int, dict[str, Any] | str]] = {
    "auto": (1, "auto"),
    "one": (1, {}),
    "fsdp2": (2, {}),
    "fsdp2, kept": (2, {"reshard_after_forward": False}),
    "replicas": (2, {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}),
    "tp2": (2, {"data_parallel_shard_size": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}),
}


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


@pytest.mark.parametrize("case", CASES)
def test_a_weight_that_autograd_needs_must_not_change_before_its_backward(case: str) -> None:
    world, strategy = CASES[case]
    for weight, layer, bias in run_ranks(world, changes, strategy, [".up.weight", "head.weight", ".up.bias"]):
        for error in (weight, layer):
            assert error.startswith("RuntimeError") and "modified by an inplace operation" in error, error
        assert bias == "", "no gradient needs it"
