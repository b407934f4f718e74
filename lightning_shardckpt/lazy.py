"""Lazy access to checkpoints: list their contents and read parts, without a process group.

Names and shapes need no torch. Tensors of the model have their own names; the names of others begin with ``optimizer/``
or ``trainer/``, such as ``optimizer/0/head.weight/exp_avg``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.format.index import COMPONENTS
from lightning_shardckpt.format.layout import Box, Part, Shape
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.storage.router import StorageRouter, file_path
from lightning_shardckpt.system.host import drain_all
from lightning_shardckpt.transfer.reader import fetch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype (safetensors' name, such as ``BF16``), shape and size in bytes of a whole stored tensor."""

    dtype: str
    shape: Shape
    nbytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """Description of a checkpoint.

    Attributes:
        tensors: the tensors by name, the model's first; each name of a tied tensor has an entry.
        step, epoch, world_size, topology, software: information for people; None for checkpoints of other programs.
    """

    tensors: dict[str, TensorInfo]
    step: int | None = None
    epoch: int | None = None
    world_size: int | None = None
    topology: Mapping[str, int] | None = None
    software: Mapping[str, str] | None = None


def metadata(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> Metadata:
    """Return the description of a checkpoint. Reads its root index; no torch.

    Args:
        path: a checkpoint of this package, or its URL; or one of another program, which needs torch and has no
            checksums.
        storage_options: options for URLs; see ``ShardCkptIO``.
        pre_download: a folder that caches files of URLs; see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: describes the content of the path, and suggests another one.
    """
    with open(path, storage_options=storage_options, pre_download=pre_download) as opened:
        root = opened.source.root
        tensors = {name: TensorInfo(lazy.dtype, lazy.shape, lazy.nbytes) for name, lazy in opened.items()}
        if root is None:
            return Metadata(tensors)
        return Metadata(tensors, root.step, root.epoch, root.world_size, root.topology, root.software)


def load_keys(
    path: str | os.PathLike[str],
    keys: Iterable[str],
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors by name, in the order of ``keys``. Nothing else is read.

    Args:
        path: the checkpoint; see ``metadata``.
        keys: names from the ``tensors`` of its metadata; repetitions are allowed.
        verify: compare checksums, if the format has them.
        storage_options: options for URLs; see ``ShardCkptIO``.
        pre_download: a folder that caches files of URLs; see ``ShardCkptIO``.

    Yields:
        (name, tensor), which is on the CPU and owned by the caller.

    Raises:
        KeyError: listing all missing names with similar existing ones, before anything is read.
        CorruptionError: naming file, tensor and rank.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys are several names, such as [{keys!r}], got {keys!r}")
    names = list(keys)
    with open(path, verify=verify, storage_options=storage_options, pre_download=pre_download) as opened:
        if missing := [_describe_missing(name, opened) for name in dict.fromkeys(names) if name not in opened]:
            raise KeyError(f"{os.fspath(path)!r} does not have {', '.join(missing)}")
        for name in names:
            yield name, opened[name][...]


def open(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> OpenCheckpoint:
    """Open a checkpoint as a mapping from names to lazy tensors, which are read when they are sliced.

    Use it as a context manager, or close it. Waits for the asynchronous saves of this process.

    Args:
        path: the checkpoint; see ``metadata``.
        verify: compare checksums, if the format has them. Reads the whole of every block that a slice touches.
        storage_options: options for URLs; see ``ShardCkptIO``.
        pre_download: a folder that caches files of URLs; see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: describes the content of the path, and suggests another one.
    """
    drain_all()
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    return OpenCheckpoint(open_source(file_path(path), storage, verify=verify)[0])


@dataclass(frozen=True, slots=True)
class LazyTensor(TensorInfo):
    """A stored tensor of a name in the mapping that ``open`` returns; its values are read by slicing."""

    name: str
    source: Source
    component: str
    key: str

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r}, {self.dtype} {self.shape}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a slice as a new tensor on the CPU. Only the blocks that it touches are read and verified.

        Args:
            index: integers, slices with positive steps, and at most one ``...``, as for a tensor; ``[...]`` reads all.

        Raises:
            IndexError: if the index is out of range or not supported.
            CorruptionError: naming file, tensor and rank.
        """
        import torch  # imported here, since names and shapes don't need it

        from lightning_shardckpt.state.local_tensors import TORCH_DTYPES, bytes_of

        box, rest = _sliced_box(index, self.shape)
        if box.numel:  # before memory is allocated
            self.source.checked_shape(self.component, self.key)
        part = torch.empty(box.shape, dtype=TORCH_DTYPES[self.dtype])
        parts, memory = (Part(box, (0,) * len(box.start)),), bytes_of(part)
        requests = self.source.table[self.component][self.key].requests(parts, box.shape, memory)
        fetch(self.source.path, self.source.reader, requests, verify=self.source.verify)
        return part[rest]


def _sliced_box(index: Any, shape: Shape) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that contains an indexed part of a tensor, and the index of the part in that box.

    >>> box, rest = _sliced_box((slice(1, 8, 3), ..., -1), (10, 4, 5))
    >>> box.start, box.stop, rest
    ((1, 0, 4), (8, 4, 5), (slice(None, None, 3), slice(None, None, 1), 0))
    """
    items = index if isinstance(index, tuple) else (index,)
    at = items.index(...) if ... in items else len(items)
    given = [*items[:at], *items[at + 1 :]]
    items = (*items[:at], *(slice(None),) * (len(shape) - len(given)), *items[at + 1 :])
    if len(items) != len(shape) or any(type(item) not in (int, slice) for item in items):
        raise IndexError(f"expected at most {len(shape)} integers or slices, and one ..., found {index}")
    parts = [range(size)[item] for item, size in zip(items, shape, strict=True)]  # raises for an integer out of range
    if any(isinstance(part, range) and part.step < 0 for part in parts):
        raise IndexError(f"steps must be positive, found {index}")
    ranges = [part if isinstance(part, range) else range(part, part + 1) for part in parts]
    rest = tuple(slice(None, None, part.step) if isinstance(part, range) else 0 for part in parts)
    return Box(tuple(r.start for r in ranges), tuple(max(r.start, r.stop) for r in ranges)), rest


class OpenCheckpoint(Mapping[str, LazyTensor]):
    """A checkpoint opened by ``open``: a mapping from names to lazy tensors, the model's first. Not thread-safe."""

    def __init__(self, source: Source) -> None:
        self.source, self._tensors = source, dict[str, LazyTensor]()
        for component in COMPONENTS:
            stored = source.component(component)
            prefix = "" if component == "model" else f"{component}/"
            for name, key in stored.names.items():
                spec = stored.tensors[key]
                about = spec.dtype, spec.shape, bytes_in(spec.shape, spec.dtype)
                # on a collision, the model's name wins
                self._tensors.setdefault(prefix + name, LazyTensor(*about, prefix + name, source, component, key))

    def close(self) -> None:
        """Close all files."""
        self.source.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._tensors:
            raise KeyError(f"the checkpoint does not have {_describe_missing(name, self)}")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _describe_missing(name: str, existing: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, list(existing), cutoff=0.7)
    return f"{name!r}" + (f" (but {', '.join(map(repr, similar))})" if similar else "")
