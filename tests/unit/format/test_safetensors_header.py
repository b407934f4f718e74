"""A shard file is a safetensors file. Oracle: the safetensors library itself, and the key that torch's DCP reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.safetensors_header import HeaderEntry, parse_header, plan_header
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, checksum
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES

SAVE_ID = "0123456789abcdef" * 2


def written(entries: list[HeaderEntry]) -> tuple[bytes, tuple[int, ...]]:
    header = plan_header(entries)
    return header.of(SAVE_ID), header.begins


def file_of(tensors: dict[str, torch.Tensor], start: tuple[int, ...] = (0,)) -> bytes:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    entries = [(k, names[t.dtype], tuple(t.shape), start * t.ndim) for k, t in tensors.items()]
    header, begins = written(entries)
    body = b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())
    assert begins[0] == len(header)
    return header + body


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, NaNs and all; but a bool is 0 or 1."""
    count = DTYPE_BYTES[{d: n for n, d in TORCH_DTYPES.items()}[dtype]]
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, count), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", [n for n in DTYPE_BYTES if n != "C128"])
def test_safetensors_reads_the_same_bits(name: str, tmp_path: Path) -> None:
    tensor = random_tensor(TORCH_DTYPES[name], (3, 5))
    (tmp_path / "a").write_bytes(file_of({"a.b": tensor, "c": tensor[:0]}))
    found = safetensors.torch.load_file(tmp_path / "a")  # safetensors 0.8 knows fewer dtypes in ``load``
    assert found["a.b"].dtype == tensor.dtype
    assert torch.equal(found["a.b"].view(torch.uint8), tensor.view(torch.uint8))
    assert found["c"].shape == (0, 5)


def test_complex_doubles_are_pairs_of_doubles_to_others() -> None:
    tensor = random_tensor(torch.complex128, (2, 3))
    content = file_of({"z": tensor}, (4,))
    found = safetensors.torch.load(content)["z"]
    assert torch.equal(found.view(torch.uint8), torch.view_as_real(tensor).contiguous().view(torch.uint8))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]) == {"z": {"saved_offsets": [4, 4, 0]}}


def test_a_0_dim_tensor_and_any_text_as_a_name_pass() -> None:
    tensors = {'w "quoted" \\ ✓ é': torch.tensor(1.5), "two\nlines\t\u2028": torch.tensor(2), ",": torch.tensor(3)}
    content = file_of(tensors)
    assert safetensors.torch.load(content) == tensors
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header["__metadata__"]["DCP_SHARDING_INFO"]).keys() == tensors.keys()


METADATA = '"__metadata__":{"save_id":"x"}'


@pytest.mark.parametrize(
    "text", ["", "{" + METADATA + ',"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', '{"a":' * 20_000], ids=len
)
def test_a_header_that_is_none_is_a_format_error_that_names_the_file(text: str) -> None:
    with pytest.raises(FormatError, match="file x"):
        parse_header(len(text).to_bytes(8, "little") + text.encode(), "file x")


def test_the_checksum_is_xxh3_64_in_hexadecimal() -> None:
    assert checksum(b"") == "2d06800538d394c2"  # of the xxHash specification, seed 0
    assert checksum(memoryview(b"abc")) == checksum(b"abc") == "78af5f94892f3950"
