"""Reads that are planned first find what was there then. Oracle: the tensors that were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.sources.reading import ReadTarget, read_targets
from lightning_shardckpt.sources.source import Source, sharded_source
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.transfer.reader import Checkpoint

STATE = {"large": torch.randn(3000, 4000), "small": torch.randn(7), "whole": torch.arange(5)}


def saved(path: Path) -> Source:
    module = torch.nn.Module()
    for name, tensor in STATE.items():
        module.register_buffer(name, tensor)
    ckpt.save(path, {"model": module})
    return sharded_source(Checkpoint(StorageRouter(), str(path)))


def targets(source: Source, dtype: torch.dtype | None = None) -> dict[str, ReadTarget]:
    """Targets for all tensors; floating ones of another dtype, if it is given."""
    found = {}
    for key in source.components()["model"].tensors:
        like = STATE[key.removeprefix("model/")]
        kind = dtype if dtype is not None and like.is_floating_point() else like.dtype
        found[key.removeprefix("model/")] = ReadTarget("model", key, torch.zeros(like.shape, dtype=kind))
    return found


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_file_that_is_missing_is_an_error_before_anything_is_filled(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    source = saved(tmp_path / "a.ckpt")
    filled = targets(source, dtype)
    for file in (tmp_path / "a.ckpt").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CorruptionError, match=r"safetensors: the file is missing"):
        read_targets(source, filled.values())
    source.close()
    assert not any(target.tensor.any() for target in filled.values())
