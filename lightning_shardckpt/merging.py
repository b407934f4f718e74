"""The weighted mean of checkpoints as a checkpoint: ``shardckpt merge A B --output OUT``.

The inputs may have any topologies and formats. Their tensors are read, verified, averaged and written window by window,
so memory does not grow with their size.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from lightning_shardckpt.sources.reading import ReadTarget, read_targets
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
_SMALL = 1 << 14  # elements of a tensor that is read without other threads
_THREADS, _LISTED = 8, 50
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
        averages = stack.enter_context(_Averages(sources, factors, advance))
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
    if not names or not expected or not names.keys().isdisjoint(expected):
        return source
    longest = max(names, key=len)
    for name in expected:
        if name.endswith(f".{longest}"):
            prefix = name.removesuffix(longest)
            return rename(source, {prefix + old: old for old in names}, None)
        if longest.endswith(f".{name}") and all(old.startswith(longest.removesuffix(name)) for old in names):
            prefix = longest.removesuffix(name)
            return rename(source, {old.removeprefix(prefix): old for old in names}, None)
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
        elif not all(_are_equal(source, keys[0], other) for other in keys[1:]):
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


def _are_equal(source: Source, one: str, other: str) -> bool:
    """Return whether two tensors of a source have the same bytes."""
    readers = [WindowReader(source, _WINDOW) for _ in range(2)]
    specs = [source.spec("model", key) for key in (one, other)]
    if (specs[0].dtype, specs[0].shape) != (specs[1].dtype, specs[1].shape):
        return False
    pairs = zip(readers[0].read("model", one), readers[1].read("model", other), strict=True)
    return all(left == right for left, right in pairs)


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
    """The averaged tensors, made window by window while the files are written; a context manager.

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
        self._pool = ThreadPoolExecutor(min(len(sources), _THREADS), thread_name_prefix="shardckpt-merge")
        self._keys = {
            key: [_keys(source, names)[0] for source in sources] for key, names in _names_by_key(sources[0]).items()
        }

    def __enter__(self) -> _Averages:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def content(self, key: str) -> TensorBytes:
        """Return the bytes of a tensor, which are made as they are sliced."""
        spec = self.specs[key]
        return _Stream(bytes_in(spec.shape, spec.dtype), self._parts(key))

    def _parts(self, key: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor; a window is read by other threads while the one before is used."""
        spec = self.specs[key]
        sources = range(len(self._sources) if _is_averaged(spec.dtype) else 1)
        if math.prod(spec.shape) <= _SMALL:
            yield self._average([self._read(key, Box.whole(spec.shape), source) for source in sources], spec.dtype)
            return
        tensors = list[torch.Tensor]()
        for window in windows(spec.shape, _WINDOW):
            reads = [self._pool.submit(self._read, key, window, source) for source in sources]
            if tensors:
                yield self._average(tensors, spec.dtype)
            tensors = [read.result() for read in reads]
        yield self._average(tensors, spec.dtype)

    def _read(self, key: str, window: Box, source: int) -> torch.Tensor:
        """Return a copy of a window of a tensor: its bytes, or numbers in the dtype of the sum."""
        stored, dtype = self._keys[key][source], self.specs[key].dtype
        stored_dtype = self._sources[source].spec("model", stored).dtype
        kind = _number_dtype(stored_dtype) if _is_averaged(dtype) else torch.uint8
        parts = self._readers[source].read("model", stored, window)
        data = torch.cat([torch.frombuffer(part, dtype=kind) for part in parts])
        return data.to(torch.float64 if dtype in _DOUBLE else torch.float32) if _is_averaged(dtype) else data

    def _average(self, tensors: Sequence[torch.Tensor], dtype: str) -> memoryview:
        total = tensors[0]
        if _is_averaged(dtype):
            total.mul_(self._factors[0])
            for tensor, factor in zip(tensors[1:], self._factors[1:], strict=True):
                total.add_(tensor, alpha=factor)
            total = total.div_(sum(self._factors)).to(_number_dtype(dtype))
        self._advance(total.nbytes)
        return bytes_of(total)


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
