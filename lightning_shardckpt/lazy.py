"""List what is in a checkpoint and read parts of it, without a process group; names and shapes without torch.

Tensors of the model have their own names; others begin with ``optimizer/`` or ``trainer/``, as in
``optimizer/0/head.weight/exp_avg``. So do values that are stored in documents, see ``state.documents``; those
that only one rank knew begin with ``rank/<rank>/``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.format.index_json import COMPONENTS
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.detect import recognise
from lightning_shardckpt.sources.did_you_mean import READABLE, open_checkpoint
from lightning_shardckpt.state.documents import DocumentEntry, ValueInfo, document_of, entries_of
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import StorageRouter, is_url
from lightning_shardckpt.system.threads import drain_all
from lightning_shardckpt.transfer.reader import Checkpoint

if TYPE_CHECKING:
    import torch

    from lightning_shardckpt.sources.source import Source

# ── slices of a tensor as boxes ───────────────────────────────────────────────────────────────────────────────────────
# Turn an index of a tensor, as Python writes it, into the box that has to be read. Pure; no torch.


def sliced_box(index: Any, shape: Shape, name: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that an index needs of a tensor, and the index that remains to be applied to that.

    Args:
        index: integers, slices with positive steps, and one ``...``, as for a tensor.
        shape: of the tensor.
        name: of the tensor, for errors.

    Raises:
        IndexError: if the index is not in the tensor.

    >>> box, rest = sliced_box((slice(1, 8, 3), ..., -1), (10, 4, 5), "w")
    >>> box.start, box.stop, rest
    ((1, 0, 4), (8, 4, 5), (slice(None, None, 3), slice(None, None, None), 0))
    """
    items = index if isinstance(index, tuple) else (index,)
    holes = [at for at, item in enumerate(items) if item is ...]
    if len(holes) > 1 or len(items) - len(holes) > len(shape):
        raise IndexError(f"too many indices for {name!r} of shape {shape}: {index}")
    at = holes[0] if holes else len(items)
    full = (slice(None),) * (len(shape) - len(items) + len(holes))
    start, stop, rest = [], [], list[Any]()
    for dim, item in enumerate((*items[:at], *full, *items[at + 1 :])):
        low, high, left = _range(item, shape[dim], f"{name!r} of shape {shape}, dim {dim}")
        start.append(low)
        stop.append(high)
        rest.append(left)
    return Box(tuple(start), tuple(stop)), tuple(rest)


def _range(item: Any, length: int, where: str) -> tuple[int, int, Any]:
    """Return (start, stop, what remains) of one index."""
    if isinstance(item, slice):
        low, high, step = item.indices(length)
        if step < 0:
            raise IndexError(f"{where}: steps must be positive, got {item}")
        return low, max(low, high), slice(None, None, step if step > 1 else None)
    is_mask = isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")  # to torch; not 0 or 1
    try:
        number = None if is_mask else item.__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None:
        raise IndexError(f"{where}: only integers, slices and ... are understood, got {item!r}")
    if not -length <= number < length:
        raise IndexError(f"{where}: {number} is out of range")
    return number % length, number % length + 1, 0


_NEAR = 3
_PREFIXES = ("optimizer", "trainer", "rank")
_RANK = re.compile(r"trainer-state-dist-(\d{5,})\.json")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor as a whole: ``dtype`` as in safetensors (``BF16``), ``nbytes`` of its data."""

    dtype: str
    shape: Shape
    nbytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """A checkpoint's description of itself. ``tensors`` by name, those of the model first; ties have an entry each.

    ``values``: of what is no tensor in a file (numbers, texts, small tensors, …) by name; None unless asked for.

    ``step``, ``epoch``, ``world_size``, ``topology`` and ``software`` inform people; only checkpoints of this package
    have them.
    """

    tensors: dict[str, TensorInfo]
    step: int | None = None
    epoch: int | None = None
    world_size: int | None = None
    topology: Mapping[str, int] | None = None
    software: Mapping[str, str] | None = None
    values: dict[str, ValueInfo] | None = None


def metadata(
    path: str | os.PathLike[str],
    *,
    values: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> Metadata:
    """Return what is in a checkpoint; reads its root index, with ``values`` its documents, and does not import torch.

    Args:
        path: a checkpoint of this package, or a URL of one. Or one of torch.distributed.checkpoint, a directory of
            Hugging Face's, a file of safetensors or of ``torch.save``: these take torch and have no checksums.
        values: list everything else that is stored, too: see ``Metadata.values``.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: saying what is there instead, and which path was probably meant.
    """
    with open(path, storage_options=storage_options, pre_download=pre_download) as checkpoint:
        known = checkpoint.metadata
        if not values:
            return known
        return replace(known, values={name: entry.info for name, entry in checkpoint.entries().items()})


def load_keys(
    path: str | os.PathLike[str],
    keys: Iterable[str],
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield whole tensors, and values, by name, in the order of ``keys``; nothing else is read.

    Args:
        path: see ``metadata``.
        keys: names of its ``tensors`` and ``values``; the same may come twice.
        verify: whether to compare checksums, where the format has some.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``metadata``.

    Yields:
        Name and tensor, on the CPU, or value; nobody else refers to it.

    Raises:
        KeyError: listing all names that are not there with the nearest ones that are, before anything is read.
        CorruptionError: naming file, tensor and rank.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys are several names, such as [{keys!r}], got {keys!r}")
    wanted = list(keys)
    with open(path, verify=verify, storage_options=storage_options, pre_download=pre_download) as checkpoint:
        others = [key for key in dict.fromkeys(wanted) if key not in checkpoint]
        entries = checkpoint.entries(others) if others else {}
        missing = [_unknown(key, [*checkpoint, *entries]) for key in others if key not in entries]
        if missing:
            raise KeyError(f"{os.fspath(path)!r} does not have {', '.join(missing)}")
        for key in wanted:
            yield key, checkpoint[key][...] if key in checkpoint else decode_entry(entries[key])


def open(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> OpenCheckpoint:
    """Return a checkpoint as a mapping from names to tensors that are read where they are sliced. Close it after use.

    Waits for the asynchronous saves of this process.

    Args:
        path: see ``metadata``.
        verify: whether to compare checksums, where the format has some. A block of them is read whole.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``metadata``.

    Raises:
        CheckpointNotFoundError: saying what is there instead, and which path was probably meant.
    """
    drain_all()
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    return OpenCheckpoint(os.fspath(path), verify, storage if is_url(path) else None)


class LazyTensor:
    """A stored tensor: its shape is known, its values are read by slicing. See ``OpenCheckpoint``."""

    def __init__(self, opened: OpenCheckpoint, name: str, component: str, key: str, spec: TensorSpec) -> None:
        self.name, self.dtype, self.shape = name, spec.dtype, spec.shape
        self._opened, self._component, self._key = opened, component, key

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return bytes_in(self.shape, self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name!r} has no dims, so it has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r}, {self.dtype} {self.shape}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the values of a slice as a new tensor on the CPU.

        Only the checksum blocks that it touches are read, now.

        Args:
            index: integers, slices with positive steps, and one ``...``, as for a tensor; ``[...]`` is all of it.

        Raises:
            IndexError: if it is not in the tensor.
            CorruptionError: naming file, tensor and rank.
        """
        box, rest = sliced_box(index, self.shape, self.name)
        return self._opened.read(self._component, self._key, self.dtype, box)[rest]


class OpenCheckpoint(Mapping[str, LazyTensor]):
    """A checkpoint opened by ``open``: names and lazy tensors, those of the model first. For one thread at a time."""

    def __init__(self, path: str, verify: bool, storage: Storage | None = None) -> None:
        self.path, self._verify = path, verify
        self._source: Source | None = None
        self._checkpoint: Checkpoint | None = None
        known = recognise(path) if storage is None else None
        if known is None:
            self._checkpoint = open_checkpoint(path, storage, marks=READABLE)
            self._components: Mapping[str, Component] = self._checkpoint.root.components
        else:
            self._source = known.open(path, True)
            self._components = self._source.components()
        self._where: dict[str, tuple[str, str]] = {}
        for component in filter(self._components.__contains__, COMPONENTS):
            stored = self._components[component]
            prefix = "" if component == "model" else f"{component}/"
            keys = {**dict(zip(stored.tensors, stored.tensors, strict=True)), **stored.aliases}
            for name, key in keys.items():
                self._where.setdefault(prefix + name, (component, key))  # a name of the model's may be like another

    @property
    def metadata(self) -> Metadata:
        """The description that the function ``metadata`` returns."""
        tensors = {name: TensorInfo(t.dtype, t.shape, t.nbytes) for name, t in self.items()}
        if self._checkpoint is None:
            return Metadata(tensors)
        root = self._checkpoint.root
        return Metadata(tensors, root.step, root.epoch, root.world_size, root.topology, root.software)

    def entries(self, names: Iterable[str] | None = None) -> dict[str, DocumentEntry]:
        """Return the entries of documents by name; only those that may have one of ``names``."""
        first = None if names is None else [name.partition("/") for name in names]
        parts: list[dict[str, DocumentEntry]] = []
        for role in ("model", "optimizer", "trainer", "frozen", "peft", "huggingface"):
            own = role in ("optimizer", "trainer")
            if first is None or any(start == role or (not own and start not in _PREFIXES) for start, _, _ in first):
                parts.append(entries_of(role, self._document(role)))
        ranks = [int(match[1]) for name in self._documents() if (match := _RANK.fullmatch(name))]
        for rank in sorted(ranks):
            if first is None or any((s, rest.partition("/")[0]) == ("rank", str(rank)) for s, _, rest in first):
                parts.append(entries_of("rank", self._document("rank", rank), rank))
        entries: dict[str, DocumentEntry] = {}
        for name, entry in chain.from_iterable(part.items() for part in parts):
            if name not in self._where:  # what is the model's comes first
                entries.setdefault(name, entry)
        return entries

    def _documents(self) -> Iterable[str]:
        return self._checkpoint.root.documents if self._checkpoint is not None else ()

    def _document(self, role: str, rank: int = 0) -> Any:
        if self._checkpoint is not None:
            return document_of(self._checkpoint, role, rank)
        assert self._source is not None
        if role != "trainer":
            return self._source.document(role)
        from lightning_shardckpt.state.json_tree import Encoder  # of another format, which took torch already

        rest = self._source.trainer(_no_tensor)
        return Encoder(droppable=("",), inline_bytes=None).encode(rest)

    def read(self, component: str, key: str, dtype: str, box: Box) -> torch.Tensor:
        """Return the values in a box of a stored tensor."""
        import torch  # names and shapes are there without it

        from lightning_shardckpt.sources.source import ReadTarget, ShardedSource
        from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

        if self._source is None:
            assert self._checkpoint is not None
            self._source = ShardedSource(self._checkpoint, self._verify)
        if box.numel:
            self._source.backed(component, key)
        target = ReadTarget(component, key, torch.empty(box.shape, dtype=TORCH_DTYPES[dtype]), fresh=True, box=box)
        self._source.read([target])()
        return target.tensor

    def close(self) -> None:
        """Release the files."""
        opened = self._checkpoint or self._source
        if opened is not None:
            opened.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self._where:
            raise KeyError(f"{self.path!r} does not have {_unknown(name, self)}")
        component, key = self._where[name]
        return LazyTensor(self, name, component, key, self._components[component].tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where


def decode_entry(entry: DocumentEntry) -> Any:
    """Return the value of an entry of a document.

    Raises:
        FormatError: if it is not what its tag says.
    """
    if entry.is_plain:
        return entry.value
    from lightning_shardckpt.state.json_tree import decode_small  # names are there without torch

    return decode_small(entry.value)


def _no_tensor(key: str) -> torch.Tensor:
    raise KeyError(key)  # other formats have none beside the trainer's state


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=_NEAR, cutoff=0.7)
    return f"{name!r}" + (f" (but {', '.join(map(repr, near))})" if near else "")
