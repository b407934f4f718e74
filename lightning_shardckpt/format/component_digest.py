"""Digests of components and of a whole checkpoint, from those of tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.tensor_digest import TensorDigest, mark_of, tensor_mark, total

DIGESTED = ("model", "optimizer")
"""The components that have a digest: the trainer's tensors are of random streams and callbacks, partly of one rank."""


def constant_part(table: Component) -> TensorDigest:
    """Return what the names, dtypes and shapes of tensors add to a component's digest."""
    return total(mark for _, mark in _marks(table))


def part_of_component(table: Component, boxes: Mapping[str, Iterable[TensorDigest]]) -> TensorDigest:
    """Return what boxes of tensors add to a component's digest.

    Args:
        table: all tensors of the component, and their further names.
        boxes: digests by the key of the tensor that they are part of.
    """
    sums = {key: total(digests) for key, digests in boxes.items()}
    return total(sums[key].times(mark) for key, mark in _marks(table) if key in sums)


def whole_digest(components: Mapping[str, TensorDigest]) -> TensorDigest:
    """Return the digest of a checkpoint from those of its components by name."""
    return total(digest.times(mark_of(name)) for name, digest in components.items())


def _marks(table: Component) -> Iterator[tuple[str, TensorDigest]]:
    """Yield each name of each tensor: the key of the tensor, and the name's mark."""
    for name, key in [*((key, key) for key in table.tensors), *table.aliases.items()]:
        spec = table.tensors[key]
        yield key, tensor_mark(name, spec.dtype, spec.shape)
