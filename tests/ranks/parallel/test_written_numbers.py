"""Numbers of a rank's own that are written into sharded parameters end with an error on every rank.

Oracle: the same code, with numbers that are the same everywhere.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.pool import run_each


class Writes(tiny.TinyLM):
    """In one of several places, a number of the batch."""

    def __init__(self, where: str, *, reduced: bool) -> None:
        super().__init__()
        self.where, self.reduced = where, reduced

    def number(self, loss: Tensor) -> float:
        return float(self.all_gather(loss.detach()).mean() if self.reduced else loss)

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        number = 1e-3 * self.number(outputs["loss"])
        if self.where == "a weight":
            with torch.no_grad():
                self.head.weight.mul_(1 - number)
        elif self.where == "many weights":
            torch._foreach_mul_([p.data for p in self.parameters()], 1 - number)
        elif self.where == "the learning rate":
            self.trainer.optimizers[0].param_groups[0]["lr"] = number


def train(where: str, reduced: bool, strategy: dict[str, Any], steps: int) -> str:
    pl.seed_everything(1)
    run = tiny.trainer(strategy, max_steps=steps, limit_val_batches=0)
    try:
        run.fit(Writes(where, reduced=reduced), tiny.loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_numbers_of_a_rank_s_own_are_an_error_at_the_next_batch() -> None:
    ways: list[tuple[str, bool, int, int]] = [  # where, reduced or not, ranks, steps; also after the last batch
        ("a weight", True, 2, 3), ("a weight", False, 4, 1), ("many weights", False, 2, 1),
        ("the learning rate", False, 2, 3),
    ]  # fmt: skip
    hsdp = {"data_parallel_replicate_size": 2}
    calls = {way: (way[2], train, way[0], way[1], hsdp if way[2] == 4 else {}, way[3]) for way in ways}
    for (_, reduced, *_), ranks in (found := run_each(calls)).items():
        for said in ranks:
            told = said.startswith("UnsupportedCodeError: the ranks wrote different numbers into sharded parameters")
            assert told != reduced and ("into a tensor of shape (" in said) != reduced, found
