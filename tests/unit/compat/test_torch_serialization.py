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

from lightning_shardckpt.compat.torch_serialization import LEGACY_STORAGES, attach_versions, byte_order, versions_of
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_a_pickle_of_torch_names_the_class_of_a_storage(dtype: torch.dtype) -> None:
    file = io.BytesIO()
    torch.save(torch.zeros(2, dtype=dtype), file)
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read("archive/data.pkl")
    named = {argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}
    name = str(dtype).removeprefix("torch.")
    legacy = LEGACY_STORAGES.get(name)
    expected = {"torch.storage UntypedStorage", f"torch {name}"} if legacy is None else {f"torch {legacy}"}
    assert {one for one in named if one.startswith(("torch ", "torch.storage "))} == expected


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
