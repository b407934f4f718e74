"""The key-value store of torch's process groups. Checked with torch 2.12 to 2.15."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed exports them under a condition only

__all__ = ["Store", "default_store", "get_if_there", "own_view", "put_bytes"]

_NO_VALUE = "?"


def default_store() -> Store:
    """The store through which the ranks of the default process group found each other; every rank reaches it.

    Relies on ``torch.distributed.distributed_c10d._get_default_store``, which raises ValueError without a group.
    """
    return dist.distributed_c10d._get_default_store()


def own_view(store: Store, prefix: str) -> Store:
    """Return the same store through a connection of its own, with a prefix before every key.

    While one thread waits with a client of a TCPStore, no other thread can use that client. Relies on ``Store.clone``,
    which torch's stub lacks.
    """
    return PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Set a key to bytes, which are stored as they are; torch's stub says str."""
    store.set(key, value)  # type: ignore[arg-type]


def get_if_there(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if there is no such key, in one request; ``check`` and ``get`` take three.

    Relies on ``Store.compare_set``, which changes nothing and returns what it was told to expect where there is no such
    key, and the value where that is another one. No value may be ``?``.
    """
    found: bytes = store.compare_set(key, _NO_VALUE, _NO_VALUE)
    return None if found == _NO_VALUE.encode() else found
