"""Tensors in safetensors files that any program wrote."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.safetensors_header import MAX_HEADER_BYTES, HeaderLengthError, parse_header, read_header
from lightning_shardckpt.sources.foreign_tensors import ForeignBox, ForeignTensor
from lightning_shardckpt.storage.protocol import Reader


def tensors_of(reader: Reader, name: str, where: str) -> dict[str, ForeignTensor]:
    """The tensors of a file by name, from its header; ``where`` is the path of its directory, for messages.

    Raises:
        FormatError: if the header is none, or says what cannot be.
        CorruptionError: if the file is missing, or ends before its header does.
    """
    found = parse_header(_header(reader, name, where), f"{where!r}, file {name}", needs_metadata=False)
    return {key: ForeignTensor(t.dtype, t.shape, _one_box(t.shape, name, t.begin)) for key, t in found.tensors.items()}


def metadata_of(reader: Reader, name: str, where: str) -> dict[str, Any]:
    """Return what the header of a file says beside its tensors; arguments and errors are those of ``tensors_of``."""
    return parse_header(_header(reader, name, where), f"{where!r}, file {name}", needs_metadata=False).metadata


def _header(reader: Reader, name: str, where: str) -> bytes:
    where = f"{where!r}, file {name}"
    try:
        return read_header(partial(reader.read_into, name), reader.size(name))
    except FileNotFoundError:
        raise CorruptionError(f"{where}: the file is missing") from None
    except EOFError as error:
        raise CorruptionError(f"{where}: no file of safetensors: {error}") from None
    except HeaderLengthError as error:
        if error.length <= MAX_HEADER_BYTES:
            raise CorruptionError(f"{where}: {error}; was it cut off?") from None
        raise FormatError(
            f"{where}: no file of safetensors: its header would have {error.length} bytes, more than {MAX_HEADER_BYTES}"
        ) from None


def _one_box(shape: tuple[int, ...], name: str, begin: int) -> tuple[ForeignBox, ...]:
    return (ForeignBox(Box.whole(shape), name, begin),)
