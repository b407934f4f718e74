"""Let ranks draw the same random numbers where they must.

Ranks that build the same weights, or that hold parts of one activation, must; data-parallel ranks need not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_shardckpt.distributed.host_numbers import any_rank, host_group
from lightning_shardckpt.system.random_generators import differing_generators, get_rng_state, set_rng_state

_T = TypeVar("_T")
_DRAWS = "_shardckpt_draws"
"""Attribute of an optimizer, the same on all ranks: whether its first step drew random numbers on any of them."""


@contextmanager
def share_rng() -> Iterator[None]:
    """Inside, every rank draws what rank 0 draws; after it, generators that were a rank's own are as before.

    Collective: every rank of the world must enter it.
    """
    stream = _SharedStream(None)
    stream.enter()
    try:
        yield
    finally:
        stream.leave()


@contextmanager
def share_optimizer_rng(
    optimizer: Optimizer, closure: Callable[[], _T], group: dist.ProcessGroup | None
) -> Iterator[Callable[[], _T]]:
    """Let ``optimizer`` step inside, with the closure that is given, and draw what the first rank of ``group`` draws.

    Else each rank would add its own noise to a parameter that is not sharded. What the closure draws stays each rank's
    own. An optimizer that draws nothing on any rank in its first step is left alone from then on; one that a GradScaler
    skips is not the first.

    Collective, if the optimizer draws, and up to its first step: every rank of ``group`` must step; None if there are
    no others.
    """
    draws: bool | None = getattr(optimizer, _DRAWS, None)  # None: up to its first step
    if group is None or group.size() == 1 or draws is False:
        yield closure
        return
    stream = _SharedStream(group)

    def apart() -> _T:
        stream.leave()
        found = closure()
        stream.enter()
        return found

    steps = list[Any]()
    handle = optimizer.register_step_post_hook(lambda *call: steps.append(None)) if draws is None else None
    stream.enter()
    try:
        yield apart
    finally:
        stream.leave()
        if handle is not None:
            handle.remove()
    if draws is None:  # a rank whose shards are empty may draw nothing, and must go on to meet the others
        drew = any_rank(stream.drew, group)
        if drew or steps:  # a GradScaler skips a step on all ranks
            setattr(optimizer, _DRAWS, drew)


class _SharedStream:
    """The random numbers of the first rank of a group, between ``enter`` and ``leave``."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._own, self._begin = group, dict[str, Any](), dict[str, Any]()
        self.drew = False

    def enter(self) -> None:
        self._own = get_rng_state(every_device=False)
        self._begin = _broadcast(self._own, self._group)
        set_rng_state(self._begin)

    def leave(self) -> None:
        """Give generators that were a rank's own their states back. Does nothing after an error in between."""
        if self._begin:
            now = get_rng_state(every_device=False)
            self.drew = self.drew or bool(differing_generators(self._begin, now))
            set_rng_state(now | differing_generators(self._own, self._begin))
            self._begin = {}


def broadcast_rng(group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the random state of its first. Collective: every rank of it must call it."""
    set_rng_state(_broadcast(get_rng_state(every_device=False), group))


def _broadcast(state: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return state
    box = [state]
    dist.broadcast_object_list(box, group=host_group(group), group_src=0)
    return box[0]
