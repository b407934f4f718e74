"""Values that ranks tell each other at the steps of a save. All of it is JSON."""

from __future__ import annotations

from typing import Any, TypedDict


class SaveWish(TypedDict):
    """A rank's request of what to save."""

    path: str
    step: int | None
    digest: str
    """Of the tables and of the names in documents: equal on ranks that hold the same tensors."""
    replicas: dict[str, str]
    """Digests of values that several ranks hold, by who holds them."""


class Agreement(TypedDict):
    """The agreement of all ranks, made by rank 0; without a save id if replicas differ, which stops the save."""

    save_id: str
    groups: list[list[list[int]]]
    """Ranks that hold the same tensors, as ranges: one group, or one for each pipeline stage."""
    mirror: dict[str, Any]
    """What is recorded of the model that is written a second time."""
    tables: str
    """The tables of all groups as a root index without files; empty if there is one group, whose ranks all know it."""


class GroupTable(TypedDict):
    """A group's tables, as its first rank tells them."""

    tables: str
    """A root index without files."""
    trainer: Any
    """The trainer's state, encoded."""


class Written(TypedDict):
    """The files that one rank wrote: name, size and checksum."""

    indexes: dict[str, list[Any]]
    """By component."""
    documents: list[list[Any]]
    shared: dict[str, dict[str, Any]]
    """Digests of tensors that other groups of ranks hold, too, by which part and by name."""
    elements: int
    shard_bytes: int
    """Of all shard files; the sizes of the others are listed."""
    linked_bytes: int
    """Of those that were linked, and not written."""
    notes: list[str]
    """Sentences for the user; rank 0 has its own."""
