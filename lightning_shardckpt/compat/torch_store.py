"""The key-value store of torch's process groups. Checked with torch 2.13."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed exports them under a condition only

__all__ = ["Store", "default_store", "own_view", "put_bytes"]


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
