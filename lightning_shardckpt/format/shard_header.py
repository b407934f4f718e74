"""Headers of shard files: safetensors headers with the save id, and with the position of each shard in its tensor.

Positions have the form that torch's HuggingFaceStorageReader reads (``DCP_SHARDING_INFO``), so that torch alone can
load and reshard. Source of the key: ``torch/distributed/checkpoint/_hf_utils.py`` (torch 2.13).
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
from lightning_shardckpt.format.strict_json import texts
from lightning_shardckpt.format.value_checks import SAVE_ID_LENGTH

_SAVE_ID = "save_id"
_NO_ID = "0" * SAVE_ID_LENGTH
_ALIGNMENT = 8


HeaderEntry: TypeAlias = tuple[str, str, Shape, Shape]
"""One tensor of a shard file, a box of a tensor: the tensor's key, its dtype, the shape of the box, and its corner."""


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The first bytes of a shard file but for the save id, and where in the file each entry's data begins, in order."""

    _before_id: bytes
    _after_id: bytes
    begins: tuple[int, ...]

    def of(self, save_id: str) -> bytes:
        """The bytes for one save."""
        return self._before_id + save_id.encode() + self._after_id


def plan_header(entries: Sequence[HeaderEntry]) -> ShardHeader:
    """The header of a shard file in which the data of the entries follow one another without gaps.

    Raises:
        FormatError: for a name that a header cannot hold, or for more of them than a reader would accept.
    """
    kinds: dict[tuple[str, Shape, Shape], tuple[str, Shape, str]] = {}  # many entries are alike
    tensors, items = list[NamedTensor](), []
    for (key, dtype, shape, start), name in zip(entries, texts([entry[0] for entry in entries]), strict=True):
        kind = kinds.get((dtype, shape, start))
        if kind is None:
            corner = [*start, 0] if dtype == "C128" else list(start)
            kind = *stored_as(dtype, shape), json.dumps({"saved_offsets": corner})
            kinds[dtype, shape, start] = kind
        stored_dtype, stored_shape, offsets = kind
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
    id_at = header.rindex(_NO_ID.encode())  # nothing but brackets and spaces follows it
    return ShardHeader(header[:id_at], header[id_at + SAVE_ID_LENGTH :], begins)


def stored_as(dtype: str, shape: Shape) -> tuple[str, Shape]:
    """Dtype and shape in the header; C128, which safetensors lacks, is stored as pairs of F64.

    >>> stored_as("BF16", (2,)), stored_as("C128", (2,))
    (('BF16', (2,)), ('F64', (2, 2)))
    """
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, shape)


def save_id_of(header: Header) -> str:
    """The save that a shard file says it belongs to."""
    return str(header.metadata.get(_SAVE_ID))
