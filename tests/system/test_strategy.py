"""Training under ShardedStrategy on every topology. Oracle: training in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_shardckpt import FSDP
from tests.support.nets import TOLERANCE, Case, Trained, train_all, twins
from tests.support.pool import run_each, run_ranks, selected

# Sums of float64 in another order, through AdamW with eps 1e-3: seen up to 7e-15 after four steps.

TIED = Case("tied net", late=True)
LATE = Case(late=True, clip=0.05, accumulate=2)
CLIPPED = Case(clip=0.05)
ACCUMULATED = Case(clip=0.05, accumulate=2)
LLAMA = Case("llama", late=True)
QWEN3 = Case("qwen3", accumulate=2)
EVERY_CASE = [TIED, LATE, CLIPPED, ACCUMULATED, LLAMA, QWEN3]
TP = {"tensor_parallel_size": 2}
OPTIONS = FSDP(
    units=["net.blocks.*.attention", "Block", "net.embed"],
    activation_checkpointing=["Attention", "net.blocks.1"],
    cpu_offload=True,
)


@pytest.fixture(scope="module")
def expected() -> dict[Case, Trained]:
    return dict(zip(EVERY_CASE, run_ranks(1, twins, EVERY_CASE)[0], strict=True))


WAYS: dict[str, tuple[int, dict[str, Any], list[Case]]] = {
    "one process": (1, {}, [ACCUMULATED, QWEN3]),
    "fsdp2": (2, {}, [CLIPPED, LLAMA]),
    "fsdp3 uneven": (3, {}, [TIED]),
    "fsdp2, options": (2, {"fsdp": OPTIONS}, [LATE]),
    "replicate2": (2, {"data_parallel_replicate_size": 2}, [ACCUMULATED]),
    "tp2": (2, TP, [QWEN3]),
    "fsdp2 x tp2": (4, TP, [TIED]),
}
MARKS = {"one process": [], "replicate2": [], "fsdp3 uneven": [pytest.mark.slow, pytest.mark.sweep]}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, list[list[Trained]]]:
    """What each rank saw of the cases of each selected way."""
    ways = {way: WAYS[way] for way in selected(request, "way")}
    return run_each({way: (world, train_all, cases, sizes) for way, (world, sizes, cases) in ways.items()})


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, pytest.mark.slow)) for way in WAYS])
def test_training_equals_plain_torch(
    way: str, trained: dict[str, list[list[Trained]]], expected: dict[Case, Trained]
) -> None:
    for index, case in enumerate(WAYS[way][2]):
        alone, together = expected[case], [rank[index] for rank in trained[way]]
        for got in together:
            assert got.metrics == together[0].metrics
            assert got.metrics == pytest.approx(alone.metrics, abs=TOLERANCE)
            assert got.losses == pytest.approx(alone.losses, abs=TOLERANCE)
            assert got.first.keys() == alone.first.keys()
            for name in alone.first:
                assert torch.equal(got.first[name], alone.first[name]), (case, name)
                assert torch.equal(got.last[name], together[0].last[name]), (case, name)
                torch.testing.assert_close(
                    got.last[name], alone.last[name], rtol=0, atol=TOLERANCE, msg=f"{case} {name}"
                )
