"""Headers of shard files: safetensors headers with the save id and the position of each shard in its tensor.

Positions are in the form of torch's HuggingFaceStorageReader (``DCP_SHARDING_INFO``), so that torch alone can load and
reshard the tensors. Source of the key: ``torch/distributed/checkpoint/_hf_utils.py`` (torch 2.13).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    NamedTensor,
    build_header,
)
from lightning_shardckpt.format.strict_json import to_json_texts
from lightning_shardckpt.format.value_checks import SAVE_ID_LENGTH

_SAVE_ID = "save_id"
_NO_ID = "0" * SAVE_ID_LENGTH
_ALIGNMENT = 8


HeaderEntry: TypeAlias = tuple[str, str, Shape, Shape]
"""A box in a shard file: the tensor's key and dtype, and the shape and the start of the box."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of a shard file with a gap for the save id, and the offset of each entry's data in the file."""

    _before_id: bytes
    _after_id: bytes
    begins: tuple[int, ...]

    def of(self, save_id: str) -> bytes:
        """Return the bytes of the header for one save."""
        return self._before_id + save_id.encode() + self._after_id


def plan_header(entries: Sequence[HeaderEntry]) -> ShardHeader:
    """Return the header of a shard file in which the entries' data follow one another without gaps.

    Raises:
        FormatError: if a header cannot hold a name, or is longer than a reader accepts.
    """
    stored_forms: dict[tuple[str, Shape, Shape], tuple[str, Shape, str]] = {}  # shared by entries with equal boxes
    tensors, items = list[NamedTensor](), []
    for (key, dtype, shape, start), name in zip(entries, to_json_texts([entry[0] for entry in entries]), strict=True):
        if (dtype, shape, start) not in stored_forms:
            saved_offsets = [*start, 0] if dtype == "C128" else list(start)
            offsets = json.dumps({"saved_offsets": saved_offsets})
            stored_forms[dtype, shape, start] = *to_header_type(dtype, shape), offsets
        stored_dtype, stored_shape, offsets = stored_forms[dtype, shape, start]
        tensors.append((key, stored_dtype, stored_shape))
        items.append(f"{name}: {offsets}")
    metadata = {
        "format": "pt",
        "DCP_SHARDING_INFO": f"{{{', '.join(items)}}}",
        "DCP_VERSION": "1.0",
        _SAVE_ID: _NO_ID,
    }
    header, begins = build_header(tensors, metadata, alignment=_ALIGNMENT, metadata_first=False)
    nbytes = len(header) - LENGTH_BYTES
    if nbytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"a shard file of {len(entries)} tensors needs a header of {nbytes} bytes, more than "
            f"{MAX_HEADER_BYTES}; use a smaller size_per_shard"
        )
    id_at = header.rindex(_NO_ID.encode())  # only brackets and spaces follow it
    return ShardHeader(header[:id_at], header[id_at + SAVE_ID_LENGTH :], begins)


def to_header_type(dtype: str, shape: Shape) -> tuple[str, Shape]:
    """Return the dtype and shape that a header has; C128, which safetensors lacks, is stored as pairs of F64.

    >>> to_header_type("BF16", (2,)), to_header_type("C128", (2,))
    (('BF16', (2,)), ('F64', (2, 2)))
    """
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, shape)


def save_id_of(header: Header) -> str:
    """Return the id of the save that a shard file says it belongs to."""
    return str(header.metadata.get(_SAVE_ID))
