"""Is a shard file a safetensors file? Oracle: the safetensors library itself, and the key that torch's DCP reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.header import DTYPE_BYTES, MAX_VALUES, Entry, checksum, decode, parse_json, plan_header
from lightning_shardckpt.staging import TORCH_DTYPES

SAVE_ID = "0123456789abcdef" * 2


def written(entries: list[Entry]) -> tuple[bytes, tuple[int, ...]]:
    header = plan_header(entries)
    return header.of(SAVE_ID), header.begins


def file_of(tensors: dict[str, torch.Tensor], start: tuple[int, ...] = (0,)) -> bytes:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    entries = [Entry(k, names[t.dtype], tuple(t.shape), start * t.ndim) for k, t in tensors.items()]
    header, begins = written(entries)
    body = b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())
    assert begins[0] == len(header)
    return header + body


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, NaNs and all; but a bool is 0 or 1."""
    count = DTYPE_BYTES[{d: n for n, d in TORCH_DTYPES.items()}[dtype]]
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, count), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def test_every_dtype_of_the_format_has_one_of_torch() -> None:
    assert DTYPE_BYTES.keys() == TORCH_DTYPES.keys()
    assert {n: torch.empty(1, dtype=d).element_size() for n, d in TORCH_DTYPES.items()} == DTYPE_BYTES


@pytest.mark.parametrize("name", [n for n in DTYPE_BYTES if n != "C128"])
def test_safetensors_reads_the_same_bits(name: str) -> None:
    tensor = random_tensor(TORCH_DTYPES[name], (3, 5))
    found = safetensors.torch.load(file_of({"a.b": tensor, "c": tensor[:0]}))
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


def test_data_begin_at_a_multiple_of_8_and_follow_without_gaps() -> None:
    for length in range(1, 20):
        entries = [Entry("k" * length, "F32", (3,), (0,)), Entry("z", "U8", (5,), (0,))]
        header, (first, second) = written(entries)
        assert (first % 8, first, second) == (0, len(header), first + 12)


def test_decode_returns_what_encode_was_given() -> None:
    entries = [Entry("a", "C64", (2, 3), (1, 0)), Entry("b", "BF16", (), ()), Entry("c", "I8", (0, 3), (0, 0))]
    header, begins = written(entries)
    found, save_id = decode(header[8:], "file x")
    assert save_id == SAVE_ID
    expected = [(e.key, e.dtype, e.shape, b, e.nbytes) for e, b in zip(entries, begins, strict=True)]
    assert [(k, s.dtype, s.shape, s.begin, s.nbytes) for k, s in found.items()] == expected


def test_the_metadata_are_strings_as_safetensors_demands(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(file_of({"a": torch.zeros(2)}))
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        metadata = file.metadata()
    assert metadata == {
        "format": "pt",
        "DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0]}}',
        "DCP_VERSION": "1.0",
        "save_id": SAVE_ID,
    }


def test_the_one_name_that_safetensors_keeps_for_itself_is_refused() -> None:
    with pytest.raises(FormatError, match="__metadata__"):
        plan_header([Entry("__metadata__", "F32", (1,), (0,))])


def test_a_header_that_no_reader_would_accept_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_shardckpt.header.MAX_HEADER_BYTES", 1000)
    with pytest.raises(FormatError, match="smaller size_per_shard"):
        plan_header([Entry("k" * 500, "F32", (1,), (0,)), Entry("j" * 500, "F32", (1,), (0,))])


METADATA = '"__metadata__":{"save_id":"x"}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"__metadata__":[]}',
        "{" + METADATA + "",
        "{" + METADATA + ',"a":1}',
        "{" + METADATA + ',"a":{}}',
        "{" + METADATA + ',"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
        "{" + METADATA + ',"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
        "{" + METADATA + ',"a":{"dtype":"F32","shape":[1],"data_offsets":[0,5]}}',
        "{" + METADATA + ',"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        "{" + METADATA + ',"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        "{" + METADATA + ',"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        "{" + METADATA + ',"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
        "{" + METADATA + ',"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}}',
        "{" + METADATA + "," + METADATA + "}",
        "{" + METADATA + ',"a":NaN}',
        '{"a":' * 20_000,
        "{" + METADATA + ',"a":' + "9" * 10_000 + "}",
    ],
    ids=lambda text: text[:60],
)
def test_a_header_that_is_none_is_a_format_error_that_names_the_file(text: str) -> None:
    with pytest.raises(FormatError, match="file x"):
        decode(text.encode(), "file x")


def test_json_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(FormatError, match="file x"):
        parse_json(b'"\xff"', "file x")


def test_json_beyond_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_shardckpt.header.MAX_JSON_BYTES", 10)
    with pytest.raises(FormatError, match="limit of 10"):
        parse_json(b" " * 11, "file x")


def test_the_checksum_is_xxh3_64_in_hexadecimal() -> None:
    assert checksum(b"") == "2d06800538d394c2"  # of the xxHash specification, seed 0
    assert checksum(b"ab", memoryview(b"c")) == checksum(b"abc") == "78af5f94892f3950"


def nested(draw: random.Random, depth: int) -> tuple[object, int]:
    """A JSON value with strings that look like structure, and how many levels it has; a list of nothing has one."""
    if depth == 0 or draw.random() < 0.3:
        return draw.choice([1, None, "", "]", "[{", '"', "\\", '\\"]', '{"a":[', "é\\\\"]), 0
    children = [nested(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    levels = 1 + max((level for _, level in children), default=0)
    values = [value for value, _ in children]
    return (values if draw.random() < 0.5 else {f'{"[" * i}"\\{i}': v for i, v in enumerate(values)}), levels


@pytest.mark.parametrize("seed", range(300))
def test_a_value_is_refused_if_and_only_if_it_is_nested_too_deep(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    value, levels = nested(draw, 6)
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1])).encode()
    for limit in (levels - 1, levels):
        monkeypatch.setattr("lightning_shardckpt.header.MAX_DEPTH", limit)
        if 0 <= limit < levels:
            with pytest.raises(FormatError, match="nested deeper"):
                parse_json(text, "x")
        elif limit >= levels:
            assert parse_json(text, "x") == value


def test_quotes_alone_take_no_memory() -> None:
    with pytest.raises(FormatError, match="JSON of more than"):
        parse_json(b'"' * (4 * MAX_VALUES + 1), "x")
