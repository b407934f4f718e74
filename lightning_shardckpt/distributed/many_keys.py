"""Many keys of a store in few requests: each one is a round trip, for which all other clients are served in between."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_shardckpt.compat.torch_distributed import Store

_BLOCK = 512  # keys of one request: a server of TCPStore takes longer for each key of a far longer one


class Arrivals:
    """Values that clients put under keys, read when all have come.

    Args:
        store: where they come.
        keys: each stays once it has come; its value may still change before all have.
    """

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._blocks, self._come = store, _blocks(keys), 0

    def all_if_there(self) -> list[bytes] | None:
        """Return all values in the order of the keys; None if one has not come yet."""
        while self._come < len(self._blocks):
            if not self._store.check(self._blocks[self._come]):
                return None
            self._come += 1
        return [value for block in self._blocks for value in self._store.multi_get(block)]


def lacking(store: Store, keys: Sequence[str]) -> list[str]:
    """Return those of ``keys`` that a store does not have. Each of them costs some requests, the others hardly any."""
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [*keys]
    half = len(keys) // 2
    return [*lacking(store, keys[:half]), *lacking(store, keys[half:])]


def known_values(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of those of ``keys`` that a store has."""
    absent = {*lacking(store, keys)}
    there = [key for key in keys if key not in absent]
    return dict(zip(there, (value for block in _blocks(there) for value in store.multi_get(block)), strict=True))


def _blocks(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[at : at + _BLOCK]) for at in range(0, len(keys), _BLOCK)]
