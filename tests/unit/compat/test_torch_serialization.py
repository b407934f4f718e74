"""The byte order of an archive. Oracle: torch's own files."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_shardckpt.compat.torch_serialization import byte_order


def test_an_archive_tells_its_byte_order_even_if_zipfile_would_not_read_it(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save(torch.ones(2), file)
    assert byte_order(file) == sys.byteorder
    written = bytearray(file.read_bytes())
    record = written.index(b"a/byteorder")  # in its local header, whose name torch does not look at
    written[record] ^= 1
    file.write_bytes(written)
    assert torch.load(file).tolist() == [1, 1] and byte_order(file) == sys.byteorder
    with zipfile.ZipFile(file) as archive, pytest.raises(zipfile.BadZipFile):
        archive.read("a/byteorder")


def test_an_archive_without_a_byte_order_tells_none(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"")
        archive.writestr("a/version", b"3")
    assert byte_order(tmp_path / "a.pt") is None
