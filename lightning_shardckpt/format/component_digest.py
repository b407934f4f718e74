"""Digests of components and of a whole checkpoint, from those of tensors. Pure.

A component's digest is the CRC-64 of a string: a line for each name of a tensor, and then the digests of the tensors as
words. So a rank has a part in it that follows from the parts that its boxes have in these words, and ranks exchange one
number for each component.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.crc64 import crc64, crc64_text, part, total, zeros
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.value_checks import bytes_in

_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, order=True)
class NamedDigest:
    """A tensor under one of its names, and its digest."""

    name: str
    dtype: str
    shape: Shape
    digest: int


def component_digest(tensors: Iterable[NamedDigest]) -> int:
    """Return the digest of a component, of whose tensors each is given under each of its names."""
    of = sorted(tensors)
    lines = b"".join(_line([tensor.name, tensor.dtype, tensor.shape]) for tensor in of)
    return crc64(lines + _words([tensor.digest for tensor in of]))


def values_digest(values: Iterable[tuple[Any, ...]]) -> int:
    """Return the digest of values, each with what it is known by, in whatever order they come."""
    return crc64(b"".join(sorted(map(_line, values))))


def whole_digest(digests: Mapping[str, int]) -> int:
    """Return the digest of a checkpoint from those of its components by name."""
    return crc64(_line({name: crc64_text(digest) for name, digest in digests.items()}))


@dataclass(frozen=True, slots=True)
class ComponentString:
    """Where the digests of tensors are in the string whose CRC is their component's.

    Attributes:
        keys: of the tensors whose digests the words at the end are.
        of_zeros: the component's digest if all tensors were zeros.
    """

    keys: tuple[str, ...]
    of_zeros: int

    @classmethod
    def of(cls, table: Component) -> ComponentString:
        """Return that of a component with these tensors and aliases."""
        names = sorted([*((key, key) for key in table.tensors), *table.aliases.items()])
        specs = [table.tensors[key] for _, key in names]
        lines = [_line([name, spec.dtype, spec.shape]) for (name, _), spec in zip(names, specs, strict=True)]
        words = _words([zeros(bytes_in(spec.shape, spec.dtype)) for spec in specs])
        return cls(tuple(key for _, key in names), crc64(b"".join(lines) + words))

    def part(self, words: bytes) -> int:
        """Return the part that boxes have in the component's digest.

        Args:
            words: the parts that they have in the digests of their tensors, big-endian, in the order of ``keys``.
        """
        return part(words)

    def digest(self, parts: Iterable[int]) -> int:
        """Return the component's digest, from the parts that all boxes have in it."""
        return self.of_zeros ^ total(parts)


def _words(digests: Sequence[int]) -> bytes:
    return pack(f">{len(digests)}Q", *digests)  # not "<": it would go on with their division


def _line(value: Any) -> bytes:
    return f"{_to_json(value)}\n".encode()
