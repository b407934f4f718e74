"""Draws on the device count as those on the CPU do, and its stream follows the rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt import DropoutBySample
from lightning_shardckpt.system.random_generators import get_rng_state, rng_checksum, set_rng_state
from tests.accelerator.ranks import run_on_gpus
from tests.support.tiny import TinyLM, loader, trainer

pytestmark = pytest.mark.gpu


def _draws() -> None:
    before = rng_checksum()
    assert rng_checksum() == before
    torch.rand(2, device="cuda")
    assert rng_checksum() != before


def test_a_draw_on_the_device_changes_the_checksum() -> None:
    run_on_gpus(1, _draws)


def _moved() -> tuple[list[float], list[float]]:
    """A state that was taken on device 0 continues on device 1."""
    torch.cuda.manual_seed_all(1)
    torch.rand(3, device="cuda")
    state = get_rng_state()
    expected = torch.rand(3, device="cuda").tolist()
    torch.cuda.set_device(1)
    set_rng_state(state)
    return expected, torch.rand(3, device="cuda").tolist()


def test_the_stream_of_a_rank_continues_on_another_device() -> None:
    ((expected, found),) = run_on_gpus(1, _moved, pretend={"devices": 2})
    assert found == expected


class _Drops(TinyLM):
    """Has a dropout that no module of torch does, so that it is not keyed by sample."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.embed(tokens), 0.5, self.training))


def _drop() -> Any:
    trainer({}, accelerator="cuda", max_steps=1, callbacks=[DropoutBySample()]).fit(_Drops(frozen=False), loader())


def test_dropout_by_sample_sees_draws_on_the_device() -> None:
    (outcome,) = run_on_gpus(1, _drop, expect_errors=True)
    assert outcome.error.type == "UnsupportedCodeError", outcome.error
