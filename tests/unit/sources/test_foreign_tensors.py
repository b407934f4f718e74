"""Tensors of other formats are read by slices. Oracle: slices of the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_shardckpt.format.box import Box
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignTensor, foreign_source
from lightning_shardckpt.sources.reading import ReadTarget, read_targets
from lightning_shardckpt.storage.local_reader import LocalReader


def test_columns_and_blocks_are_read_without_what_lies_between_them(tmp_path: Path) -> None:
    tensor = torch.randn(300, 40, 64)
    (tmp_path / "w").write_bytes(tensor.numpy().tobytes())
    reader = Counting(LocalReader(str(tmp_path)))
    stored = ForeignTensor("F32", (300, 40, 64), (ForeignBox(Box.whole((300, 40, 64)), "w", 0),))
    source = foreign_source("here", reader, {"model": {"w": stored}})
    for region in [Box((0, 0, 0), (300, 20, 64)), Box((7, 13, 0), (9, 40, 64)), Box((0, 39, 0), (300, 40, 64))]:
        target, reader.nbytes = torch.zeros(300, 40, 64), 0
        read_targets(source, [ReadTarget("model", "w", target, region=region)])
        place = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
        assert torch.equal(target[place], tensor[place])
        assert region.numel * 4 <= reader.nbytes <= 1.1 * region.numel * 4
        target[place] = 0
        assert not target.any()
    source.close()


class Counting:
    """A reader that counts what is read."""

    def __init__(self, inner: LocalReader) -> None:
        self._inner, self.nbytes = inner, 0

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.nbytes += len(target)
        self._inner.read_into(name, offset, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
