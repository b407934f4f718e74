"""A mistake in tensor_parallel_plan is an error on one process, too. Oracle: the error on two tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shardckpt.errors import TopologyError
from tests.support import tiny
from tests.support.pool import run_ranks

MISTAKES: list[tuple[Any, str]] = [
    ({"layr": "colwise"}, r"'layr' matches no module \(nearest: layer"),
    ({"layer": "columnwise"}, "'layer': unknown style 'columnwise', expected one of"),
    ({"layer": None}, "'layer': unknown style None, expected one of"),
    ({"": "rowwise"}, "tensor_parallel_plan"),
    (["layer"], r"is \"auto\", a dict .*found \['layer'\]: write "),
    ({}, "none of its 0 patterns matches"),
    ("no.such:function", "cannot import 'no.such:function'"),
]


def errors(sizes: dict[str, int]) -> list[str]:
    found = []
    for plan, said in MISTAKES:
        with pytest.raises(TopologyError, match=f"(?s)tensor_parallel_plan.*{said}|{said}.*") as caught:
            tiny.train(BoringModel(), {**sizes, "tensor_parallel_plan": plan}, 1)
        found.append(str(caught.value))
    return found


def test_mistakes_in_a_plan_are_the_same_errors_on_one_process_and_on_two_ranks() -> None:
    (alone,) = run_ranks(1, errors, {})
    for rank in run_ranks(2, errors, {"tensor_parallel_size": 2}):
        assert rank == alone
    assert len({*alone}) == len(MISTAKES)
