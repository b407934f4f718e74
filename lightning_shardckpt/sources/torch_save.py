"""Files of ``torch.save`` as a source, such as Lightning's checkpoints and Hugging Face's older files.

torch maps such a file into memory, and slices of its tensors are copied from there. A truncated file is an error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.value_checks import refuse_lfs_pointer, shown
from lightning_shardckpt.sources.foreign_source import (
    ForeignBox,
    ForeignTensor,
    close_on_error,
    foreign_source,
)
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import FROZEN, check_document
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import model_leaves
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import is_lightning_dict, is_weights, lift_state_dicts, versions_of
from lightning_shardckpt.state.tensor_bytes import dtype_name, host_bytes
from lightning_shardckpt.storage.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader


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
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        sizes = {name: reader.size(name) for name in names}
        first, *others = [_map_file(os.path.join(folder, name), weights_only) for name in names]
        mapped, nbytes = dict[str, torch.Tensor](), dict[str, int]()

        def locate(name: str, tensor: torch.Tensor) -> ForeignTensor:
            mapped[name], nbytes[name], shape = tensor, tensor.nbytes, tuple(tensor.shape)
            return ForeignTensor(dtype_name(tensor, name), shape, (ForeignBox(Box.whole(shape), name, 0),))

        def load(files: Reader, name: str) -> torch.Tensor:
            for file, size in sizes.items():  # to read the memory of a truncated file would end in a signal
                if (now := files.size(file)) < size:
                    raise EOFError(f"{file} has {now} bytes, it had {size} when it was opened")
            return mapped[name]

        def source(only: str | None) -> Source:
            rest, state_dict = _split(first, path, only)
            for other in others:
                state_dict = {**(state_dict or {}), **(_split(other, path, only)[1] or {})}
            tensors = LoadedTensors(reader, nbytes, load)
            return source_of_dicts(path, tensors, state_dict, rest, locate, lambda: source(None))

        return source("model")


def source_of_dicts(
    path: str,
    reader: Reader,
    state_dict: Mapping[str, Any] | None,
    rest: dict[str, Any],
    locate: Callable[[str, torch.Tensor], ForeignTensor],
    all_modules: Callable[[], Source] | None = None,
) -> Source:
    """Return the source of Lightning's checkpoint dict.

    Args:
        path: of the checkpoint.
        reader: of the stored tensors.
        state_dict: of the model; None if there is none.
        rest: the other entries; changed.
        locate: returns the stored tensor of one in the dicts, given a name for it and the tensor.
        all_modules: see ``Source``.
    """
    leaves, documents = dict[str, Leaves](), dict[str, Any]()
    if state_dict is not None:
        leaves["model"], documents["model"] = model_leaves(state_dict)
        documents["versions"] = versions_of(state_dict, encode_small)
    if "optimizer_states" in rest:
        leaves["optimizer"], documents["optimizer"] = optimizer_leaves(rest.pop("optimizer_states"))
    if FROZEN in rest:
        check_document("frozen", rest[FROZEN])
        documents["frozen"] = rest.pop(FROZEN)
    tensors = {n: {key: locate(f"{n}/{key}", t) for key, t in one.tensors.items()} for n, one in leaves.items()}
    aliases = {name: one.aliases for name, one in leaves.items()}
    return foreign_source(path, reader, tensors, aliases, documents, rest, all_modules)


class LoadedTensors:
    """A reader for which every tensor is a file of its row-major bytes, copied from what ``load`` returns.

    Implements ``Reader``.

    Args:
        files: the reader of the files that hold the tensors.
        nbytes: of each tensor, by name.
        load: returns a tensor, given a reader of the files and the name. Threads call it at the same time.
    """

    high_latency = False

    def __init__(self, files: Reader, nbytes: Mapping[str, int], load: Callable[[Reader, str], torch.Tensor]) -> None:
        self._files, self._nbytes, self._load = files, nbytes, load
        self._held: tuple[torch.Tensor | None, memoryview] = None, memoryview(b"")

    def size(self, name: str) -> int:
        """Return the length of a tensor in bytes."""
        return self._nbytes[name]

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with a tensor's row-major bytes from ``offset`` on."""
        tensor = self._load(self._files, name)
        held = self._held
        if held[0] is not tensor:
            held = self._held = tensor, host_bytes(tensor)
        piece = torch.frombuffer(held[1], dtype=torch.uint8, count=len(target), offset=offset)
        torch.frombuffer(target, dtype=torch.uint8).copy_(piece)  # unlike memoryview's copy, it releases the GIL

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._nbytes)

    def close(self) -> None:
        """Close the files."""
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


def _split(content: Any, path: str, only: str | None) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
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
