"""A directory of DeepSpeed as a source: of ZeRO 0 to 3, also written by Lightning's DeepSpeedStrategy, and universal.

The state of ZeRO is in flat vectors, one for each rank and param group, of which a rank reads the parts of its own
tensors. Weights are the float32 masters. No code is executed: the files are read by ``torch.load(weights_only=True)``
with stand-ins for DeepSpeed's classes, and DeepSpeed needn't be installed. Verified with DeepSpeed 0.19.

- ZeRO 1 and 2: each rank lists the part of each parameter in its vectors (``param_slice_mappings``).
- ZeRO 3: each rank has an equal part of each parameter, in order, the last one padded.
- universal: a file for each parameter and each of its states.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import safe_globals

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.value_checks import check_shape
from lightning_shardckpt.sources.open_source import DEEPSPEED_MODEL, find_deepspeed_directory
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, close_on_error
from lightning_shardckpt.sources.torch_save import DictTensors, map_file, source_of_dicts
from lightning_shardckpt.state.tensor_bytes import DTYPES
from lightning_shardckpt.storage.local_storage import LocalReader

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNSUPPORTED = re.compile(r".*mp_rank_0*[1-9].*|layer_\d+-model.*|.*expert_\d+.*|.*expp_rank_\d+.*|offloaded_tensors")
_OF_DEEPSPEED = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_config"}
    | {"skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"}
    | {"checkpoint_parallel_dimensions", "universal_checkpoint_info"}
)
_LIGHTNING = "pytorch-lightning_version"
_REMEDY = "convert it with DeepSpeed's zero_to_fp32.py, and load the result"


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory of ``save_checkpoint``, or the one with a tag below it.

    ``weights_only`` is as in ``torch.load``, for the client state.

    Raises:
        FormatError: for what is not read, such as model parallelism and experts.
        CorruptionError: if a file is missing or damaged.
    """
    directory = find_deepspeed_directory(path)
    if directory is None:
        raise CheckpointNotFoundError(f"{path!r} is not a checkpoint of DeepSpeed")
    models, optimizers = _rank_files(directory)
    universal = [str(file.relative_to(directory)) for file in sorted(Path(directory, _UNIVERSAL).rglob("*.pt"))]
    with close_on_error(LocalReader(directory)) as reader:
        tensors = DictTensors(reader, [*models, *optimizers, *universal])
        contents = [_load(directory, name, weights_only) for name in models]
        try:
            if universal:
                stored = _of_parameters(contents[0], {name: _load(directory, name) for name in universal})
            else:
                states = [_load(directory, name)["optimizer_state_dict"] for name in optimizers]
                stored = _of_ranks(directory, contents[0], states, tensors)
            if any(isinstance(value, Tensor) and value.shape == (0,) for value in contents[0]["module"].values()):
                stored.model.update(_frozen(directory, contents, tensors))
            for alias, name in (contents[0]["shared_params"] or {}).items():
                stored.model[alias] = stored.model[name]
        except ShardCkptError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{directory!r}: not laid out as DeepSpeed 0.19 does: {error!r}; {_REMEDY}") from error
        rest = _rest(contents[0])
        if stored.groups is not None:
            rest["optimizer_states"] = [{"state": stored.state, "param_groups": stored.groups}]
        return source_of_dicts(directory, tensors, stored.model, rest)


def _rank_files(directory: str) -> tuple[list[str], list[str]]:
    """Return the files of the model, and of the optimizer, by rank."""
    names = os.listdir(directory)
    if unsupported := sorted(filter(_UNSUPPORTED.fullmatch, names)):
        raise FormatError(
            f"{directory!r}: {unsupported[0]} is of model parallelism, a pipeline, experts or tensors offloaded to "
            f"files, which is not read; {_REMEDY}"
        )
    by_rank = []
    for pattern in (DEEPSPEED_MODEL, _OPTIMIZER):
        files = {int(match[1] or 0): match[0] for match in map(pattern.fullmatch, names) if match}
        if missing := [rank for rank in range(max(files, default=-1)) if rank not in files]:
            raise CorruptionError(f"{directory!r}: the files of ranks {missing} are missing")
        by_rank.append([files[rank] for rank in sorted(files)])
    return by_rank[0], by_rank[1]


class _StandIn:
    """In place of an instance of one of DeepSpeed's classes; its attributes are set."""

    numel: int
    start: int


_CLASSES: list[Any] = [
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def _load(directory: str, name: str, weights_only: bool = True) -> Any:
    with safe_globals(_CLASSES):
        return map_file(os.path.join(directory, name), weights_only)


def _rest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client state: Lightning's checkpoint dict, or what there is for its keys."""
    rest = {key: value for key, value in content.items() if key not in _OF_DEEPSPEED}
    if _LIGHTNING not in rest:
        if content.get("lr_scheduler") is not None:
            rest["lr_schedulers"] = [content["lr_scheduler"]]
        rest.setdefault("global_step", content.get("global_steps", 0))
    return rest


class _Stored(NamedTuple):
    """State dicts of the module and, by parameter, of the optimizer; its groups are None without an optimizer."""

    model: dict[str, Any]
    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]] | None


def _shapes(content: Mapping[str, Any]) -> list[dict[str, Shape]]:
    """Return the shapes of the parameters in each vector."""
    return [{name: check_shape(shape) for name, shape in group.items()} for group in content["param_shapes"] or ()]


# ── universal checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────

_UNIVERSAL = "zero"


def _of_parameters(content: Mapping[str, Any], files: Mapping[str, Any]) -> _Stored:
    """Return the state in the files of a universal checkpoint, ``zero/<parameter>/<state>.pt``."""
    optimizer, shapes = files[f"{_UNIVERSAL}/optimizer_state.pt"], _shapes(content)
    base = optimizer.get("optimizer_state_dict", {}).get("state", {}).get(0, {})  # ZeRO 3 has the steps only here
    steps = {key: value for key, value in base.items() if not isinstance(value, Tensor) or not value.ndim}
    model, state = dict(content["module"]), dict[Any, dict[str, Any]]()
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        state[name], folder = dict(steps), f"{_UNIVERSAL}/{name}/"
        for file, value in files.items():
            if file.startswith(folder):
                tensor = value["param"] if isinstance(value, dict) else value
                key = file.removeprefix(folder).removesuffix(".pt")
                state[name][key] = tensor.view(shape) if tensor.ndim else tensor
        model[name] = state[name].pop("fp32")
    return _Stored(model, state, _named(optimizer["param_groups"], shapes))


# ── flat vectors ──────────────────────────────────────────────────────────────────────────────────────────────────────

_MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_BASE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


class _Piece(NamedTuple):
    """Consecutive elements of a tensor, and where they begin in a rank's vector of a number."""

    first: int
    size: int
    rank: int
    number: int
    begin: int


def _of_ranks(
    path: str, content: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], tensors: DictTensors
) -> _Stored:
    """Return the state in the files of ranks; with ZeRO, parameters and their state are parts of vectors."""
    shapes, model = _shapes(content), dict(content["module"])
    if not ranks:
        if shapes:
            raise CorruptionError(f"{path!r}: the files of the optimizer (*_optim_states.pt) are missing")
        optimizer = content["optimizer"] or {"state": {}, "param_groups": None}  # ZeRO 0
        return _Stored(model, optimizer["state"], optimizer["param_groups"])
    counts, stage = ranks[0]["partition_count"], int(ranks[0]["zero_stage"])
    if len(ranks) != (expected := max(counts) if isinstance(counts, list) else counts):
        raise CorruptionError(f"{path!r}: {len(ranks)} files of an optimizer on {expected} ranks")
    if stage == 3:
        pieces = _partitions(shapes, [len(vector) for vector in ranks[0][_MASTERS[3]]], len(ranks))
    else:
        pieces = _slices(shapes, [rank["param_slice_mappings"] for rank in ranks])
    masters, bases = [rank[_MASTERS[stage]] for rank in ranks], [rank[_BASE[stage]] for rank in ranks]
    state: dict[Any, dict[str, Any]] = {}
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        parts, state[name] = pieces[name], {}
        model[name] = _join(path, "weight", shape, parts, [masters[p.rank][p.number] for p in parts], tensors)
        for key, value in bases[parts[0].rank]["state"].get(parts[0].number, {}).items() if parts else ():
            if isinstance(value, Tensor) and value.ndim > 0:
                vectors = [bases[p.rank]["state"][p.number][key] for p in parts]
                state[name][key] = _join(path, key, shape, parts, vectors, tensors)
            else:
                state[name][key] = value
    return _Stored(model, state, _named(bases[0]["param_groups"], shapes))


def _frozen(path: str, models: Sequence[Mapping[str, Any]], tensors: DictTensors) -> dict[str, Tensor]:
    """Return frozen parameters of ZeRO 3, of which each rank has an equal part."""
    frozen = {}
    for name, size in (models[0]["frozen_param_shapes"] or {}).items():
        parts, shape = [model["frozen_param_fragments"][name] for model in models], check_shape(size)
        pieces = _partitions([{name: shape}], [len(parts[0])], len(models))[name]
        vectors = [parts[piece.rank] for piece in pieces]
        frozen[name] = _join(path, f"frozen {name}", shape, pieces, vectors, tensors)
    return frozen


def _join(
    path: str, kind: str, shape: Shape, pieces: Sequence[_Piece], vectors: Sequence[Tensor], tensors: DictTensors
) -> Tensor:
    """Return the stand-in for a tensor whose pieces are in vectors."""
    boxes, dtype = list[ForeignBox](), torch.float32
    for piece, vector in zip(pieces, vectors, strict=True):
        name, begin, dtype = f"{kind}/{piece.rank}/{piece.number}", piece.begin, vector.dtype
        if begin + piece.size > len(vector):
            raise FormatError(f"{path!r}: {name} has {len(vector)} elements, expected {begin + piece.size}")
        tensors.loads[name] = vector.detach
        for box in flat_boxes(shape, piece.first, piece.first + piece.size):
            boxes.append(ForeignBox(box, name, begin * dtype.itemsize))
            begin += box.numel
    return tensors.stand_in(ForeignTensor(DTYPES[dtype], shape, tuple(boxes)))


def _named(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Shape]]) -> list[dict[str, Any]]:
    """Return param groups with the names of their parameters in place of the numbers of their vectors."""
    numbers = [number for group in groups for number in group["params"]]
    if numbers != [*range(len(shapes))]:
        raise ValueError(f"param groups have the vectors {numbers} of {len(shapes)}")
    return [{**group, "params": [name for number in group["params"] for name in shapes[number]]} for group in groups]


def _slices(shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Any]) -> dict[str, list[_Piece]]:
    """Return the pieces of ZeRO 1 and 2: ranks list their slices of parameters, which follow one another."""
    pieces: dict[str, list[_Piece]] = {name: [] for group in shapes for name in group}
    for rank, mappings in enumerate(ranks):
        for number, mapping in enumerate(mappings):
            for name, part in mapping.items():
                done = sum(piece.size for piece in pieces[name])
                pieces[name].append(_Piece(done, part.numel, rank, number, part.start))
    return pieces


def _partitions(shapes: Sequence[Mapping[str, Shape]], lengths: Sequence[int], ranks: int) -> dict[str, list[_Piece]]:
    """Return the pieces of ZeRO 3: an equal part of each parameter on each rank, one after another in its vectors.

    Args:
        shapes: of the parameters in each vector; a large param group has several vectors.
        lengths: of the vectors.
        ranks: their number.

    Raises:
        ValueError: if the parameters don't fill their vectors.
    """
    pieces = dict[str, list[_Piece]]()
    for number, (group, length) in enumerate(zip(shapes, lengths, strict=True)):
        begin = 0
        for name, shape in group.items():
            numel = prod(shape)
            size = -(-numel // ranks)
            parts = [(rank, rank * size, min(size, numel - rank * size)) for rank in range(ranks)]
            pieces[name] = [_Piece(first, count, rank, number, begin) for rank, first, count in parts if count > 0]
            begin += size
        if begin != length:
            raise ValueError(f"the parameters of vector {number} have {begin} of its {length} elements")
    return pieces


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes of consecutive elements of a row-major tensor, in their order.

    >>> [(box.start, box.stop) for box in flat_boxes((3, 4), 2, 9)]
    [((0, 2), (1, 4)), ((1, 0), (2, 4)), ((2, 0), (3, 1))]
    """
    if not shape and start < stop:
        yield Box((), ())
        return
    row, inner = prod(shape[1:]), shape[1:]
    while start < stop:
        index, at = divmod(start, row)
        if at == 0 and start + row <= stop:  # whole rows
            yield Box((index, *(0 for _ in inner)), (stop // row, *inner))
            start = stop // row * row
            continue
        end = min(stop, start - at + row)
        for box in flat_boxes(inner, at, at + end - start):
            yield Box((index, *box.start), (index + 1, *box.stop))
        start = end
