"""Let ranks draw the same random numbers where they must.

Ranks that build the same weights, or that hold parts of one activation, must; data-parallel ranks need not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state


@contextmanager
def same_rng() -> Iterator[None]:
    """Inside, every rank draws what rank 0 draws; after it, a rank whose state was its own gets that back.

    Collective: every rank of the world must enter it.
    """
    own = get_rng_state(every_device=False)
    shared = _broadcast(own, None)
    differs = not torch.equal(own["torch"], shared["torch"])
    set_rng_state(shared)
    try:
        yield
    finally:
        if differs:
            set_rng_state(own)


def broadcast_rng(group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the random state of its first. Collective: every rank of it must call it."""
    set_rng_state(_broadcast(get_rng_state(every_device=False), group))


def _broadcast(state: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return state
    box = [state]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
