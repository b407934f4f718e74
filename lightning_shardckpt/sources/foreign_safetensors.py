"""Where are the tensors in files of safetensors that any program wrote?"""

from __future__ import annotations

from typing import Any

from lightning_shardckpt.box import Box
from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.foreign import ForeignBox, ForeignTensor
from lightning_shardckpt.header import MAX_HEADER_BYTES, decode_foreign, parse_json
from lightning_shardckpt.storage.protocol import Reader


def tensors_of(reader: Reader, name: str, where: str) -> dict[str, ForeignTensor]:
    """The tensors of a file by name, from its header; ``where`` is the path of its directory, for messages.

    Raises:
        FormatError: if the header is none, or says what cannot be.
        CorruptionError: if the file is missing, or ends before its header does.
    """
    found = decode_foreign(_header(reader, name, where), f"{where!r}, file {name}")
    return {key: ForeignTensor(t.dtype, t.shape, _one_box(t.shape, name, t.begin)) for key, t in found.items()}


def metadata_of(reader: Reader, name: str, where: str) -> dict[str, Any]:
    """What the header of a file says beside its tensors; arguments and errors are those of ``tensors_of``."""
    found = parse_json(_header(reader, name, where), f"{where!r}, file {name}")
    metadata = found.get("__metadata__") if isinstance(found, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _header(reader: Reader, name: str, where: str) -> bytes:
    where = f"{where!r}, file {name}"
    prefix = bytearray(8)
    try:
        size = reader.size(name)
        reader.read_into(name, 0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise FormatError(
                f"{where}: no file of safetensors: its header would have {length} bytes, more than {MAX_HEADER_BYTES}"
            )
        if length > size - 8:
            raise CorruptionError(f"{where}: the header claims {length} bytes of a file of {size}; was it cut off?")
        text = bytearray(length)
        reader.read_into(name, 8, memoryview(text))
    except FileNotFoundError:
        raise CorruptionError(f"{where}: the file is missing") from None
    except EOFError as error:
        raise CorruptionError(f"{where}: no file of safetensors: {error}") from None
    return bytes(text)


def _one_box(shape: tuple[int, ...], name: str, begin: int) -> tuple[ForeignBox, ...]:
    return (ForeignBox(Box.whole(shape), name, begin),)
