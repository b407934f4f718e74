"""What torch.save writes besides values is what torch.load asks for. Oracle: torch's own files and modules."""

from __future__ import annotations

import io
import pickletools
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_shardckpt.compat.torch_serialization import attach_versions, byte_order, storage_class, versions_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_pickle_of_torch_names_the_class_of_a_storage(dtype: torch.dtype) -> None:
    tensor, file = torch.zeros(2, dtype=dtype), io.BytesIO()
    torch.save(tensor, file)
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read("archive/data.pkl")
    named = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    storage = tensor.__reduce_ex__(2)[1][0]  # type: ignore[no-untyped-call]  # torch's; what it has to pickle
    assert isinstance(storage, torch.storage.TypedStorage)
    assert f"torch {storage_class(storage).__name__}" in named


class Versioned(nn.Linear):
    _version = 7
    seen: object = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):  # type: ignore[no-untyped-def]
        type(self).seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_that_are_attached_again_reach_the_module_that_loads() -> None:
    module = Versioned(2, 2)
    state_dict = module.state_dict()
    assert isinstance(state_dict, OrderedDict)
    copy = OrderedDict(state_dict)
    assert versions_of(copy) is None
    attach_versions(copy, versions_of(state_dict))
    module.load_state_dict(copy)
    assert Versioned.seen == 7


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
