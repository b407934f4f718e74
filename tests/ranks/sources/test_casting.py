"""A run goes on in another floating dtype. Oracle: ``Tensor.to``, and what Lightning itself makes of its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import CorruptionError, StateError
from tests.support import tiny
from tests.support.faults import flip
from tests.support.pool import run_each

WIDE = 1100  # so that a weight is read in more than one window


class Net(tiny.TinyLM):
    def training_step(self, batch: Any, index: int) -> Any:
        return self(batch[0]).square().mean()


def fit(path: str, precision: Any, steps: int, strategy: Any, resume: str | None = None) -> dict[str, Any]:
    """Weights, moments and their dtypes after so many steps."""
    pl.seed_everything(1, verbose=False)
    run = tiny.train(module := Net(), strategy, steps, save=path, resume=resume, precision=precision)
    return tiny.full_state(module, run.optimizers)


PRECISIONS = [("32-true", "bf16-true"), ("64-true", "32-true")]


@pytest.mark.slow
def test_a_run_goes_on_in_another_precision(tmp_path: Path) -> None:
    """Where it was loaded: no step is made, since those of two ranks see other batches."""

    def path(name: str, before: str) -> str:
        return str(tmp_path / f"{name} {before}")

    run_each({p: (2, fit, path("sharded", p[0]), p[0], 2, {}) for p in PRECISIONS})
    run_each({p: (1, fit, path("file", p[0]), p[0], 2, "auto") for p in PRECISIONS})
    alone = run_each({p: (1, fit, path("b", p[0]), p[1], 2, "auto", path("file", p[0])) for p in PRECISIONS})
    found = run_each({p: (2, fit, path("c", p[0]), p[1], 2, {}, path("file", p[0])) for p in PRECISIONS})
    for p, (expected,) in alone.items():
        assert [tiny.differences(rank, expected) for rank in found[p]] == [[], []]


def wide(dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(WIDE * 4, WIDE).to(dtype)


def test_weights_are_converted_window_by_window(tmp_path: Path) -> None:
    after = torch.bfloat16
    module, other = wide(torch.float32, 0), wide(after, 1)
    ckpt.save(tmp_path / "c", {"model": module})
    ckpt.load(tmp_path / "c", {"model": other})
    assert torch.equal(other.weight, module.weight.to(after))
    assert torch.equal(other.bias, module.bias.to(after))


def test_a_module_whose_converted_values_are_corrupt_is_refused(tmp_path: Path) -> None:
    module, other = wide(torch.float32, 0), wide(torch.bfloat16, 1)
    ckpt.save(tmp_path / "c", {"model": module})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    flip(file, -5)
    with pytest.raises(CorruptionError):
        ckpt.load(tmp_path / "c", {"model": other})
    with pytest.raises(StateError, match="a mix of two states"):
        ckpt.save(tmp_path / "d", {"model": other})


def test_moments_follow_what_the_optimizer_makes(tmp_path: Path) -> None:
    module, optimizer = _stepped(torch.float32)
    ckpt.save(tmp_path / "c", {"model": module, "optimizer": optimizer})
    other = wide(torch.bfloat16, 1)
    fresh = torch.optim.AdamW(other.parameters())
    ckpt.load(tmp_path / "c", {"model": other, "optimizer": fresh})
    expected = torch.optim.AdamW(wide(torch.bfloat16, 1).parameters())
    expected.load_state_dict(optimizer.state_dict())  # torch's own conversion
    pairs = zip(fresh.state.values(), expected.state.values(), strict=True)
    for found, of in pairs:
        assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in of.items()}
        assert all(torch.equal(found[k], of[k]) for k in of)


def _stepped(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = wide(dtype, 0)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, WIDE * 4, dtype=dtype)).sum().backward()
    optimizer.step()
    return module, optimizer
