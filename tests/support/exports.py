"""What tests of exports share: comparisons of bits, damage, and small windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_shardckpt.system.tuning import TUNING, Tuning


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().flatten().view(torch.uint8) if t.numel() else t for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def in_small_windows(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> Tuning:
    """Have every thread there may be take part, in steps of a size that a test can afford."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    return replace(TUNING, fill_window_bytes=nbytes)
