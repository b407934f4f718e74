"""Split batches into microbatches, and join what microbatches gave to what the batch would have given."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_shardckpt.compat.pytree import tree_flatten, tree_unflatten
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.graph_entry import GraphEntry
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder, leak_error

_PLAIN = (str, bytes, int, float, bool, complex)
_WHOLE = (*_PLAIN, type(None), torch.dtype, torch.device)
T = TypeVar("T")


def samples_in(batch: Any) -> int:
    """The number of samples: the first dim of the tensors of ``batch``; 1 if there is none to split.

    Raises:
        UnsupportedCodeError: if the tensors disagree.
    """
    sizes = {name: t.shape[0] for name, t in _tensors(batch, "batch") if t.ndim and t.shape[0] != 1}
    if len(set(sizes.values())) > 1:
        raise UnsupportedCodeError(
            f"cannot split this batch into microbatches: the first dims of its tensors differ: {sizes}. Put the "
            "samples first in every tensor, or use pipeline_microbatches=1."
        )
    return next(iter(sizes.values()), 1)


def split_batch(batch: T, count: int) -> tuple[list[T], list[int]]:
    """``count`` microbatches of consecutive samples, sizes as equal as can be, and their sizes.

    Tensors are split along their first dim (0-dim ones, and ones of a single row in a larger batch, go to all), and
    so are lists of strings or numbers with one entry per sample.

    Raises:
        UnsupportedCodeError: for something that cannot be split.
    """
    if count == 1:
        return [batch], [1]
    samples = samples_in(batch)
    sizes = [samples // count + (i < samples % count) for i in range(count)]
    stops = [sum(sizes[: i + 1]) for i in range(count)]
    return [_slice(batch, stop - size, stop, samples, "batch") for size, stop in zip(sizes, stops, strict=True)], sizes


def some_and_middle(batch: T, count: int) -> tuple[list[T], tuple[int, int, int]]:
    """Return some samples of a batch, and those in their middle.

    As many as are in one of ``count`` microbatches, but at least 3.

    Returns:
        The two batches; and how many samples the first has, and where those of the second begin and end among them.

    Raises:
        UnsupportedCodeError: as ``split_batch``.
    """
    samples = samples_in(batch)
    most = min(samples, max(3, samples // count))
    start, stop = max(1, most // 3), most - most // 3
    return [_slice(batch, *ends, samples, "batch") for ends in ((0, most), (start, stop))], (most, start, stop)


def copied(value: Any) -> Any:
    """A copy of a batch, as far as its containers are known: steps may change what they get."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        items = {key: copied(item) for key, item in value.items()}
        return items if type(value) is dict else _like_mapping(value, items)
    if isinstance(value, list | tuple):
        found = [copied(item) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, {f.name: copied(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _slice(value: Any, start: int, stop: int, samples: int, where: str) -> Any:
    if isinstance(value, Tensor) and not value.is_nested:
        return value[start:stop] if value.ndim and value.shape[0] == samples else value
    if isinstance(value, _WHOLE):
        return value
    if isinstance(value, Mapping):
        sliced = {k: _slice(v, start, stop, samples, f"{where}[{k!r}]") for k, v in value.items()}
        return sliced if type(value) is dict else _like_mapping(value, sliced)
    if isinstance(value, list | tuple):
        plain = all(v is None or isinstance(v, _PLAIN) for v in value) and not hasattr(value, "_fields")
        if len(value) == samples and value and plain:
            return value[start:stop]
        items = [_slice(v, start, stop, samples, f"{where}[{i}]") for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: _slice(getattr(value, f.name), start, stop, samples, f"{where}.{f.name}")
            for f in dataclasses.fields(value)
        }
        return _with_fields(value, changes)
    raise UnsupportedCodeError(
        f"cannot split this batch into microbatches: {where} is a {type(value).__name__}. Batches may hold tensors, "
        "numbers, strings, dicts, lists, tuples and dataclasses; for others use pipeline_microbatches=1."
    )


def _with_fields(original: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass with other fields; unlike ``dataclasses.replace`` it makes nothing anew from them."""
    found = copy.copy(original)
    for name, value in fields.items():
        object.__setattr__(found, name, value)  # it may be frozen
    return found


def _like_mapping(original: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the class of ``original``, such as the BatchEncoding of Hugging Face."""
    try:
        return type(original)(items)
    except TypeError as error:
        raise UnsupportedCodeError(
            f"cannot split this batch into microbatches: {type(original).__name__} cannot be made from a dict "
            f"({error}). Collate into a dict, or use pipeline_microbatches=1."
        ) from error


def _tensors(tree: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        if not tree.is_nested:  # these are refused where they would be split
            yield where, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{where}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _tensors(value, f"{where}[{number}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, f.name), f"{where}.{f.name}")


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedTensor:
    """One tensor of the whole batch, made from those of microbatches, without history.

    Attributes:
        dim: along which they were joined; None if there was but one.
    """

    parts: tuple[Tensor, ...]
    whole: Tensor
    dim: int | None

    @property
    def requires_grad(self) -> bool:
        """True if a part has a history."""
        return any(part.requires_grad for part in self.parts)

    def split(self, grad: Tensor | None) -> Sequence[Tensor | None]:
        """Return each microbatch's part of the whole's gradient; None where nothing depended on it."""
        if grad is None or self.dim is None:
            return [grad] * len(self.parts)
        return torch.split(grad, [part.shape[self.dim] for part in self.parts], self.dim)


def join(parts: Sequence[Tensor], shape: Sequence[int], what: str) -> JoinedTensor:
    """Join what microbatches gave to what the whole batch would have given, of the known ``shape``.

    Raises:
        UnsupportedCodeError: if no dim adds up to that shape.
    """
    if len(parts) == 1:
        return JoinedTensor(tuple(parts), parts[0].detach(), None)
    dim = joined_dim([tuple(part.shape) for part in parts], tuple(shape))
    if dim is None:
        raise UnsupportedCodeError(
            f"{what} cannot be joined from microbatches: shapes {[tuple(p.shape) for p in parts]} do not make "
            f"{tuple(shape)}. The samples must keep a dim of their own through the layers, and other dims must not "
            'depend on values; use pipeline_loss="microbatch" or pipeline_microbatches=1.'
        )
    return JoinedTensor(tuple(parts), torch.cat([part.detach() for part in parts], dim), dim)


def joined_dim(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """Return along which dim parts of these shapes make the whole; None if along none."""
    for dim in range(len(whole)):
        alike = all(len(p) == len(whole) and p[:dim] == whole[:dim] and p[dim + 1 :] == whole[dim + 1 :] for p in parts)
        if alike and sum(p[dim] for p in parts) == whole[dim]:
            return dim
    return None


class Results:
    """Arguments and results of the last layer for the whole batch, joined from microbatches.

    Args:
        outputs: for each microbatch, the tensors among the arguments of the last layer, then those that it returned.
        carries: for each microbatch, the positions of the former among its arguments.
        layer: its name.
    """

    def __init__(self, outputs: Sequence[Sequence[Tensor]], carries: Sequence[tuple[int, ...]], layer: str) -> None:
        self._all, self._carries, self._layer = outputs, carries, layer
        self._chosen: list[list[int]] = []
        self._outputs: list[list[Tensor]] = []
        self._joined: list[tuple[JoinedTensor, GraphEntry | None] | None] = []

    def give(self, unknown: Mapping[int, Placeholder], out: Any) -> Any:
        """Give the layer's unknown inputs, by position, their values.

        Returns:
            Its results, given those of its weightless copy.

        Raises:
            UnsupportedCodeError: for a layer whose results depend on values.
        """
        for outputs, carry in zip(self._all, self._carries, strict=True):
            missing = next((position for position in unknown if position not in carry), None)
            if missing is not None:
                raise leak_error(f"argument {missing} of layer {self._layer}", unknown[missing])
            self._chosen.append([*map(carry.index, unknown), *range(len(carry), len(outputs))])
        self._outputs = [[some[k] for k in chosen] for some, chosen in zip(self._all, self._chosen, strict=True)]
        placeholders = [*unknown.values()]
        leaves, spec = tree_flatten(out)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        count = len(placeholders) + len(places)
        counts = [len(outputs) for outputs in self._outputs]
        if any(found != count for found in counts):
            raise UnsupportedCodeError(
                f"the last layer {self._layer} takes and returns {counts} tensors on microbatches, {count} on the "
                "whole batch: its results depend on values"
            )
        stubs = [leaves[n] for n in places]
        shapes = [tuple(like.shape) for like in stubs]
        for number, one in enumerate(placeholders):
            self._joined.append(self._enter_input(number, one))
        for place, returned, shape in zip(places, stubs, shapes, strict=True):
            number = len(self._joined)
            like: Any = returned
            if any(returned is one for one in placeholders):
                leaves[place] = like = self._returned_input(number, returned, shape)
                if like is returned:  # what entered with it, or stays unknown with it
                    self._joined.append(None)
                    continue
            if isinstance(like, Placeholder):
                joined = join([o[number] for o in self._outputs], shape, f"a result of the last layer {self._layer}")
                self._joined.append((joined, like.become(joined.whole, requires_grad=joined.requires_grad)))
            else:  # it passes through the layer as it came
                self._joined.append(None)
        return tree_unflatten(leaves, spec)

    def _enter_input(self, number: int, like: Placeholder) -> tuple[JoinedTensor, GraphEntry | None] | None:
        try:
            joined = join([outputs[number] for outputs in self._outputs], like.shape, "")
        except UnsupportedCodeError:
            return None  # not one per sample; it stays unknown, which is an error only if the step uses it
        return joined, like.become(joined.whole, requires_grad=joined.requires_grad)

    def _returned_input(self, number: int, like: Any, shape: tuple[int, ...]) -> Any:
        """Return what stands for a result that the weightless copy took for its input: the input, if that is sure."""
        if all(any(o[number] is o[k] for k in range(number)) for o in self._outputs):
            return like
        meta = torch.empty(shape, dtype=like.dtype, device="meta")
        return Placeholder.of(meta, f"a result of {self._layer}", like.device)

    def gradients(self) -> list[list[Tensor | None]]:
        """Return, after a backward, the gradients of each microbatch's tensors."""
        found: list[list[Tensor | None]] = [[None] * len(outputs) for outputs in self._all]
        for place, joined in enumerate(self._joined):
            if joined is not None and joined[1] is not None:
                parts = joined[0].split(joined[1].grad)
                for gradients, chosen, part in zip(found, self._chosen, parts, strict=True):
                    gradients[chosen[place]] = part
        return found
