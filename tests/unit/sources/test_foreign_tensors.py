"""Tensors of other formats as boxes of bytes in files. Oracles: the tensor that was cut, and slices of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignTensor, foreign_source
from lightning_shardckpt.sources.reading import ReadTarget, read_targets
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.transfer.file_filler import Region, fill

BOXES = {"a": Box((0, 0), (300, 200)), "b": Box((0, 200), (300, 301)), "c": Box((300, 0), (700, 301))}
JUNK = b"head"  # before the bytes of each box


@pytest.fixture
def whole(tmp_path: Path) -> torch.Tensor:
    """A tensor in three files: two blocks of columns above a block of rows."""
    tensor = torch.randn(700, 301, generator=torch.Generator().manual_seed(1))
    for name, box in BOXES.items():
        part = tensor[box.start[0] : box.stop[0], box.start[1] : box.stop[1]].contiguous()
        (tmp_path / name).write_bytes(JUNK + part.numpy().tobytes())
    return tensor


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[LocalReader]:
    found = LocalReader(str(tmp_path))
    yield found
    found.close()


def described(**changes: Box) -> ForeignTensor:
    boxes = BOXES | changes
    return ForeignTensor("F32", (700, 301), tuple(ForeignBox(box, name, len(JUNK)) for name, box in boxes.items()))


def test_boxes_of_several_files_fill_a_tensor(whole: torch.Tensor, reader: LocalReader) -> None:
    source = foreign_source("here", reader, {"model": {"w": described()}})
    target = torch.empty(700, 301)
    read_targets(source, [ReadTarget("model", "w", target)])
    assert torch.equal(target, whole)
    part = torch.zeros(700, 301)
    region = Box((290, 190), (310, 210))
    read_targets(source, [ReadTarget("model", "w", part, region=region)])
    expected = torch.zeros(700, 301)
    expected[290:310, 190:210] = whole[290:310, 190:210]
    assert torch.equal(part, expected)


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


def test_boxes_of_several_files_become_a_region_of_one(
    whole: torch.Tensor, reader: LocalReader, tmp_path: Path
) -> None:
    tensors = foreign_source("here", reader, {"model": {"w": described()}})
    file = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    fill(file, [Region(8, whole.nbytes, ("model", "w"))], tensors, lambda n: None)
    os.close(file)
    assert (tmp_path / "out").read_bytes() == bytes(8) + whole.numpy().tobytes()


def test_boxes_that_leave_a_gap_or_overlap_are_refused(whole: torch.Tensor, reader: LocalReader) -> None:
    with pytest.raises(FormatError, match=r"'w', F32 \(700, 301\): 210399 of 210700 elements"):
        foreign_source("here", reader, {"model": {"w": described(c=Box((301, 0), (700, 301)))}})
    with pytest.raises(FormatError, match="overlap"):
        foreign_source("here", reader, {"model": {"w": described(b=Box((0, 199), (300, 301)))}})


def test_a_file_that_is_too_short_or_missing_is_named(
    whole: torch.Tensor, reader: LocalReader, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "b", 1000)
    with pytest.raises(CorruptionError, match=r"file b: 'w' should be at bytes 4 to 121204 of 1000"):
        foreign_source("here", reader, {"model": {"w": described()}})
    (tmp_path / "b").unlink()
    reader.close()
    with pytest.raises(CorruptionError, match=r"file b: the file is missing"):
        foreign_source("here", LocalReader(str(tmp_path)), {"model": {"w": described()}})
