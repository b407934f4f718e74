"""Random numbers that ranks share.

Ranks that build the same weights, or hold parts of one activation, must draw the same numbers; data-parallel ranks need
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_shardckpt.distributed.host_numbers import any_rank, broadcast_object
from lightning_shardckpt.system.random_generators import differing_generators, get_rng_state, set_rng_state

_T = TypeVar("_T")
_DRAWS = "_shardckpt_draws"
"""Attribute of an optimizer, equal on all ranks: whether its first step drew random numbers on any rank."""


@contextmanager
def share_rng() -> Iterator[None]:
    """Inside, every rank draws rank 0's random numbers; afterwards, generators that differed get their states back.

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
    """Inside, a step of ``optimizer`` draws the random numbers of the first rank of ``group``.

    Otherwise each rank would add its own noise to a replicated parameter. Yields the closure for the step, within
    which each rank draws its own numbers. An optimizer whose first step draws nothing on any rank is left alone from
    then on; a step that a GradScaler skips does not count as the first.

    Collective: every rank of ``group`` must call it. A group of None means that there are no other ranks.
    """
    draws: bool | None = getattr(optimizer, _DRAWS, None)  # None before the first step
    if group is None or group.size() == 1 or draws is False:
        yield closure
        return
    stream = _SharedStream(group)

    def run_closure() -> _T:
        stream.leave()
        result = closure()
        stream.enter()
        return result

    steps = list[Any]()
    handle = optimizer.register_step_post_hook(lambda *call: steps.append(None)) if draws is None else None
    stream.enter()
    try:
        yield run_closure
    finally:
        stream.leave()
        if handle is not None:
            handle.remove()
    if draws is None:  # a rank with empty shards may draw nothing, but must take part if others draw
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
        """Give generators that differed from the first rank's their states back. Does nothing if left already."""
        if self._begin:
            now = get_rng_state(every_device=False)
            self.drew = self.drew or bool(differing_generators(self._begin, now))
            set_rng_state(now | differing_generators(self._own, self._begin))
            self._begin = {}


def broadcast_rng(group: dist.ProcessGroup | None) -> None:
    """Give every rank of ``group``, or of the world, the first rank's random state.

    Collective: every rank of ``group`` must call it.
    """
    set_rng_state(_broadcast(get_rng_state(every_device=False), group))


def _broadcast(state: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return state
    first: dict[str, Any] = broadcast_object(state, group=group)
    return first
