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
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import safe_globals

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.value_checks import check_shape
from lightning_shardckpt.sources.open_source import DEEPSPEED_MODEL
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source
from lightning_shardckpt.sources.torch_save import DictTensors, map_file, source_of_dicts
from lightning_shardckpt.state.local_tensors import DTYPES
from lightning_shardckpt.state.state_dicts import VERSION
from lightning_shardckpt.storage.local_storage import LocalReader

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNSUPPORTED = re.compile(r".*mp_rank_0*[1-9].*|layer_\d+-model.*|.*expert_\d+.*|.*expp_rank_\d+.*|offloaded_tensors")
_UNIVERSAL = "zero"
_OF_DEEPSPEED = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_config"}
    | {"skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"}
    | {"checkpoint_parallel_dimensions", "universal_checkpoint_info"}
)
_Optimizer = tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]
"""The state of an optimizer by parameter, and its param groups."""
_Shapes = Sequence[Mapping[str, Shape]]
"""The shapes of the parameters that follow one another in each vector, by name."""


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory with the files of ranks; ``weights_only`` is as in ``torch.load``, for the client state."""
    models, optimizers = (_rank_files(path, pattern) for pattern in (DEEPSPEED_MODEL, _OPTIMIZER))
    universal = [str(file.relative_to(path)) for file in sorted(Path(path, _UNIVERSAL).rglob("*.pt"))]
    tensors = DictTensors(LocalReader(path), [*models, *optimizers, *universal])
    contents = [_load(path, name, weights_only) for name in models]
    content, model = contents[0], dict(contents[0]["module"])
    shapes = [{n: check_shape(shape) for n, shape in of.items()} for of in content["param_shapes"] or ()]
    state, groups = dict[Any, dict[str, Any]](), None
    if universal:
        state, groups = _of_parameters({name: _load(path, name) for name in universal}, shapes, model)
    elif optimizers:
        states = [_load(path, name)["optimizer_state_dict"] for name in optimizers]
        state, groups = _of_ranks(states, shapes, model, tensors)
    elif shapes:
        raise CorruptionError("the files of the optimizer (*_optim_states.pt) are missing")
    elif content["optimizer"]:  # ZeRO 0
        state, groups = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    if any(isinstance(value, Tensor) and value.shape == (0,) for value in content["module"].values()):
        for name, size in (content["frozen_param_shapes"] or {}).items():  # each rank has an equal part of ZeRO 3
            parts, shape = [one["frozen_param_fragments"][name] for one in contents], check_shape(size)
            pieces = _partitions([{name: shape}], [len(parts[0])], len(parts))[name]
            model[name] = _join(f"frozen {name}", shape, [(piece, parts[piece.rank]) for piece in pieces], tensors)
    model |= {alias: model[name] for alias, name in (content["shared_params"] or {}).items()}
    rest = {key: value for key, value in content.items() if key not in _OF_DEEPSPEED}
    if VERSION not in rest:
        if content.get("lr_scheduler") is not None:
            rest["lr_schedulers"] = [content["lr_scheduler"]]
        rest.setdefault("global_step", content.get("global_steps", 0))
    if groups is not None:
        rest["optimizer_states"] = [{"state": state, "param_groups": groups}]
    return source_of_dicts(path, tensors, model, rest)


def _rank_files(path: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the files with names of a pattern, by rank."""
    names = os.listdir(path)
    if unsupported := sorted(filter(_UNSUPPORTED.fullmatch, names)):
        raise FormatError(
            f"{unsupported[0]} is of model parallelism, a pipeline, experts or tensors offloaded to files, which is "
            "not read; convert it with DeepSpeed's zero_to_fp32.py, and load the result"
        )
    files = {int(match[1] or 0): match[0] for match in map(pattern.fullmatch, names) if match}
    if missing := [rank for rank in range(max(files, default=-1)) if rank not in files]:
        raise CorruptionError(f"the files of ranks {missing} are missing")
    return [files[rank] for rank in sorted(files)]


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


def _load(path: str, name: str, weights_only: bool = True) -> Any:
    with safe_globals(_CLASSES):
        return map_file(os.path.join(path, name), weights_only)


def _named(groups: Sequence[Mapping[str, Any]], shapes: _Shapes) -> list[dict[str, Any]]:
    """Return param groups with the names of their parameters in place of the numbers of their vectors."""
    numbers = [number for group in groups for number in group["params"]]
    if numbers != [*range(len(shapes))]:
        raise ValueError(f"param groups have the vectors {numbers} of {len(shapes)}")
    return [{**group, "params": [name for number in group["params"] for name in shapes[number]]} for group in groups]


def _of_parameters(files: Mapping[str, Any], shapes: _Shapes, model: dict[str, Any]) -> _Optimizer:
    """Return the optimizer in the files of a universal checkpoint, ``zero/<parameter>/<state>.pt``; fill the model."""
    optimizer = files[f"{_UNIVERSAL}/optimizer_state.pt"]
    whole = {name: shape for group in shapes for name, shape in group.items()}
    base = optimizer.get("optimizer_state_dict", {}).get("state", {}).get(0, {})  # ZeRO 3 has the steps only here
    steps = {key: value for key, value in base.items() if not isinstance(value, Tensor) or not value.ndim}
    state: dict[Any, dict[str, Any]] = {name: dict(steps) for name in whole}
    for file, value in files.items():
        folder, _, key = file.removesuffix(".pt").rpartition("/")
        if (name := folder.removeprefix(f"{_UNIVERSAL}/")) in whole:
            tensor = value["param"] if isinstance(value, dict) else value
            state[name][key] = tensor.view(whole[name]) if tensor.ndim else tensor
    model |= {name: entries.pop("fp32") for name, entries in state.items()}
    return state, _named(optimizer["param_groups"], shapes)


# ── flat vectors ──────────────────────────────────────────────────────────────────────────────────────────────────────

_OF_STAGE_3 = ("fp32_flat_groups", "optimizer_state_dict")
_OF_STAGES = ("single_partition_of_fp32_groups", "base_optimizer_state")


class _Piece(NamedTuple):
    """Elements of a tensor, which follow those of the piece before: a part of a rank's vector of a number."""

    rank: int
    number: int
    begin: int
    size: int


def _of_ranks(
    ranks: Sequence[Mapping[str, Any]], shapes: _Shapes, model: dict[str, Any], tensors: DictTensors
) -> _Optimizer:
    """Return the optimizer in the files of ranks, of whose vectors parameters and their state are parts."""
    counts, stage, state = ranks[0]["partition_count"], int(ranks[0]["zero_stage"]), dict[Any, dict[str, Any]]()
    if len(ranks) != (expected := max(counts) if isinstance(counts, list) else counts):
        raise ValueError(f"{len(ranks)} files of an optimizer on {expected} ranks")
    masters, bases = ([rank[name] for rank in ranks] for name in (_OF_STAGE_3 if stage == 3 else _OF_STAGES))
    if stage == 3:
        pieces = _partitions(shapes, [len(vector) for vector in masters[0]], len(ranks))
    else:
        pieces = {name: [] for group in shapes for name in group}
        for rank, mappings in enumerate(one["param_slice_mappings"] for one in ranks):
            for number, mapping in enumerate(mappings):
                for name, part in mapping.items():
                    pieces[name].append(_Piece(rank, number, part.start, part.numel))
    for name, shape in chain(*(group.items() for group in shapes)):
        parts, state[name] = pieces[name], {}
        model[name] = _join("weight", shape, [(p, masters[p.rank][p.number]) for p in parts], tensors)
        for key, value in bases[parts[0].rank]["state"].get(parts[0].number, {}).items() if parts else ():
            if isinstance(value, Tensor) and value.ndim > 0:
                value = _join(key, shape, [(p, bases[p.rank]["state"][p.number][key]) for p in parts], tensors)
            state[name][key] = value
    return state, _named(bases[0]["param_groups"], shapes)


def _partitions(shapes: _Shapes, lengths: Sequence[int], ranks: int) -> dict[str, list[_Piece]]:
    """Return the pieces of ZeRO 3: an equal part of each parameter on each rank, one after another in its vectors.

    Raises a ValueError if the parameters don't fill their vectors, whose lengths are given.
    """
    pieces = dict[str, list[_Piece]]()
    for number, (group, length) in enumerate(zip(shapes, lengths, strict=True)):
        begin = 0
        for name, shape in group.items():
            numel = prod(shape)
            size = -(-numel // ranks)
            counts = [min(size, numel - rank * size) for rank in range(ranks)]
            pieces[name] = [_Piece(rank, number, begin, count) for rank, count in enumerate(counts) if count > 0]
            begin += size
        if begin != length:
            raise ValueError(f"the parameters of vector {number} have {begin} of its {length} elements")
    return pieces


def _join(kind: str, shape: Shape, parts: Sequence[tuple[_Piece, Tensor]], tensors: DictTensors) -> Tensor:
    """Return the stand-in for a tensor whose pieces are in vectors."""
    boxes, dtype, first = list[ForeignBox](), torch.float32, 0
    for (rank, number, begin, size), vector in parts:
        name, dtype = f"{kind}/{rank}/{number}", vector.dtype
        if begin + size > len(vector):
            raise ValueError(f"{name} has {len(vector)} elements, expected {begin + size}")
        tensors.loads[name] = vector.detach
        for box in _flat_boxes(shape, first, first + size):
            boxes.append(ForeignBox(box, name, begin * dtype.itemsize))
            begin += box.numel
        first += size
    return tensors.stand_in(ForeignTensor(DTYPES[dtype], shape, tuple(boxes)))


def _flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes of consecutive elements of a row-major tensor, in their order."""
    if not shape and start < stop:
        yield Box((), ())
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        index = tuple(start // stride % length for stride, length in zip(strides, shape, strict=True))
        dim = next(d for d, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        rows = min((stop - start) // strides[dim], shape[dim] - index[dim])
        yield Box(index, (*(i + 1 for i in index[:dim]), index[dim] + rows, *shape[dim + 1 :]))
        start += rows * strides[dim]
