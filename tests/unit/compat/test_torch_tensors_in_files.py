"""The byte order of an archive, and how its pickle makes a tensor again. Oracle: torch's own files and tensors."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_shardckpt.compat.torch_tensors import byte_order, rebuilding


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16])  # of a typed storage, and of an untyped one
def test_a_tensor_is_made_again_as_torch_itself_does(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    function, arguments = tensor.__reduce_ex__(2)
    untyped = dtype if dtype is torch.uint16 else None
    assert rebuilding(arguments[0], (2, 3), (3, 1), untyped) == (function, arguments)
