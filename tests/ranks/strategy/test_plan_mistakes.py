"""A mistake in tensor_parallel_plan is an error on one process, too. Oracle: the error on two tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shardckpt.errors import TopologyError
from tests.support import tiny
from tests.support.pool import run_ranks

MISTAKES: list[Any] = [
    {"layr": "colwise"},
    {"layer": "columnwise"},
    {"layer": None},
    {"": "rowwise"},
    ["layer"],
    {},
    "no.such.function",
]


def errors(sizes: dict[str, int]) -> list[str]:
    found = []
    for plan in MISTAKES:
        run = tiny.trainer({**sizes, "tensor_parallel_plan": plan}, max_steps=1, limit_val_batches=0)
        with pytest.raises(TopologyError, match="tensor_parallel_plan") as caught:
            run.fit(BoringModel())
        found.append(str(caught.value))
    return found


def test_mistakes_in_a_plan_are_the_same_errors_on_one_process_and_on_two_ranks() -> None:
    (alone,) = run_ranks(1, errors, {})
    for rank in run_ranks(2, errors, {"tensor_parallel_size": 2}):
        assert rank == alone
    assert len({*alone}) == len(MISTAKES)
