"""Split batches into microbatches, and join the results of microbatches into results of the batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_shardckpt.compat.torch_tensors import tree_flatten, tree_unflatten
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import GraphEntry, Placeholder, leak_error

_PLAIN = (str, bytes, int, float, bool, complex)
_WHOLE = (*_PLAIN, type(None), torch.dtype, torch.device)
T = TypeVar("T")


def count_samples(batch: Any) -> int:
    """Return the number of samples: the size of the first dim of the tensors in ``batch``; 1 without such tensors.

    Raises:
        UnsupportedCodeError: if the sizes differ.
    """
    sizes: dict[str, int] = {}

    def measure(value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and not value.is_nested and value.ndim and value.shape[0] != 1:
            sizes[where] = value.shape[0]
        return _descend(value)

    _map(batch, measure, "batch")
    if len(set(sizes.values())) > 1:
        raise UnsupportedCodeError(
            f"cannot split this batch into microbatches: the first dims of its tensors differ: {sizes}. Put the "
            "samples first in every tensor, or use Pipeline(microbatches=1)."
        )
    return next(iter(sizes.values()), 1)


def split_batch(batch: T, count: int) -> tuple[list[T], list[int]]:
    """Return ``count`` microbatches of consecutive samples, of sizes that differ by at most 1, and the sizes.

    Tensors are split along their first dim, and so are lists of strings or numbers with one item per sample. Every
    microbatch gets all 0-dim tensors, and tensors of a single row in a larger batch.

    Raises:
        UnsupportedCodeError: if a value cannot be split.
    """
    if count == 1:
        return [batch], [1]
    samples = count_samples(batch)
    sizes = [samples // count + (i < samples % count) for i in range(count)]
    stops = [sum(sizes[: i + 1]) for i in range(count)]
    return [_slice(batch, stop - size, stop, samples) for size, stop in zip(sizes, stops, strict=True)], sizes


def slice_for_trial(batch: T, count: int) -> tuple[list[T], tuple[int, int, int]]:
    """Return a slice of a batch, and a part of the slice.

    The first one has the size of one of ``count`` microbatches, but at least 6 samples. The part doesn't begin with the
    first one, so that code sees its samples at other places. It isn't the middle, which ``flip(0)`` turns around in
    itself, as mixup does. It has an even number of samples, so that halves fit.

    Returns:
        The two slices; then the number of samples of the first, and the ``start`` and ``stop`` of the second inside it.

    Raises:
        UnsupportedCodeError: as in `split_batch`.
    """
    samples = count_samples(batch)
    most = min(samples, max(6, samples // count))
    start = 2 if most == 4 else max(1, most // 6)
    stop = min(3 * start, most)
    return [_slice(batch, *ends, samples) for ends in ((0, most), (start, stop))], (most, start, stop)


def copy_batch(value: Any) -> Any:
    """Return a copy of a batch, since steps may change it in place. Objects of unknown classes are not copied."""
    return _map(value, lambda item, where: item.clone() if isinstance(item, Tensor) else _descend(item), "batch")


def _slice(batch: T, start: int, stop: int, samples: int) -> T:
    def cut(value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and not value.is_nested:
            return value[start:stop] if value.ndim and value.shape[0] == samples else value
        if isinstance(value, _WHOLE):
            return value
        is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == samples
        if is_list and all(item is None or isinstance(item, _PLAIN) for item in value):
            return value[start:stop]
        if _descend(value) is not _CONTAINER:
            raise UnsupportedCodeError(
                f"cannot split this batch into microbatches: {where} is a {type(value).__name__}. Batches may hold "
                "tensors, numbers, strings, dicts, lists, tuples and dataclasses; for others use "
                "Pipeline(microbatches=1)."
            )
        return _CONTAINER

    return _map(batch, cut, "batch")  # type: ignore[no-any-return]  # of the class of the batch


_CONTAINER = object()


def _descend(value: Any) -> Any:
    """Return `_CONTAINER` for a mapping, list, tuple or dataclass, and any other value itself."""
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return _CONTAINER if is_dataclass or isinstance(value, Mapping | list | tuple) else value


def _map(value: Any, convert: Callable[[Any, str], Any], where: str) -> Any:
    """Return ``convert`` of a value and its place; of its items, if that is `_CONTAINER`, in a container like it."""
    converted = convert(value, where)
    if converted is not _CONTAINER:
        return converted
    if isinstance(value, Mapping):
        items = {key: _map(item, convert, f"{where}[{key!r}]") for key, item in value.items()}
        return type(value)(items)  # type: ignore[call-arg]  # also Hugging Face's BatchEncoding
    if isinstance(value, list | tuple):
        parts = [_map(item, convert, f"{where}[{number}]") for number, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    result = copy.copy(value)
    for name in [field.name for field in dataclasses.fields(value)]:  # the class may be frozen
        object.__setattr__(result, name, _map(getattr(value, name), convert, f"{where}.{name}"))
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor of the whole batch, joined from tensors of microbatches, without autograd history.

    Attributes:
        whole: the joined tensor.
        requires_grad: True if a part requires a gradient.
        dim: the dim along which the parts were joined.
        sizes: theirs along it; empty for a single microbatch.
    """

    whole: Tensor
    requires_grad: bool
    dim: int
    sizes: list[int]

    def split(self, grad: Tensor | None, count: int) -> Sequence[Tensor | None]:
        """Return the part of each of ``count`` microbatches in the gradient of ``whole``; None if there is none."""
        return [grad] * count if grad is None or not self.sizes else torch.split(grad, self.sizes, self.dim)


def join(parts: Sequence[Tensor], shape: Sequence[int], name: str) -> JoinedTensor:
    """Join tensors of microbatches into a tensor of the whole batch, of the known ``shape``.

    Raises:
        UnsupportedCodeError: if their sizes add up to that shape along no dim; names the tensor by ``name``.
    """
    requires_grad = any(part.requires_grad for part in parts)
    if len(parts) == 1:
        return JoinedTensor(parts[0].detach(), requires_grad, 0, [])
    whole, shapes = tuple(shape), [tuple(part.shape) for part in parts]
    for dim, size in enumerate(whole):
        sizes = [part[dim] for part in shapes if len(part) == len(whole)]
        if shapes == [(*whole[:dim], own, *whole[dim + 1 :]) for own in sizes] and sum(sizes) == size:
            return JoinedTensor(torch.cat([part.detach() for part in parts], dim), requires_grad, dim, sizes)
    raise UnsupportedCodeError(
        f"{name} cannot be joined from microbatches: shapes {shapes} do not make {whole}. Each tensor of a batch is "
        "split along its first dim, so a list of samples has to be stacked (by the collate_fn of the loader). The "
        "samples must keep a dim of their own through the layers, and other dims must not depend on values; use "
        'Pipeline(loss="microbatch") or Pipeline(microbatches=1).'
    )


class Results:
    """Arguments and outputs of the last layer for the whole batch, joined from microbatches.

    Args:
        outputs: for each microbatch, the tensors among the arguments of the last layer, then its output tensors.
        positions: for each microbatch, the positions of these arguments among all.
        layer: the FQN of the last layer.
    """

    def __init__(self, outputs: Sequence[Sequence[Tensor]], positions: Sequence[tuple[int, ...]], layer: str) -> None:
        self._outputs, self._positions, self._layer = outputs, positions, layer
        self._chosen = list[list[int]]()  # for each microbatch, which of its outputs are joined
        self._joined = dict[int, tuple[JoinedTensor, GraphEntry | None]]()  # by place in these lists

    def fill_in(self, unknown: Mapping[int, Placeholder], out: Any) -> Any:
        """Set the values of the last layer's unknown arguments, and return its outputs.

        Args:
            unknown: the arguments, by position.
            out: the outputs, as placeholders.

        Raises:
            UnsupportedCodeError: if the number of outputs depends on values.
        """
        for outputs, positions in zip(self._outputs, self._positions, strict=True):
            missing = next((position for position in unknown if position not in positions), None)
            if missing is not None:
                raise leak_error(f"argument {missing} of layer {self._layer}", unknown[missing])
            self._chosen.append([*map(positions.index, unknown), *range(len(positions), len(outputs))])
        arguments = [*unknown.values()]
        leaves, spec = tree_flatten(out)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        counts, count = [*map(len, self._chosen)], len(arguments) + len(places)
        if set(counts) != {count}:
            raise UnsupportedCodeError(
                f"the last layer {self._layer} takes and returns {counts} tensors on microbatches, expected {count} as "
                "on the whole batch: the number of its results must not depend on values"
            )
        rows = [[row[k] for k in chosen] for row, chosen in zip(self._outputs, self._chosen, strict=True)]

        def enter(place: int, placeholder: Placeholder) -> None:
            name = f"an argument or result of the last layer {self._layer}"
            joined = join([row[place] for row in rows], placeholder.shape, name)
            self._joined[place] = joined, placeholder.become(joined.whole, requires_grad=joined.requires_grad)

        for place, argument in enumerate(arguments):
            with suppress(UnsupportedCodeError):  # not one per sample: it stays unknown, an error only if it is used
                enter(place, argument)
        for place, leaf in enumerate(places, len(arguments)):
            result = leaves[leaf]
            if any(result is argument for argument in arguments):
                if all(any(row[place] is other for other in row[:place]) for row in rows):
                    continue  # the layer returns its argument
                meta = torch.empty(result.shape, dtype=result.dtype, device="meta")  # the copy without weights did
                leaves[leaf] = result = Placeholder.of(meta, f"a result of {self._layer}", result.device)
            if isinstance(result, Placeholder):
                enter(place, result)
        return tree_unflatten(leaves, spec)

    def gradients(self) -> list[list[Tensor | None]]:
        """Return the gradients of each microbatch's tensors, after the backward of the rest of the step."""
        gradients: list[list[Tensor | None]] = [[None] * len(outputs) for outputs in self._outputs]
        for place, (joined, entry) in self._joined.items():
            if entry is not None:
                parts = joined.split(entry.grad, len(gradients))
                for row, chosen, part in zip(gradients, self._chosen, parts, strict=True):
                    row[chosen[place]] = part
        return gradients
