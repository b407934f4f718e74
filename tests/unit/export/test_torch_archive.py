"""The pickle and the values of a file for torch.load. Oracle: torch.save, torch.load and torch's own modules."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.torch_archive import Simplifier, archive_stored, pickle_value
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, TORCH_NAMES
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

ARRAYS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "g")
SHAPES = [(), (3,), (0,), (2, 3), (4, 1, 5), (3, 0, 2), (1,)]


def by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def by_us(value: Any) -> bytes:
    return pickle_value(value)[0]


def test_every_dtype_of_the_format_has_the_name_that_torch_gives_it() -> None:
    assert TORCH_NAMES.keys() == DTYPE_BYTES.keys()
    for name, dtype in TORCH_DTYPES.items():
        assert (str(dtype), dtype.itemsize) == (f"torch.{TORCH_NAMES[name]}", DTYPE_BYTES[name])


@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_records_are_described_as_torch_describes_tensors(dtype: str) -> None:
    tensors = {f"{shape}": torch.empty(shape, dtype=TORCH_DTYPES[dtype]) for shape in SHAPES}
    records = {name: archive_stored(dtype, tuple(one.shape), ("model", name)) for name, one in tensors.items()}
    first = f"{SHAPES[0]}"
    ours = {"tensors": records, "dtype": decode_small({"$": "dtype", "v": dtype}), "tied": records[first]}
    theirs = {"tensors": tensors, "dtype": TORCH_DTYPES[dtype], "tied": tensors[first]}
    assert by_us(ours) == by_torch(theirs)
    assert [one.nbytes for one in records.values()] == [one.nbytes for one in tensors.values()]


def test_dtypes_in_one_file_share_what_they_have_in_common() -> None:
    ours = [archive_stored(name, (2,), ("model", name)) for name in TORCH_NAMES]
    assert by_us(ours) == by_torch([torch.empty(2, dtype=dtype) for dtype in TORCH_DTYPES.values()])


def test_objects_of_torch_itself_are_written_as_torch_does() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    value = [torch.float16, torch.device("cpu"), torch.device("cuda", 1), turned, torch.uint16]
    expected = [torch.float16, torch.device("cpu"), torch.device("cuda", 1), turned.contiguous(), torch.uint16]
    pickled, (record,) = pickle_value(value)
    assert pickled == by_torch(expected)
    assert record.content == memoryview(turned.contiguous().numpy()).cast("B")


def test_a_tensor_without_plain_memory_is_refused_by_name() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(StateError, match="tensor"):
            by_us([tensor])


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_becomes_what_torch_makes_of_it(kind: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(kind)
    found = Simplifier().simplify({"a": array})["a"]
    if kind == "g":  # numpy.longdouble
        assert found == array.tolist()
        with pytest.raises(TypeError):
            torch.from_numpy(array)
        return
    assert found.dtype == torch.from_numpy(array).dtype
    assert torch.equal(found, torch.from_numpy(array))


def test_a_device_of_a_checkpoint_is_one_that_torch_knows() -> None:
    assert decode_small({"$": "device", "v": "cuda:1"}) == torch.device("cuda:1")


class Versioned(nn.Linear):
    _version = 7
    seen: object = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):  # type: ignore[no-untyped-def]
        type(self).seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_the_versions_of_a_state_dict_reach_the_module_that_loads_it() -> None:
    module = Versioned(2, 2)
    plain = Simplifier().simplify(module.state_dict())
    assert type(plain) is OrderedDict
    module.load_state_dict(OrderedDict(plain))  # a copy has no versions
    assert Versioned.seen is None
    module.load_state_dict(plain)
    assert Versioned.seen == 7
