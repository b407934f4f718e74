"""The connection of this process to the ranks of the default process group: one for all users in this package.

Connections of their own would cost a file descriptor each on this rank, and one on the rank that keeps the store.
Requests of several threads take turns, and none of them waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import clone_store, default_store
from lightning_shardckpt.distributed.host_ranks import HostRanks


class World:
    """The ranks of one default process group.

    Attributes:
        store: that of the process group, through another connection.
        host_ranks: the processes of this host.
        is_usable: False once this rank has left a collective that may never end.
        waits_at_exit: of the process, for the last steps of the ranks.
    """

    def __init__(self) -> None:
        self._server = default_store()  # keeps a server in this process alive while other ranks may use it
        self.store, self.is_usable = clone_store(self._server, "shardckpt"), True
        self.host_ranks = HostRanks(self.store, dist.get_rank())
        self.waits_at_exit: list[Callable[[], None]] = []


_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def current_world() -> World:
    """Return the world of the default process group, which must be initialized. Not collective."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _worlds:
        _worlds[group] = World()
    return _worlds[group]
