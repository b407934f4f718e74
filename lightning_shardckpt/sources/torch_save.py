"""Files of ``torch.save`` as a source, such as Lightning's checkpoints and Hugging Face's older files.

torch maps such a file into memory, and slices of its tensors are copied from there. A truncated file is an error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from zipfile import BadZipFile, ZipFile

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.value_checks import refuse_lfs_pointer, shown
from lightning_shardckpt.sources.foreign_source import (
    ForeignBox,
    ForeignTensor,
    ForeignTensors,
    close_on_error,
    foreign_source,
)
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import FROZEN, check_frozen
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import model_leaves
from lightning_shardckpt.state.module_versions import versions_of
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import KEYS, is_lightning_dict, is_weights, lift_state_dicts
from lightning_shardckpt.state.tensor_bytes import bytes_of, dtype_name, host_bytes, is_host_memory
from lightning_shardckpt.storage.local.local_reader import LocalReader

CheckpointAndWeights: TypeAlias = tuple[dict[str, Any], dict[str, Any] | None]
"""Lightning's checkpoint dict without ``state_dict``, and the state dict; None if there is no model."""


def open_path(path: str, weights_only: bool = True, files: Sequence[str] | None = None) -> Source:
    """Open a file of ``torch.save`` with a checkpoint of Lightning, a dict of state dicts, or a state dict.

    Of several modules, the source has the one under "model" if there is one; its ``all_modules`` returns all, the names
    of several prefixed by their keys.

    Args:
        path: of the file; with ``files``, of their directory.
        weights_only: as in ``torch.load``.
        files: names of several files, each with a part of a state dict.
    """
    folder, name = os.path.split(os.path.abspath(path))
    folder, names = (path, list(files)) if files is not None else (folder, [name])
    reader = LocalReader(folder, follow_links=True)
    with close_on_error(reader):
        sizes = {name: reader.size(name) for name in names}
        contents = [_map_file(os.path.join(folder, name), weights_only) for name in names]
        return _source(path, _MappedFiles(reader, sizes), contents, "model")


def _source(path: str, files: _MappedFiles, contents: Sequence[Any], only: str | None) -> Source:
    rest, state_dict = _split(contents[0], path, only)
    for other in contents[1:]:
        state_dict = {**(state_dict or {}), **(_split(other, path, only)[1] or {})}
    leaves, documents = dict[str, Leaves](), dict[str, Any]()
    if state_dict is not None:
        leaves["model"], documents["model"] = model_leaves(state_dict)
        documents["versions"] = versions_of(state_dict, encode_small)
    if "optimizer_states" in rest:
        leaves["optimizer"], documents["optimizer"] = optimizer_leaves(rest.pop("optimizer_states"))
    if FROZEN in rest:
        check_frozen(rest[FROZEN])
        documents["frozen"] = rest.pop(FROZEN)
    mapped, tensors = dict[str, torch.Tensor](), dict[str, dict[str, ForeignTensor]]()
    for component, of_component in leaves.items():
        tensors[component] = {}
        for key, tensor in of_component.tensors.items():
            name, shape = f"{component}/{key}", tuple(tensor.shape)
            mapped[name], box = tensor, ForeignBox(Box.whole(shape), name, 0)
            tensors[component][key] = ForeignTensor(dtype_name(tensor, key), shape, (box,))
    aliases = {component: of_component.aliases for component, of_component in leaves.items()}

    def all_modules() -> Source:
        whole = _split(contents[0], path, None)[0].get(KEYS)
        return source if whole in (None, rest.get(KEYS)) else _source(path, files, contents, None)

    located = ForeignTensors(path, _MappedTensors(*files, mapped), tensors, aliases)
    source = foreign_source(located, documents, rest, all_modules)
    return source


class _MappedFiles(NamedTuple):
    """The reader of the files' directory, and the sizes of the mapped files by name."""

    reader: LocalReader
    sizes: Mapping[str, int]


class _MappedTensors:
    """A reader for which every tensor is a file of its row-major bytes, copied from the mapped files.

    Args:
        files: the reader of the files' directory.
        sizes: of the mapped files, by name. The memory of a file that was truncated cannot be read without a signal.
        tensors: by the name of the file that a tensor is for callers.
    """

    high_latency = False

    def __init__(self, files: LocalReader, sizes: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        self._files, self._sizes, self._tensors = files, sizes, tensors
        self._held: tuple[str, memoryview] = ("", memoryview(b""))

    def size(self, name: str) -> int:
        """Return the length of a tensor in bytes."""
        return self._tensors[name].nbytes

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with a tensor's row-major bytes from ``offset`` on."""
        for file, size in self._sizes.items():
            if (now := self._files.size(file)) < size:
                raise EOFError(f"{file} has {now} bytes, it had {size} when it was opened")
        tensor = self._tensors[name]
        if not is_host_memory(tensor) and self._held[0] != name:
            self._held = name, host_bytes(tensor)
        content = bytes_of(tensor) if is_host_memory(tensor) else self._held[1]
        piece = torch.frombuffer(content, dtype=torch.uint8, count=len(target), offset=offset)
        torch.frombuffer(target, dtype=torch.uint8).copy_(piece)  # unlike memoryview's copy, it releases the GIL

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._tensors)

    def clone(self) -> _MappedTensors:
        """Return a reader of the same tensors for another thread."""
        return _MappedTensors(self._files.clone(), self._sizes, self._tensors)

    def close(self) -> None:
        """Close the files; the mapping lives as long as the tensors."""
        self._files.close()


def _map_file(path: str, weights_only: bool) -> Any:
    """Return the content of a file of ``torch.save``, with mapped tensors."""
    _refuse_compressed(path)
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError as error:
        if "mmap can only be used" in str(error):
            with open(path, "rb") as file:
                refuse_lfs_pointer(file.read(64), repr(path))
            raise FormatError(
                f"{path!r} is not a file that torch can map into memory: it is from torch before 1.6, or not a file of "
                f"torch.save. If it is old, save it again: torch.save(torch.load(path, weights_only=True), path)"
            ) from None
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {str(error).partition(chr(10))[0]}") from error
    except (LookupError, TypeError, ValueError, EOFError, OverflowError, AttributeError, AssertionError) as error:
        if not weights_only:  # may come from executed code
            raise
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {shown(str(error))}") from error


def _refuse_compressed(path: str) -> None:
    """Refuse an archive with a compressed entry: torch would map the compressed bytes as values."""
    try:
        with ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
    except (OSError, BadZipFile, NotImplementedError, ValueError, LookupError, struct.error):
        return  # torch.load says what it is
    if packed:
        raise FormatError(
            f"{path!r} was packed again by another program: {shown(packed[0])} in it is compressed, so it can't be "
            "mapped into memory. Save it again: torch.save(torch.load(path, weights_only=True), path)"
        )


def _split(content: Any, path: str, only: str | None) -> CheckpointAndWeights:
    """Split the content of a file into Lightning's other keys and the state dict; None if it has only optimizers."""
    is_dict = isinstance(content, dict)
    if is_dict and isinstance(content.get("state"), dict) and isinstance(content.get("param_groups"), list):
        return {"optimizer_states": [content]}, None
    if isinstance(content, Mapping) and not is_weights(content):
        checkpoint = dict(content) if is_lightning_dict(content) else lift_state_dicts(content, only=only)
        state_dict = checkpoint.pop("state_dict", None)
        if isinstance(state_dict, Mapping) or "optimizer_states" in checkpoint:
            return checkpoint, state_dict
    if is_weights(content):
        return {}, content
    raise CheckpointNotFoundError(
        f"{path!r} is a file, but no checkpoint: it has no state_dict, nor the state of a module or an optimizer under "
        "another key, nor is it a dict of tensors"
    )
