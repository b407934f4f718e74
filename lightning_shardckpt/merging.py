"""The weighted mean of checkpoints as a checkpoint: ``shardckpt merge A B --output OUT``.

The inputs may have any topologies and formats. Their tensors are read, verified, averaged and written window by window,
so memory does not grow with their size.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.format.plan import TensorBytes
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.sources.key_mapping import rename
from lightning_shardckpt.sources.open_source import open_checkpoint, open_source
from lightning_shardckpt.sources.reading import ReadTarget, are_equal, read_targets
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.state.json_tree import lost_values
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.state_dicts import KEYS
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of
from lightning_shardckpt.state.trainer import HYPER_PARAMETERS, snapshot
from lightning_shardckpt.storage.router import StorageRouter, check_writable, file_path, refuse_existing
from lightning_shardckpt.storage.run_folder import RunFolder
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.system.threads import drain_all
from lightning_shardckpt.transfer.shard_reader import WindowReader, windows

_log = logging.getLogger(__name__)
MERGED = "merged"
"""Key of trainer state that describes a merge: its inputs, their weights, and the tensors that are not averages."""
_WINDOW = 1 << 20  # elements of a tensor that are averaged at a time
_LISTED = 50
_DOUBLE = ("F64", "C128")
_OF_A_RUN = ("callbacks", "loops", "lr_schedulers", "MixedPrecision", "FSDPPrecision", MERGED)
_DOCUMENTS = ("model", "versions", "frozen", "peft", "huggingface")


def merge(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    advance: Callable[[int], Any] = lambda nbytes: None,
    expect: Callable[[int], Any] = lambda nbytes: None,
) -> list[str]:
    """Write the weighted mean of checkpoints as a checkpoint of this package, which any topology loads.

    Floating-point and complex tensors of the models are averaged: the sum of weight × value, in float32 (float64 for
    tensors of float64), divided by the sum of the weights, and rounded once to the dtype of the first checkpoint.
    Integers, bools, extra state, hyper-parameters and other state are the first one's; there is no state of optimizers,
    schedulers, callbacks or loops, so load the result with ``pretrained=`` or ``load``, and nothing pickled. Tied
    tensors stay tied. The trainer's state of the result describes the merge under the key ``merged``. Waits for the
    asynchronous saves of this process.

    Running statistics of norms are averaged, too: ``torch.optim.swa_utils.update_bn`` recomputes them from data.

    Args:
        paths: at least two checkpoints of any topology and format that is read, or URLs. Their tensors must have the
            same names, or differ in one prefix, such as ``model.``, that all names have.
        output: where the checkpoint appears when it is complete; may be a URL.
        weights: one for each path, with any sum but 0; equal ones by default.
        overwrite: replace an existing checkpoint.
        storage_options: for URLs, see ``ShardCkptIO``.
        advance: called with the bytes of the output as they are written.
        expect: called once before with their number.

    Returns:
        The names of the tensors that are not averages.

    Raises:
        ValueError: if there are fewer than two paths, or not as many weights, or they are not finite or cancel out.
        MismatchError: listing all differences of names, shapes and kinds of dtypes.
        CheckpointNotFoundError: if a path has no complete checkpoint; describes its content.
        CorruptionError: naming file, tensor and rank of corrupted data. Nothing is left of the output.
        FileExistsError: if something exists at ``output`` and ``overwrite`` is not set.
    """
    factors = [1.0] * len(paths) if weights is None else [float(weight) for weight in weights]
    if len(paths) < 2 or len(factors) != len(paths):
        raise ValueError(f"merge needs two checkpoints or more and a weight for each, got {len(paths)} and {factors}")
    if not all(map(math.isfinite, factors)) or not math.isfinite(1 / (sum(factors) or math.nan)):
        raise ValueError(f"weights must be finite, and their sum must not be 0, got {factors}")
    storage, target = StorageRouter(storage_options=storage_options), file_path(output)
    check_writable(target)
    if not overwrite:
        refuse_existing(target, storage)
    drain_all()
    with ExitStack() as stack:
        sources = list[Source]()
        for path in paths:
            source, _ = open_source(file_path(path), storage, for_export=True)
            stack.enter_context(closing(source))
            sources.append(_fit_prefix(source, sources[0]) if sources else source)
        _check_equal(sources)
        averages = _Averages(sources, factors, advance)
        expect(sum(bytes_in(spec.shape, spec.dtype) for spec in averages.specs.values()))
        about = {"paths": [os.fspath(path) for path in paths], "weights": factors, "from_first": averages.others}
        root = sources[0].root
        run = RunInfo() if root is None else RunInfo(root.step, root.epoch)
        describe = partial(_describe, sources[0], averages, about)
        for note in checkpoint.save(target, describe, ranks=Ranks.alone(), run=run, storage=storage):
            _log.warning(note)
        return averages.others


def _model(source: Source) -> Component:
    return source.components().get("model", Component({}))


def last_checkpoints(
    folder: str | os.PathLike[str], count: int, *, storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the paths of the last complete checkpoints of a run, by their steps, the newest first.

    Args:
        folder: where ``ModelCheckpoint`` puts them, or its URL. Links to others, copies and results of ``merge`` are
            not counted.
        count: their number.
        storage_options: for URLs.

    Raises:
        CheckpointNotFoundError: if there are fewer.
    """
    storage = StorageRouter(storage_options=storage_options)
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(RunFolder(folder, storage).list_complete()):
        with suppress(CheckpointNotFoundError), open_checkpoint(path, storage) as one:  # it may be deleted meanwhile
            if MERGED not in (document_of(one, "trainer", 0) or {}):
                found.setdefault(one.root.save_id, (-1 if one.root.step is None else one.root.step, path))
    newest = [path for _, path in sorted(found.values(), reverse=True)][:count]
    if len(newest) < count:
        raise CheckpointNotFoundError(
            f"{os.fspath(folder)!r} has {len(newest)} complete checkpoints, expected {count} or more"
        )
    return newest


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fit_prefix(source: Source, first: Source) -> Source:
    """Return a source with or without the prefix by which all its names differ from those of the first one."""
    names, expected = _model(source).names, _model(first).names
    longest = max(names, key=len, default="")
    if longest in expected:
        return source
    for name in expected:
        more, less = name.removesuffix(longest), longest.removesuffix(name)
        if name == f"{more}{longest}" and more.endswith("."):
            return rename(source, {more + old: old for old in names}, None)
        if less.endswith(".") and all(old.startswith(less) for old in names):
            return rename(source, {old.removeprefix(less): old for old in names}, None)
    return source


def _names_by_key(source: Source) -> dict[str, list[str]]:
    """Return all names of each tensor of a model, by key."""
    model = _model(source)
    names = {key: [key] for key in model.tensors}
    for alias, key in model.aliases.items():
        names[key].append(alias)
    return names


def _keys(source: Source, names: Sequence[str]) -> list[str]:
    """Return the keys of the tensors that a source has under names, once each."""
    stored = _model(source).names
    return list(dict.fromkeys(stored[name] for name in names if name in stored))


def _check_equal(sources: Sequence[Source]) -> None:
    """Check that all models have the same names, shapes and kinds of dtypes, and ties with equal values."""
    first, problems = sources[0], list[str]()
    if not _model(first).tensors:
        raise MismatchError(
            f"checkpoint {first.path!r} has no module: state dicts that were saved alone are not merged"
        )
    for source in sources[1:]:
        problems += (f"{source.path!r}: {problem}" for problem in _differences(first, source))
    if problems:
        listed = list_some(problems, _LISTED, between="\n  ")
        raise MismatchError(f"these checkpoints can't be merged with {first.path!r}:\n  {listed}")


def _differences(first: Source, source: Source) -> Iterator[str]:
    matched = set[str]()
    for key, names in _names_by_key(first).items():
        keys, expected = _keys(source, names), first.spec("model", key)
        matched.update(keys)
        if not keys:
            yield f"{key} is missing"
            continue
        spec = source.spec("model", keys[0])
        if spec.shape != expected.shape or _kind(spec.dtype) != _kind(expected.dtype):
            yield f"{key} is {spec.dtype} {spec.shape}, expected {expected.dtype} {expected.shape}"
        elif len(keys) > 1 and not are_equal(source, "model", keys):
            yield f"{' and '.join(names)} differ, expected one tied tensor"
    known = _model(first).names
    yield from (
        f"{name} is unexpected"
        for name, key in _model(source).names.items()
        if name not in known and key not in matched
    )
    frozen, expected_frozen = (one.document("frozen") or {} for one in (source, first))
    if frozen != expected_frozen:
        yield f"it was saved without {len(frozen)} frozen parameters, expected without {len(expected_frozen)}"


def _kind(dtype: str) -> str:
    """Return a dtype, or its kind if it is averaged: dtypes of one kind can be mixed."""
    return ("complex" if dtype.startswith("C") else "floating") if _is_averaged(dtype) else dtype


# ── the state ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _describe(first: Source, averages: _Averages, about: dict[str, Any]) -> Snapshot:
    """Return the state of a merge; the tensors of its model get their values when they are written."""

    def whole(key: str) -> torch.Tensor:
        spec = first.spec("trainer", key)
        tensor = torch.empty(first.checked_shape("trainer", key), dtype=TORCH_DTYPES[spec.dtype])
        read_targets(first, [ReadTarget("trainer", key, tensor)])
        return tensor

    state = {key: value for key, value in first.trainer(whole).items() if key not in _OF_A_RUN}
    if KEYS in state:
        state[KEYS] = {**state[KEYS], "optimizers": []}
    pickled = [key for key, value in state.items() if key not in HYPER_PARAMETERS and lost_values(value)]
    described = snapshot({**{key: value for key, value in state.items() if key not in pickled}, MERGED: about})
    tensors = {
        key: torch.empty((), dtype=TORCH_DTYPES[spec.dtype]).expand(spec.shape)  # without memory
        for key, spec in averages.specs.items()
    }
    leaves = {**described.leaves, "model": Leaves(tensors, dict(_model(first).aliases))}
    documents = {**described.documents, **{role: first.document(role) for role in _DOCUMENTS}}
    notes = [f"left out, since it holds pickled objects, which are not read: {key!r}" for key in pickled]
    notes += described.notes
    return replace(described, leaves=leaves, documents=documents, notes=(*notes,), contents={"model": averages.content})


# ── averages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_averaged(dtype: str) -> bool:
    return dtype.startswith(("F", "BF", "C"))


class _Averages:
    """The averaged tensors, made window by window while the files are written.

    Args:
        sources: the checkpoints, with equal names.
        factors: their weights.
        advance: called with the bytes that were made.

    Attributes:
        specs: of the tensors, as the first source has them.
        others: the names of tensors that are the first source's.
    """

    def __init__(self, sources: Sequence[Source], factors: Sequence[float], advance: Callable[[int], Any]) -> None:
        self.specs = dict(_model(sources[0]).tensors)
        self.others = sorted(key for key, spec in self.specs.items() if not _is_averaged(spec.dtype))
        self._sources, self._factors, self._advance = sources, factors, advance
        self._readers = [WindowReader(source, _WINDOW * max(DTYPE_BYTES.values())) for source in sources]
        self._names = _names_by_key(sources[0])

    def content(self, key: str) -> TensorBytes:
        """Return the bytes of a tensor, which are made as they are sliced."""
        spec = self.specs[key]
        return _Stream(bytes_in(spec.shape, spec.dtype), self._parts(key))

    def _parts(self, key: str) -> Iterator[memoryview]:
        spec, is_averaged = self.specs[key], key not in self.others
        keys = [_keys(source, self._names[key])[0] for source in self._sources[: None if is_averaged else 1]]
        for window in windows(spec.shape, _WINDOW):
            total = self._read(0, keys[0], window, spec.dtype)
            if is_averaged:
                total.mul_(self._factors[0])
                for source in range(1, len(keys)):
                    total.add_(self._read(source, keys[source], window, spec.dtype), alpha=self._factors[source])
                total = total.div_(sum(self._factors)).to(_number_dtype(spec.dtype))
            self._advance(total.nbytes)
            yield bytes_of(total)

    def _read(self, source: int, key: str, window: Box, dtype: str) -> torch.Tensor:
        """Return a copy of a window of a tensor: its bytes, or numbers in the dtype of the sum."""
        is_averaged, stored = _is_averaged(dtype), self._sources[source].spec("model", key).dtype
        kind = _number_dtype(stored) if is_averaged else torch.uint8
        parts = self._readers[source].read("model", key, window)
        data = torch.cat([torch.frombuffer(part, dtype=kind) for part in parts])
        return data.to(torch.float64 if dtype in _DOUBLE else torch.float32) if is_averaged else data


def _number_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the real numbers of a tensor."""
    return {"C64": torch.float32, "C128": torch.float64}.get(dtype, TORCH_DTYPES[dtype])


class _Stream:
    """Bytes that are made as they are sliced, from first to last."""

    def __init__(self, nbytes: int, parts: Iterator[memoryview]) -> None:
        self._nbytes, self._parts, self._rest = nbytes, parts, memoryview(b"")

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> memoryview:
        wanted = min(part.stop, self._nbytes) - part.start
        while len(self._rest) < wanted:
            following = next(self._parts)
            self._rest = memoryview(b"".join([self._rest, following])) if self._rest else following
        data, self._rest = self._rest[:wanted], self._rest[wanted:]
        return data
