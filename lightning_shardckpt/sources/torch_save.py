"""Files of ``torch.save`` as a source, such as Lightning's checkpoints and Hugging Face's older files.

torch maps such a file into memory, and slices of its tensors are copied from there. A truncated file is an error.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.sources.source import MALFORMED, ForeignBox, ForeignTensor, Source, list_tensors
from lightning_shardckpt.state.documents import FROZEN, check_document
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES, dtype_name, host_bytes
from lightning_shardckpt.state.model import Leaves, model_leaves
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.state_dicts import VERSION, is_lightning_dict, is_weights, lift_state_dicts, versions_of
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.protocol import Reader

_HELD_TENSORS = 2  # two threads are rarely further apart


def open_path(path: str, weights_only: bool = True, files: Sequence[str] | None = None) -> Source:
    """Open a file of ``torch.save`` with a checkpoint of Lightning, a dict of state dicts, or a state dict.

    Of several modules, the source has the one under "model" if there is one; its ``all_modules`` returns all, the names
    of several prefixed by their keys. With ``files``, the path is their directory, and each has a part of a state dict.
    """
    folder, names = (path, files) if files else (os.path.dirname(os.path.abspath(path)), [os.path.basename(path)])
    tensors = DictTensors(LocalReader(folder, follow_links=True), names)
    content, *others = [map_file(os.path.join(folder, name), weights_only) for name in names]
    content = {**content, **{key: value for one in others for key, value in one.items()}} if others else content

    def source(only: str | None) -> Source:
        rest, state_dict = _split(content, path, only)
        return source_of_dicts(path, tensors, state_dict, rest, lambda: source(None))

    return source("model")


class DictTensors:
    """The tensors of dicts from files; a ``Reader`` of them, as if each were a file of its row-major bytes.

    A tensor is in memory, or a stand-in on the meta device for parts of others, which ``loads`` returns by the names of
    their "files" when they are read. ``mapped`` are names of files that are mapped into memory.
    """

    high_latency = False

    def __init__(self, files: Reader, mapped: Iterable[str] = ()) -> None:
        self._files, self._lock = files, Lock()
        self._sizes = {name: files.size(name) for name in mapped}
        self._located = dict[int, tuple[torch.Tensor, ForeignTensor]]()
        self.loads = dict[str, Callable[[], torch.Tensor]]()
        self._bytes = lru_cache(_HELD_TENSORS)(lambda name: host_bytes(self.loads[name]()))

    def stand_in(self, tensor: ForeignTensor) -> torch.Tensor:
        """Return a tensor without memory, for one in "files" of ``loads``."""
        new = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        self._located[id(new)] = new, tensor
        return new

    def locate(self, name: str, tensor: torch.Tensor) -> ForeignTensor:
        """Return the stored tensor for one in a dict, given a name for it."""
        if id(tensor) in self._located:
            return self._located[id(tensor)][1]
        self.loads[name], shape = lambda: tensor, tuple(tensor.shape)
        return ForeignTensor(dtype_name(tensor, name), shape, (ForeignBox(Box.whole(shape), name, 0),))

    def size(self, name: str) -> int:
        """Return the length of a tensor in bytes, which is not known before it is loaded: no limit."""
        return sys.maxsize

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with a tensor's row-major bytes from ``offset`` on."""
        for file, size in self._sizes.items():  # to read the memory of a truncated file would end in a signal
            if (now := self._files.size(file)) < size:
                raise EOFError(f"{file} has {now} bytes, it had {size} when it was opened")
        with self._lock:  # threads read near ranges, most often of the same tensor
            content = self._bytes(name)
        piece = torch.frombuffer(content, dtype=torch.uint8, count=len(target), offset=offset)
        torch.frombuffer(target, dtype=torch.uint8).copy_(piece)  # unlike memoryview's copy, it releases the GIL

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self.loads)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def source_of_dicts(
    path: str,
    tensors: DictTensors,
    state_dict: Mapping[str, Any] | None,
    rest: Mapping[str, Any],
    all_modules: Callable[[], Source] | None = None,
) -> Source:
    """Return the source of a model's state dict, if there is one, and the rest of Lightning's checkpoint dict."""
    rest = dict(rest)
    leaves, documents = dict[str, Leaves](), dict[str, Any]()
    if state_dict is not None:
        leaves["model"], values = model_leaves(state_dict)
        documents["model"] = {key: encode_small(value, f"state_dict/{key}") for key, value in values.items()}
        documents["versions"] = versions_of(state_dict, encode_small)
    if "optimizer_states" in rest:
        leaves["optimizer"], documents["optimizer"] = optimizer_leaves(rest.pop("optimizer_states"))
    if FROZEN in rest:
        check_document("frozen", rest[FROZEN])
        documents["frozen"] = rest.pop(FROZEN)
    stored = {n: {key: tensors.locate(f"{n}/{key}", t) for key, t in of.tensors.items()} for n, of in leaves.items()}
    return Source(
        path,
        tensors,
        {component: list_tensors(tensors, located) for component, located in stored.items()},
        document=lambda role, rank=0: documents.get(role),
        trainer=lambda tensor: dict(rest),
        aliases={component: of.aliases for component, of in leaves.items()},
        all_modules=all_modules,
        has_weights_only=state_dict is not None and documents.get("optimizer") is None and VERSION not in rest,
    )


def map_file(path: str, weights_only: bool) -> Any:
    """Return the content of a file of ``torch.save``, with mapped tensors."""
    try:
        with ZipFile(path) as archive:  # torch would map the bytes of a compressed entry as values
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
        if not packed:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except FileNotFoundError:
        raise CorruptionError(f"{path!r}: the file is missing") from None
    except (*MALFORMED, RuntimeError, BadZipFile, struct.error) as error:
        raise CorruptionError(f"{path!r}: torch.load cannot read it: {shown(str(error))}") from error
    raise FormatError(
        f"{path!r} was packed again by another program: {shown(packed[0])} in it is compressed, so it can't be mapped "
        "into memory. Save it again: torch.save(torch.load(path, weights_only=True), path)"
    )


def _split(content: Any, path: str, only: str | None) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Split the content of a file into Lightning's other keys and the state dict; None if it has only optimizers."""
    if is_weights(content):
        return {}, content
    if isinstance(content, Mapping):
        if isinstance(content.get("state"), dict) and isinstance(content.get("param_groups"), list):
            return {"optimizer_states": [content]}, None
        checkpoint = dict(content) if is_lightning_dict(content) else lift_state_dicts(content, only=only)
        state_dict = checkpoint.pop("state_dict", None)
        if isinstance(state_dict, Mapping) or "optimizer_states" in checkpoint:
            return checkpoint, state_dict
    raise CheckpointNotFoundError(
        f"{path!r} is a file, but no checkpoint: it has no state_dict, nor the state of a module or an optimizer under "
        "another key, nor is it a dict of tensors"
    )
