"""Turn an index of a tensor, as Python writes it, into the box that has to be read. Pure; no torch."""

from __future__ import annotations

from typing import Any

from lightning_shardckpt.format.box import Box, Shape


def sliced_box(index: Any, shape: Shape, name: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that an index needs of a tensor, and the index that remains to be applied to that.

    Args:
        index: integers, slices with positive steps, and one ``...``, as for a tensor.
        shape: of the tensor.
        name: of the tensor, for errors.

    Raises:
        IndexError: if the index is not in the tensor.

    >>> box, rest = sliced_box((slice(1, 8, 3), ..., -1), (10, 4, 5), "w")
    >>> box.start, box.stop, rest
    ((1, 0, 4), (8, 4, 5), (slice(None, None, 3), slice(None, None, None), 0))
    """
    items = index if isinstance(index, tuple) else (index,)
    holes = [at for at, item in enumerate(items) if item is ...]
    if len(holes) > 1 or len(items) - len(holes) > len(shape):
        raise IndexError(f"too many indices for {name!r} of shape {shape}: {index}")
    at = holes[0] if holes else len(items)
    full = (slice(None),) * (len(shape) - len(items) + len(holes))
    start, stop, rest = [], [], list[Any]()
    for dim, item in enumerate((*items[:at], *full, *items[at + 1 :])):
        low, high, left = _range(item, shape[dim], f"{name!r} of shape {shape}, dim {dim}")
        start.append(low)
        stop.append(high)
        rest.append(left)
    return Box(tuple(start), tuple(stop)), tuple(rest)


def _range(item: Any, length: int, where: str) -> tuple[int, int, Any]:
    """Return (start, stop, what remains) of one index."""
    if isinstance(item, slice):
        low, high, step = item.indices(length)
        if step < 0:
            raise IndexError(f"{where}: steps must be positive, got {item}")
        return low, max(low, high), slice(None, None, step if step > 1 else None)
    is_mask = isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")  # to torch; not 0 or 1
    try:
        number = None if is_mask else item.__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None:
        raise IndexError(f"{where}: only integers, slices and ... are understood, got {item!r}")
    if not -length <= number < length:
        raise IndexError(f"{where}: {number} is out of range")
    return number % length, number % length + 1, 0
