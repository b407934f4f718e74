"""Lists the contents of a checkpoint and reads parts of it, without a process group.

Names and shapes are available without torch. Tensors of the model have their own names; the names of others begin with
``optimizer/`` or ``trainer/``, such as ``optimizer/0/head.weight/exp_avg``. The same holds for values in documents (see
``state.documents``); the names of values of a single rank begin with ``rank/<rank>/``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_shardckpt.format.index import COMPONENTS, TensorSpec
from lightning_shardckpt.format.layout import Shape
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import ValueInfo, entries_of
from lightning_shardckpt.storage.router import StorageRouter, file_path
from lightning_shardckpt.system.threads import drain_all

_MAX_SUGGESTIONS = 3
_ROLES = ("model", "optimizer", "trainer", "frozen", "peft", "huggingface")
_PREFIXES = ("optimizer", "trainer", "rank")
_RANK = re.compile(r"trainer-state-dist-(\d{5,})\.json")


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
        values: the values in documents (numbers, texts, small tensors, …) by name; None unless requested.
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
    """Return the description of a checkpoint. Reads its root index and, with ``values``, its documents; no torch.

    Waits for the asynchronous saves of this process.

    Args:
        path: a checkpoint of this package, or its URL; or a checkpoint of torch.distributed.checkpoint, a Hugging Face
            directory, a safetensors file or a file of ``torch.save``, which need torch and have no checksums.
        values: list the values in documents, too (see ``Metadata.values``).
        storage_options: options for URLs; see ``ShardCkptIO``.
        pre_download: a folder that caches files of URLs; see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: describes the content of the path, and suggests another one.
    """
    drain_all()
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    source, _ = open_source(file_path(path), storage)
    with closing(source):
        stored, root = _stored_tensors(source), source.root
        tensors = {
            name: TensorInfo(spec.dtype, spec.shape, bytes_in(spec.shape, spec.dtype))
            for name, (_, _, spec) in stored.items()
        }
        found = {name: ValueInfo.of(value) for name, value in _entries(source, stored).items()} if values else None
        if root is None:
            return Metadata(tensors, values=found)
        return Metadata(tensors, root.step, root.epoch, root.world_size, root.topology, root.software, found)


def load_keys(
    path: str | os.PathLike[str],
    keys: Iterable[str],
    *,
    verify: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield whole tensors and values by name, in the order of ``keys``. Nothing else is read.

    Args:
        path: the checkpoint; see ``metadata``.
        keys: names from the ``tensors`` and ``values`` of its metadata; repetitions are allowed.
        verify: compare checksums, if the format has them.
        storage_options: options for URLs; see ``ShardCkptIO``.
        pre_download: a folder that caches files of URLs; see ``ShardCkptIO``.

    Yields:
        (name, value); a tensor is on the CPU and owned by the caller.

    Raises:
        KeyError: listing all missing names with similar existing ones, before anything is read.
        CorruptionError: naming file, tensor and rank.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys are several names, such as [{keys!r}], got {keys!r}")
    import torch  # imported here, since names and shapes don't need it

    from lightning_shardckpt.sources.reading import ReadTarget, read_targets
    from lightning_shardckpt.state.json_tree import decode_small
    from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

    drain_all()
    names, storage = list(keys), StorageRouter(storage_options=storage_options, pre_download=pre_download)
    source, _ = open_source(file_path(path), storage, verify=verify)
    with closing(source):
        stored = _stored_tensors(source)
        others = [name for name in dict.fromkeys(names) if name not in stored]
        entries = _entries(source, stored, others) if others else {}
        missing = [_describe_missing(name, [*stored, *entries]) for name in others if name not in entries]
        if missing:
            raise KeyError(f"{os.fspath(path)!r} does not have {', '.join(missing)}")
        for name in names:
            if name in entries:
                yield name, decode_small(entries[name])
                continue
            component, key, spec = stored[name]
            source.checked_shape(component, key)
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            read_targets(source, [ReadTarget(component, key, tensor)])
            yield name, tensor


class _Stored(NamedTuple):
    component: str
    key: str
    spec: TensorSpec


def _stored_tensors(source: Source) -> dict[str, _Stored]:
    """Return the tensors of a checkpoint under all their names, the model's first."""
    stored, components = dict[str, _Stored](), source.components()
    for component in filter(components.__contains__, COMPONENTS):
        tensors, prefix = components[component], "" if component == "model" else f"{component}/"
        for name, key in {**{key: key for key in tensors.tensors}, **tensors.aliases}.items():
            # on a collision, the model's name wins
            stored.setdefault(prefix + name, _Stored(component, key, tensors.tensors[key]))
    return stored


def _entries(
    source: Source, stored: Mapping[str, object], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the values of documents by name, as tagged JSON, except under names of tensors.

    With ``names``, only documents that may contain one of them are read.
    """
    documents = source.root.documents if source.root is not None else ()
    ranks = [int(match[1]) for name in documents if (match := _RANK.fullmatch(name))]
    entries: dict[str, Any] = {}
    for role, rank in [*((role, 0) for role in _ROLES), *(("rank", rank) for rank in sorted(ranks))]:
        if names is None or any(_may_have(role, rank, name) for name in names):
            for name, value in entries_of(role, _document(source, role, rank), rank).items():
                if name not in stored:
                    entries.setdefault(name, value)
    return entries


def _document(source: Source, role: str, rank: int) -> Any:
    if source.root is not None or role != "trainer":
        return source.document(role, rank)
    from lightning_shardckpt.state.json_tree import Encoder, refuse_tensor  # other formats have imported torch

    # whose trainer's state has no separate tensors
    return Encoder(droppable=("",), inline_bytes=None).encode(source.trainer(refuse_tensor))


def _may_have(role: str, rank: int, name: str) -> bool:
    """Return whether a document may have an entry of a name."""
    start, _, rest = name.partition("/")
    if role == "rank":
        return start == role and rest.partition("/")[0] == str(rank)
    return start == role if start in _PREFIXES else role not in _PREFIXES


def _describe_missing(name: str, existing: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, list(existing), n=_MAX_SUGGESTIONS, cutoff=0.7)
    return f"{name!r}" + (f" (but {', '.join(map(repr, similar))})" if similar else "")
