"""The weighted mean of checkpoints as a checkpoint: ``shardckpt merge A B --output OUT``.

The inputs may have any topologies and formats. One tensor after the other is read, verified, averaged and written.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.lazy import LazyTensor, OpenCheckpoint
from lightning_shardckpt.sources.open_source import open_checkpoint, open_source
from lightning_shardckpt.sources.reading import are_equal
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES, bytes_of
from lightning_shardckpt.state.model import Leaves
from lightning_shardckpt.state.state_dicts import KEYS, VERSION
from lightning_shardckpt.state.trainer import HYPER_PARAMETERS, Snapshot, snapshot
from lightning_shardckpt.storage.router import StorageRouter, file_path, refuse_existing
from lightning_shardckpt.storage.run_folder import RunFolder
from lightning_shardckpt.system.host import drain_all
from lightning_shardckpt.system.text import list_some, progress

_log = logging.getLogger(__name__)
MERGED = "merged"
"""Key of trainer state that describes a merge: its inputs, their weights, and the tensors that are not averages."""
_KEPT = (*HYPER_PARAMETERS, "hparams_name", "datamodule_hparams_name", "epoch", "global_step", VERSION, KEYS)
_DOCUMENTS = ("model", "versions", "frozen", "peft", "huggingface")


def merge(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write the weighted mean of checkpoints as a checkpoint of this package, which any topology loads.

    Floating-point and complex tensors of the models are averaged (also running statistics of norms): the sum of weight
    × value, in float32 (float64 for tensors of float64), divided by the sum of the weights, and rounded once to the
    dtype of the first checkpoint. Integers, bools, extra state and hyper-parameters are the first one's; there is no
    other state, so load the result with ``pretrained=`` or ``load``. Tied tensors stay tied. The trainer's state of the
    result describes the merge under the key ``merged``. Waits for the asynchronous saves of this process. Memory is
    needed for some copies of the largest tensor.

    Args:
        paths: at least two checkpoints of any topology and format that is read, or URLs, with the same names.
        output: where the checkpoint appears when it is complete; may be a URL.
        weights: one for each path, with any sum but 0; equal ones by default.
        overwrite: replace an existing checkpoint.
        storage_options: for URLs, see ``ShardCkptIO``.

    Returns:
        The names of the tensors that are not averages.

    Raises:
        ValueError: if there are fewer than two paths, or not as many weights, or they are not finite or cancel out.
        MismatchError: listing all differences of names, shapes and kinds of dtypes.
        CheckpointNotFoundError: if a path has no complete checkpoint.
        CorruptionError: naming file, tensor and rank. Nothing is left of the output.
        FileExistsError: if something exists at ``output`` and ``overwrite`` is not set.
    """
    factors = [1.0] * len(paths) if weights is None else [float(weight) for weight in weights]
    if len(paths) < 2 or len(factors) != len(paths):
        raise ValueError(f"merge needs two checkpoints or more and a weight for each, got {len(paths)} and {factors}")
    if not all(map(math.isfinite, factors)) or not math.isfinite(1 / (sum(factors) or math.nan)):
        raise ValueError(f"weights must be finite, and their sum must not be 0, got {factors}")
    storage, target = StorageRouter(storage_options=storage_options), file_path(output)
    if not overwrite:
        refuse_existing(target, storage)
    drain_all()
    with ExitStack() as stack:
        sources = (open_source(file_path(path), storage, for_export=True)[0] for path in paths)
        opened = [stack.enter_context(OpenCheckpoint(source)) for source in sources]
        models = [{name: one for name, one in found.items() if one.component == "model"} for found in opened]
        names = [os.fspath(path) for path in paths]
        inputs = _match(names, models)
        others = sorted(name for name, tensors in inputs.items() if not _is_averaged(tensors[0]))
        about = {"paths": names, "weights": factors, "from_first": others}
        advance = stack.enter_context(progress(sum(tensors[0].nbytes for tensors in inputs.values())))

        def content(name: str) -> memoryview:
            advance(inputs[name][0].nbytes)
            return bytes_of(_average(inputs[name], factors))

        describe, root = partial(_describe, opened[0], inputs, content, about), opened[0].source.root
        run = RunInfo() if root is None else RunInfo(root.step, root.epoch)
        group = SaveGroup()
        checkpoint.save(target, describe, group, run=run, storage=storage)
        for note in group.background.notes():
            _log.warning(note)
        return others


def last_checkpoints(
    folder: str | os.PathLike[str], count: int, *, storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the paths of the last complete checkpoints of a run by step, without copies and results of ``merge``."""
    storage, found = StorageRouter(storage_options=storage_options), dict[str, tuple[int, str]]()
    for path in sorted(RunFolder(folder, storage).list_complete()):
        with open_checkpoint(path, storage) as one:
            if MERGED not in (document_of(one, "trainer", 0) or {}):
                found.setdefault(one.root.save_id, (one.root.step or 0, path))
    newest = [path for _, path in sorted(found.values(), reverse=True)][:count]
    if len(newest) < count:
        text = f"{os.fspath(folder)!r} has {len(newest)} complete checkpoints, expected {count} or more"
        raise CheckpointNotFoundError(text)
    return newest


def _match(paths: Sequence[str], models: Sequence[Mapping[str, LazyTensor]]) -> dict[str, list[LazyTensor]]:
    """Return the tensor of each model by stored name of the first one, or raise an error that lists differences."""
    first, problems = models[0], list[str]()
    if not first:
        raise MismatchError(f"checkpoint {paths[0]!r} has no module: state dicts that were saved alone are not merged")
    inputs = {name: [one] for name, one in first.items() if name == one.key}
    for path, model in zip(paths[1:], models[1:], strict=True):
        unmatched = {name for name, one in model.items() if name == one.key}
        for name, tensors in inputs.items():
            expected, ties = tensors[0], [alias for alias, one in first.items() if one.key == name]
            found = {one.key: one for one in (model[alias] for alias in ties if alias in model)}
            unmatched -= found.keys()
            tensors += [*found.values()][:1]
            if not found:
                problems.append(f"{path!r}: {name} is missing")
            elif len(found) > 1 and not are_equal(tensors[-1].source, "model", [*found]):
                problems.append(f"{path!r}: {' and '.join(ties)} differ, expected one tied tensor")
            elif tensors[-1].shape != expected.shape or _kind(tensors[-1]) != _kind(expected):
                shown = f"{tensors[-1].dtype} {tensors[-1].shape}"
                problems.append(f"{path!r}: {name} is {shown}, expected {expected.dtype} {expected.shape}")
        problems += (f"{path!r}: {name} is unexpected" for name in sorted(unmatched))
    if problems:
        listed = list_some(problems, 50, between="\n  ")
        raise MismatchError(f"these checkpoints can't be merged with {paths[0]!r}:\n  {listed}")
    return inputs


def _kind(tensor: LazyTensor) -> str:
    """Return a tensor's dtype, or its kind if it is averaged: dtypes of one kind can be mixed."""
    return ("complex" if tensor.dtype.startswith("C") else "floating") if _is_averaged(tensor) else tensor.dtype


def _is_averaged(tensor: LazyTensor) -> bool:
    return tensor.dtype.startswith(("F", "BF", "C"))


def _average(tensors: Sequence[LazyTensor], factors: Sequence[float]) -> torch.Tensor:
    """Return the mean of several tensors in the dtype of the first, or the first one."""
    first, total = tensors[0], torch.empty(())
    if not _is_averaged(first):
        return first[...]
    for number, (tensor, factor) in enumerate(zip(tensors, factors, strict=True)):
        numbers = torch.view_as_real(tensor[...]) if first.dtype.startswith("C") else tensor[...]
        numbers = numbers.to(torch.float64 if first.dtype in ("F64", "C128") else torch.float32)
        total = total.add_(numbers, alpha=factor) if number else numbers.mul_(factor)
    total = total.div_(sum(factors))
    return torch.view_as_complex(total) if first.dtype.startswith("C") else total.to(TORCH_DTYPES[first.dtype])


def _describe(
    first: OpenCheckpoint,
    inputs: Mapping[str, Sequence[LazyTensor]],
    content: Callable[[str], memoryview],
    about: dict[str, Any],
) -> Snapshot:
    """Return the state of a merge; the tensors of its model get their values when they are written."""
    state = first.source.trainer(lambda key: first[f"trainer/{key}"][...])
    state = {key: value for key, value in state.items() if key in _KEPT}
    if KEYS in state:
        state[KEYS] = {**state[KEYS], "optimizers": []}
    described = snapshot({**state, MERGED: about})
    tensors = {
        name: torch.empty((), dtype=TORCH_DTYPES[one.dtype]).expand(one.shape)  # without memory
        for name, (one, *_) in inputs.items()
    }
    leaves = {**described.leaves, "model": Leaves(tensors, dict(first.source.aliases.get("model", {})))}
    documents = {**described.documents, **{role: first.source.document(role) for role in _DOCUMENTS}}
    return replace(described, leaves=leaves, documents=documents, contents={"model": content})
