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
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import safe_globals

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.value_checks import check_file_name, check_shape
from lightning_shardckpt.sources.open_source import DEEPSPEED_MODEL, find_deepspeed_directory
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, close_on_error
from lightning_shardckpt.sources.torch_save import map_file, source_of_dicts
from lightning_shardckpt.state.tensor_bytes import DTYPES, dtype_name
from lightning_shardckpt.storage.local_storage import LocalReader

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNSUPPORTED = {
    r"layer_\d+-model.*": "of a pipeline module",
    r".*expert_\d+.*|.*expp_rank_\d+.*": "with experts",
    r"offloaded_tensors": "with tensors offloaded to files",
}
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
    with close_on_error(LocalReader(directory)) as reader:
        contents = [_load(directory, name, weights_only) for name in models]
        try:
            states = [_load(directory, name)["optimizer_state_dict"] for name in optimizers]
            stored = _Stored(directory, contents, states)
        except ShardCkptError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{directory!r}: not laid out as DeepSpeed 0.19 does: {error!r}; {_REMEDY}") from error
        rest = _rest(contents[0])
        if stored.groups is not None:
            rest["optimizer_states"] = [{"state": stored.state, "param_groups": stored.groups}]
        sizes = {name: reader.size(name) for name in (*models, *optimizers, *stored.files)}

        def load(name: str) -> Tensor:
            for file, size in sizes.items():  # to read the memory of a truncated file would end in a signal
                if (now := reader.size(file)) < size:
                    raise CorruptionError(f"{directory!r}: {file} has {now} bytes, it had {size} when it was opened")
            return stored.vectors[name]

        return source_of_dicts(directory, reader, load, stored.model, rest, stored.locate)


def _rank_files(directory: str) -> tuple[list[str], list[str]]:
    """Return the files of the model, and of the optimizer, by rank."""
    names = os.listdir(directory)
    for unsupported, kind in _UNSUPPORTED.items():
        if any(re.fullmatch(unsupported, name) for name in names):
            raise FormatError(f"{directory!r}: a checkpoint of DeepSpeed {kind}, which is not read; {_REMEDY}")
    by_rank = []
    for pattern in (DEEPSPEED_MODEL, _OPTIMIZER):
        found = {name: match for name in names if (match := pattern.fullmatch(name))}
        if any(int(match[2]) for match in found.values()):
            raise FormatError(f"{directory!r}: a model-parallel checkpoint of DeepSpeed, which is not read; {_REMEDY}")
        by_rank.append({int(match[1] or 0): name for name, match in found.items()})
    for files in by_rank:
        missing = [rank for rank in range(max(files, default=-1)) if rank not in files]
        if missing:
            raise CorruptionError(f"{directory!r}: the files of ranks {missing} are missing")
    return [by_rank[0][rank] for rank in sorted(by_rank[0])], [by_rank[1][rank] for rank in sorted(by_rank[1])]


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


def _load(directory: str, name: str, weights_only: bool = True) -> dict[str, Any]:
    with safe_globals(_CLASSES):
        content = map_file(os.path.join(directory, name), weights_only)
    if not isinstance(content, dict):
        raise FormatError(f"{directory!r}: {name} holds a {type(content).__name__}, not a dict")
    return content


def _rest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client state: Lightning's checkpoint dict, or what there is for its keys."""
    rest = {key: value for key, value in content.items() if key not in _OF_DEEPSPEED}
    if _LIGHTNING not in rest:
        if content.get("lr_scheduler") is not None:
            rest["lr_schedulers"] = [content["lr_scheduler"]]
        rest.setdefault("global_step", content.get("global_steps", 0))
    return rest


# ── flat vectors ──────────────────────────────────────────────────────────────────────────────────────────────────────

_UNIVERSAL = "zero"
_MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_BASE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


class _Piece(NamedTuple):
    """Consecutive elements of a tensor, and where they begin in a rank's vector of a number."""

    first: int
    size: int
    rank: int
    number: int
    begin: int


class _Stored:
    """The content of the files as state dicts, with stand-ins on the meta device for tensors in flat vectors.

    Attributes:
        model: the state dict of the module.
        state: of the optimizer, by parameter.
        groups: the optimizer's param groups; None without an optimizer.
        vectors: the stored tensors, by the "file" of `locate`.
        files: those of a universal checkpoint.
    """

    def __init__(self, path: str, models: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> None:
        first, self._path = models[0], path
        self.vectors = dict[str, Tensor]()
        self._located: dict[int, tuple[Tensor, ForeignTensor]] = {}
        self.model: dict[str, Any] = dict(first["module"])
        self.state = dict[Any, dict[str, Any]]()
        self.groups: list[dict[str, Any]] | None = None
        self.files = list[str]()
        shapes = [{name: check_shape(of) for name, of in group.items()} for group in first["param_shapes"] or ()]
        if os.path.isdir(os.path.join(path, _UNIVERSAL)):
            self._take_files(shapes)
        elif ranks:
            self._take_ranks(shapes, ranks)
        elif shapes:
            raise CorruptionError(f"{path!r}: the files of the optimizer (*_optim_states.pt) are missing")
        elif first["optimizer"] is not None:  # ZeRO 0
            self.state, self.groups = first["optimizer"]["state"], first["optimizer"]["param_groups"]
        if any(isinstance(value, Tensor) and value.shape == (0,) for value in first["module"].values()):  # ZeRO 3
            self._take_frozen(models)
        for alias, name in (first["shared_params"] or {}).items():
            self.model[alias] = self.model[name]

    def _take_ranks(self, shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Mapping[str, Any]]) -> None:
        counts, stage = ranks[0]["partition_count"], int(ranks[0]["zero_stage"])
        if len(ranks) != (expected := max(counts) if isinstance(counts, list) else counts):
            raise CorruptionError(f"{self._path!r}: {len(ranks)} files of an optimizer on {expected} ranks")
        if stage == 3:
            pieces = _partitions(shapes, [len(vector) for vector in ranks[0][_MASTERS[3]]], len(ranks))
        else:
            pieces = _slices(shapes, [rank["param_slice_mappings"] for rank in ranks])
        self._take(shapes, pieces, [rank[_MASTERS[stage]] for rank in ranks], [rank[_BASE[stage]] for rank in ranks])

    def _take_files(self, shapes: Sequence[Mapping[str, Shape]]) -> None:
        """Take a universal checkpoint."""

        def read(*names: str) -> Any:
            self.files.append(os.path.join(_UNIVERSAL, *names))
            return map_file(os.path.join(self._path, self.files[-1]), True)

        with safe_globals(_CLASSES):
            optimizer = read("optimizer_state.pt")
        base = optimizer.get("optimizer_state_dict", {}).get("state", {}).get(0, {})  # ZeRO 3 has the steps only here
        steps = {key: value for key, value in base.items() if not isinstance(value, Tensor) or not value.ndim}
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            files = sorted(os.listdir(os.path.join(self._path, _UNIVERSAL, check_file_name(name))))
            values = {file.removesuffix(".pt"): read(name, file) for file in files if file.endswith(".pt")}
            tensors = {key: value["param"] if isinstance(value, dict) else value for key, value in values.items()}
            shaped = {key: tensor.view(shape) if tensor.ndim else tensor for key, tensor in tensors.items()}
            self.model[name] = shaped.pop("fp32")
            self.state[name] = {**steps, **shaped}
        self.groups = _named(optimizer["param_groups"], shapes)

    def locate(self, name: str, tensor: Tensor) -> ForeignTensor:
        """Return the boxes of a stand-in, or of another tensor of the files."""
        if id(tensor) in self._located:
            return self._located[id(tensor)][1]
        self.vectors[name], shape = tensor, tuple(tensor.shape)
        return ForeignTensor(dtype_name(tensor, name), shape, (ForeignBox(Box.whole(shape), name, 0),))

    def _take(
        self,
        shapes: Sequence[Mapping[str, Shape]],
        pieces: Mapping[str, Sequence[_Piece]],
        masters: Sequence[Sequence[Tensor]],
        bases: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take the parameters and their optimizer state; ``masters`` and state dicts of the optimizer are by rank."""
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            self.model[name] = self._stand_in("weight", shape, pieces[name], lambda p: masters[p.rank][p.number])
            self.state[name] = {}
            states = [bases[piece.rank]["state"].get(piece.number, {}) for piece in pieces[name][:1]]
            for key, value in (states[0] if states else {}).items():
                is_flat = isinstance(value, Tensor) and value.ndim > 0

                def vector(piece: _Piece, key: str = key) -> Tensor:
                    return bases[piece.rank]["state"][piece.number][key]  # type: ignore[no-any-return]

                self.state[name][key] = self._stand_in(key, shape, pieces[name], vector) if is_flat else value
        self.groups = _named(bases[0]["param_groups"], shapes)

    def _take_frozen(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Take frozen parameters of ZeRO 3, of which each rank has an equal part."""
        for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
            parts = [model["frozen_param_fragments"][name] for model in models]
            shape = check_shape(shape)
            pieces = _partitions([{name: shape}], [len(parts[0])], len(models))[name]
            self.model[name] = self._stand_in(f"frozen {name}", shape, pieces, lambda piece: parts[piece.rank])  # noqa: B023  # called at once

    def _stand_in(
        self, kind: str, shape: Shape, pieces: Sequence[_Piece], vector: Callable[[_Piece], Tensor]
    ) -> Tensor:
        boxes, dtype = list[ForeignBox](), torch.float32
        for piece in pieces:
            flat, name, begin = vector(piece), f"{kind}/{piece.rank}/{piece.number}", piece.begin
            if begin + piece.size > len(flat):
                raise FormatError(f"{self._path!r}: {name} has {len(flat)} elements, expected {begin + piece.size}")
            self.vectors[name], dtype = flat, flat.dtype
            for box in flat_boxes(shape, piece.first, piece.first + piece.size):
                boxes.append(ForeignBox(box, name, begin * dtype.itemsize))
                begin += box.numel
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._located[id(tensor)] = tensor, ForeignTensor(DTYPES[dtype], shape, tuple(boxes))
        return tensor


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
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    parts = [(first - 1, start, min(stop, first * row))] if start < first * row else []
    if first < last:
        parts.append((-1, first, last))
    if stop > last * row and last >= first:
        parts.append((last, max(start, last * row), stop))
    for index, begin, end in parts:
        if index < 0:
            yield Box((begin, *(0 for _ in shape[1:])), (end, *shape[1:]))
            continue
        for box in flat_boxes(shape[1:], begin - index * row, end - index * row):
            yield Box((index, *box.start), (index + 1, *box.stop))
