"""Resume a loader with its own ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

The loader's state counts drawn batches, which may be more than training has used: Lightning draws one batch ahead of a
loader without a length, and an exception may interrupt a batch. So the state is recorded before each draw. A resumed
run restores the random states at the start of the iteration, from which an order may be drawn, and loads the state
before the first unused batch. Random numbers that the loader drew from the process for unused batches are not drawn
again; it says so then.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_shardckpt.compat.data_loading import draw_orders_within, last_order, sampler_of, wrapped_sampler
from lightning_shardckpt.state.data_position import (
    OTHER_ORDER,
    call_before,
    checksum_of,
    own_states,
    random_state,
    seed_of,
    set_own_states,
    set_random_state,
    set_seed,
)
from lightning_shardckpt.system.random_generators import get_rng_state, preserve_rng, rng_checksum, set_rng_state

_KEPT = 3  # Lightning draws one batch ahead, and one is in use


@dataclass(slots=True)
class _Draw:
    """The state before a draw: numbers of the epoch and of the batch, and the position.

    ``is_random``: the draw took random numbers from the process.
    """

    number: tuple[int, int]
    position: dict[str, Any]
    is_random: bool = False


@dataclass(slots=True)
class Watch:
    """The progress of a loader.

    Attributes:
        kind: the loader's own class.
        count: returns the number of the epoch, and of its drawn batches.
        begun: random states before the current iteration drew its order, or began; None before the first iteration.
        order: a checksum of the order that a sampler within Lightning's DistributedSamplerWrapper drew then.
        draws: the last draws.
        failed: a draw that raised, after which the loader's state is unusable.
        ended: the position of a loader that was shut down after training.
        resumption: the position to resume the next iteration from, and a function to call before its first batch.
        is_next_empty: whether the next iteration is empty, since Lightning begins one before that of a new epoch.
    """

    kind: Any
    count: Callable[[], tuple[int, int]]
    begun: dict[str, Any] | None = None
    order: int | None = None
    draws: deque[_Draw] = field(default_factory=lambda: deque(maxlen=_KEPT))
    failed: _Draw | None = None
    ended: dict[str, Any] | None = None
    resumption: tuple[dict[str, Any], Callable[[], None]] | None = None
    is_next_empty: bool = False


class StatefulLoader:
    """A loader whose ``__iter__``, ``state_dict`` and ``load_state_dict`` are replaced by ``watch_state``.

    It is a base after the loader's own class, since Python refuses the assignment to ``__class__`` otherwise.
    """

    __slots__ = ()
    shardckpt_watch: Watch


def watch_state(loader: Any, count: Callable[[], tuple[int, int]]) -> bool:
    """Make a loader with its own state resumable, in place; return False if its class can't be changed.

    Args:
        loader: of training.
        count: returns the number of the current epoch, and of its drawn batches.
    """
    if isinstance(loader, StatefulLoader):
        loader.shardckpt_watch.count = count
        return True
    kind = type(loader)
    methods = {"__iter__": _iterate, "state_dict": _state_dict, "load_state_dict": _load_state_dict}
    added = {"__module__": kind.__module__, "shardckpt_watch": Watch(kind, count)}
    try:
        loader.__class__ = type(kind.__name__, (kind, StatefulLoader), methods | added)
    except TypeError:  # a class with __slots__, or an extension type
        return False
    return True


def position_of(loader: StatefulLoader, used: int | None) -> dict[str, Any] | None:
    """Return the position after the used batches: loader state, random states at the start, seed; None if unknown.

    Args:
        loader: a watched loader.
        used: the number of used batches of the epoch; None if the epoch is over.
    """
    watch = loader.shardckpt_watch
    if watch.ended is not None:
        return watch.ended
    if watch.resumption is not None:
        return watch.resumption[0]
    first = None if used is None else (watch.count()[0], used)
    unused = [] if first is None else [draw for draw in watch.draws if draw.number >= first]
    if watch.is_next_empty or (unused and unused[0].number != first):
        return None
    if unused:
        return unused[0].position | {"draws_random_numbers": any(draw.is_random for draw in unused)}
    return _current_position(loader) if watch.failed is None else watch.failed.position


def finish(loader: StatefulLoader, used: int | None) -> None:
    """Keep the position of a loader that Lightning is about to shut down."""
    loader.shardckpt_watch.ended = position_of(loader, used)


def resume(loader: StatefulLoader, position: dict[str, Any], restore: Callable[[], None]) -> None:
    """Resume the next iteration at ``position``, and call ``restore`` before its first batch."""
    loader.shardckpt_watch.resumption = position, restore


def follow(loader: StatefulLoader, position: dict[str, Any] | None, *, skips: bool) -> None:
    """Begin a new epoch after a finished one.

    Args:
        loader: a watched loader.
        position: at the end of the finished iteration, which the next one follows; None to begin anew.
        skips: whether the next iteration is not that of the new epoch: Lightning begins one before it.
    """
    loader.shardckpt_watch.resumption, loader.shardckpt_watch.is_next_empty = None, skips
    if position is None:
        return
    with preserve_rng():
        _continue(loader, position)
    set_own_states(loader, position["own"])


def _iterate(loader: StatefulLoader) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    if watch.is_next_empty:
        watch.is_next_empty = False
        return iter(())
    watch.ended = watch.failed = None
    resumption, watch.resumption = watch.resumption, None
    if resumption is None:
        watch.begun, watch.order = random_state(loader), None
        draw_orders_within(sampler_of(loader), partial(_drawing_order, loader))
        iterator = watch.kind.__iter__(loader)
        return _draw_all(loader, iterator)
    position, restore = resumption
    with preserve_rng(every_device=True):
        iterator = _continue(loader, position)
    set_own_states(loader, position["own"])
    return call_before(restore, _draw_all(loader, iterator))


def _state_dict(loader: StatefulLoader) -> Any:
    """Return the loader's own state; after Lightning has shut the loader down, the state at the end of training."""
    watch = loader.shardckpt_watch
    return watch.kind.state_dict(loader) if watch.ended is None else watch.ended["state"]


def _load_state_dict(loader: StatefulLoader, state: Any) -> None:
    watch = loader.shardckpt_watch
    watch.ended = watch.failed = None
    watch.kind.load_state_dict(loader, state)


def _continue(loader: StatefulLoader, position: dict[str, Any]) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    set_seed(loader, position["seed"])
    start = position["epoch_start"] or random_state(loader)
    set_random_state(loader, start)
    watch.begun = start
    draw_orders_within(sampler_of(loader), partial(_drawing_order, loader, again=position))
    watch.kind.load_state_dict(loader, position["state"])
    iterator: Iterator[Any] = watch.kind.__iter__(loader)
    return iterator


@contextmanager
def _drawing_order(loader: StatefulLoader, again: dict[str, Any] | None = None) -> Iterator[None]:
    """Around the draw of a sampler's order, record the random states; or restore them and compare the order with
    ``again``'s.

    Loaders draw when they begin, or at their first batch; torchdata's draws some orders that it drops. The last counts.
    """
    watch, process = loader.shardckpt_watch, get_rng_state(every_device=False)
    if again is None:
        watch.begun = random_state(loader)
    elif watch.begun is not None:
        set_random_state(loader, watch.begun)
    yield
    sampler = sampler_of(loader)
    watch.order = checksum_of(last_order(sampler) or [])
    if again is not None:
        set_rng_state(process)
        if again["order"] not in (None, watch.order):
            again["order"] = None  # warn once
            warnings.warn(OTHER_ORDER.format(sampler=type(wrapped_sampler(sampler)).__name__), stacklevel=2)


def _draw_all(loader: StatefulLoader, iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = _draw(loader, iterator, loader.shardckpt_watch.count())
        except StopIteration:
            return
        yield batch


def _draw(loader: StatefulLoader, iterator: Iterator[Any], number: tuple[int, int]) -> Any:
    watch = loader.shardckpt_watch
    draw, before = _Draw(number, _current_position(loader)), rng_checksum()
    try:
        batch = next(iterator)
    except BaseException as error:
        watch.failed = None if isinstance(error, StopIteration) else draw
        raise
    draw.is_random = before != rng_checksum()
    watch.draws.append(draw)
    return batch


def _current_position(loader: StatefulLoader) -> dict[str, Any]:
    watch = loader.shardckpt_watch
    position = {"epoch_start": watch.begun, "own": own_states(loader), "seed": seed_of(loader)}
    return position | {"order": watch.order, "state": deepcopy(watch.kind.state_dict(loader))}
