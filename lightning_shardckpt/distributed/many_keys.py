"""Read many keys of a store in few requests: each is a round trip, during which the server serves all other clients."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_shardckpt.compat.torch_distributed import Store

_BLOCK = 512  # keys of one request: in much longer ones, a TCPStore server takes more time per key


class Arrivals:
    """Values that other clients write under keys, to be read when all are present.

    Args:
        store: in which clients write.
        keys: must not be deleted once written; a value may still change until all keys are present.
    """

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._blocks, self._complete = store, _blocks(keys), 0

    def get_if_complete(self) -> list[bytes] | None:
        """Return all values in the order of the keys, or None if one is not present yet."""
        while self._complete < len(self._blocks):
            if not self._store.check(self._blocks[self._complete]):
                return None
            self._complete += 1
        return [value for block in self._blocks for value in self._store.multi_get(block)]


def absent_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Return the ``keys`` that are absent from the store. Each absent key costs a few requests."""
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [*keys]
    half = len(keys) // 2
    return [*absent_keys(store, keys[:half]), *absent_keys(store, keys[half:])]


def get_present(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of the ``keys`` that are present in the store."""
    absent = {*absent_keys(store, keys)}
    present = [key for key in keys if key not in absent]
    return dict(zip(present, (value for block in _blocks(present) for value in store.multi_get(block)), strict=True))


def _blocks(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[at : at + _BLOCK]) for at in range(0, len(keys), _BLOCK)]
