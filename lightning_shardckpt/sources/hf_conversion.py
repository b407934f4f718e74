"""Conversions of tensors that Hugging Face's transformers makes when it reads a model's files.

A model may have other names and tensors than its files: the experts of a mixture are one tensor in memory, and one for
each expert in files. transformers has a list of such conversions for each model. It renames; stacking, concatenating
and splitting along the first dim are done here on boxes of bytes, without reading one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_shardckpt.compat.transformers import Conversion, conversions_of
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignTensor


class UnsupportedError(Exception):
    """A conversion other than stacking, concatenating and splitting; caught where the tensor's name is known."""


def hugging_face_models(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost models of transformers inside a module, by canonical name."""
    models: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        name = clean_fqn(name)
        if any(name.startswith(f"{outer}.") or not outer for outer in models):
            continue
        if isinstance(getattr(type(module), "base_model_prefix", None), str) and hasattr(module, "config"):
            models[name] = module
    return models


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """Stored tensors that a converter turns into one or more tensors of the model: in order, by its patterns."""

    converter: Conversion
    parts: Mapping[str, Sequence[str]]


def names_in_model(
    model: nn.Module, stored: Iterable[str], known: Callable[[str], bool]
) -> dict[str, str | JoinedSource]:
    """Return the stored name, or the stored tensors to join, by name in a model of transformers.

    Args:
        model: whose conversions are applied.
        stored: names in the model's files. Names without a place in the model are returned unchanged.
        known: returns whether the model has a name.
    """
    steps, prefix = conversions_of(model), getattr(type(model), "base_model_prefix", "")
    renamings = [step for step in steps if not isinstance(step, Conversion)]
    converters = [step for step in steps if isinstance(step, Conversion)]

    def find(name: str) -> str | None:  # with or without the prefix of the base model
        bare = name.removeprefix(f"{prefix}.") if prefix else name
        return next((n for n in (name, bare, f"{prefix}.{name}") if known(n)), None)

    sources: dict[str, str | JoinedSource] = {}
    joined: dict[str, tuple[Conversion, dict[str, list[str]]]] = {}
    for name in sorted(stored, key=_natural):
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        for converter in converters:
            renamed, pattern = converter.rename_source_key(new)
            if pattern is not None and (full := find(renamed)) is not None:
                joined.setdefault(full, (converter, {}))[1].setdefault(pattern, []).append(name)
                break
        else:
            sources.setdefault(find(new) or find(name) or name, name)
    return sources | {name: JoinedSource(converter, parts) for name, (converter, parts) in joined.items()}


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts "layers.10" after "layers.9"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def convert(
    converter: Conversion, parts: Mapping[str, Sequence[ForeignTensor]], target: str
) -> dict[str, ForeignTensor]:
    """Return the tensors of the model that a conversion makes, by name.

    Args:
        converter: of transformers.
        parts: stored tensors by the converter's pattern, in order.
        target: the name of the first result.

    Raises:
        UnsupportedError: naming the unsupported operation.
    """
    pieces: dict[str, list[ForeignTensor]] = {pattern: list(tensors) for pattern, tensors in parts.items()}
    sources, targets = list(converter.source_patterns), list(converter.target_patterns)
    for operation in converter.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", None)
        has_count = getattr(operation, "num_shards_attribute", None) is not None
        if kind == "MergeModulelist" and dim is not None:
            names = {pattern: targets[0] if len(pieces) == 1 else pattern for pattern in pieces}
            pieces = {names[pattern]: [stack(tensors, dim)] for pattern, tensors in pieces.items()}
        elif kind == "Concatenate" and dim is not None:
            pieces = {targets[0]: [concatenate([t for s in sources for t in pieces.get(s, [])], dim)]}
        elif kind == "Chunk" and dim == 0 and not has_count and [*map(len, pieces.values())] == [1]:
            ((tensor,),) = pieces.values()
            pieces = {name: [piece] for name, piece in zip(targets, chunks(tensor, len(targets)), strict=True)}
        else:
            raise UnsupportedError(f"{kind} of {', '.join(sources)} along dim {dim}")
    results = {name: tensors[0] for name, tensors in pieces.items() if len(tensors) == 1}
    if len(results) != len(pieces):
        raise UnsupportedError(f"{len(pieces)} results of {', '.join(sources)}")
    first = next(name for name in [*targets, ""] if name in target)
    return {target.replace(first, name, 1): tensor for name, tensor in results.items()}


def stack(tensors: Sequence[ForeignTensor], dim: int) -> ForeignTensor:
    """Stack tensors as ``torch.stack`` does.

    Raises:
        UnsupportedError: if dtypes or shapes differ.
    """
    _check_equal([(t.dtype, t.shape) for t in tensors])
    return concatenate([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: ForeignTensor, dim: int) -> ForeignTensor:
    """Insert a dim of length 1."""

    def insert(shape: Shape, value: int) -> Shape:
        return (*shape[:dim], value, *shape[dim:])

    boxes = [ForeignBox(Box(insert(b.start, 0), insert(b.stop, 1)), file, begin) for b, file, begin in tensor.boxes]
    return ForeignTensor(tensor.dtype, insert(tensor.shape, 1), tuple(boxes))


def concatenate(tensors: Sequence[ForeignTensor], dim: int) -> ForeignTensor:
    """Concatenate tensors as ``torch.cat`` does.

    Raises:
        UnsupportedError: if dtypes or other dims differ.
    """
    first, at, boxes = tensors[0], 0, list[ForeignBox]()
    if any(len(t.shape) <= dim for t in tensors):
        raise UnsupportedError(f"shapes {[t.shape for t in tensors[:3]]} along dim {dim}")
    _check_equal([(t.dtype, (*t.shape[:dim], *t.shape[dim + 1 :])) for t in tensors])
    for tensor in tensors:
        by = tuple(at if d == dim else 0 for d in range(len(tensor.shape)))
        boxes += [ForeignBox(box.shift(by), file, begin) for box, file, begin in tensor.boxes]
        at += tensor.shape[dim]
    return ForeignTensor(first.dtype, (*first.shape[:dim], at, *first.shape[dim + 1 :]), tuple(boxes))


def chunks(tensor: ForeignTensor, count: int) -> list[ForeignTensor]:
    """Split a tensor along the first dim as ``torch.chunk`` does.

    Raises:
        UnsupportedError: if the tensor is not a single box, or the chunks would be uneven.
    """
    if len(tensor.boxes) != 1 or not tensor.shape or tensor.shape[0] % count:
        raise UnsupportedError(f"Chunk of shape {tensor.shape} into {count}")
    (_, file, begin), shape = tensor.boxes[0], (tensor.shape[0] // count, *tensor.shape[1:])
    box, nbytes = Box.whole(shape), bytes_in(shape, tensor.dtype)
    return [ForeignTensor(tensor.dtype, shape, (ForeignBox(box, file, begin + i * nbytes),)) for i in range(count)]


def _check_equal(kinds: Sequence[Any]) -> None:
    other = next((kind for kind in kinds if kind != kinds[0]), None)
    if other is not None:
        raise UnsupportedError(f"tensors that differ, {kinds[0]} and {other}")
