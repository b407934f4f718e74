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
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from lightning_shardckpt.compat.data_loading import last_order, sampler_of, wrapped_sampler
from lightning_shardckpt.state.data_position import (
    OTHER_ORDER,
    checksum_of,
    own_states,
    random_state,
    seed_of,
    set_own_states,
    set_random_state,
    set_seed,
)
from lightning_shardckpt.system.random_generators import preserve_rng, rng_checksum

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
        begun: random states when the current iteration began; None before the first one.
        draws: the last draws.
        upcoming: the position at which the next iteration begins; None to begin anew.
        waits: whether iterations are empty, until the position to resume from is known.
    """

    kind: Any
    count: Callable[[], tuple[int, int]]
    begun: dict[str, Any] | None = None
    draws: deque[_Draw] = field(default_factory=lambda: deque(maxlen=_KEPT))
    upcoming: dict[str, Any] | None = None
    waits: bool = False


class StatefulLoader:
    """A loader whose ``__iter__`` is replaced by ``watch_state``.

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
        type(loader).shardckpt_watch = Watch(loader.shardckpt_watch.kind, count)
        return True
    kind = type(loader)
    added = {"__module__": kind.__module__, "__iter__": _iterate, "shardckpt_watch": Watch(kind, count)}
    try:
        loader.__class__ = type(kind.__name__, (kind, StatefulLoader), added)
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
    if watch.upcoming is not None:
        return watch.upcoming
    first = None if used is None else (watch.count()[0], used)
    unused = [] if first is None else [draw for draw in watch.draws if draw.number >= first]
    if watch.waits or (unused and unused[0].number != first):
        return None
    order = {"order": checksum_of(last_order(sampler_of(loader)) or [])}
    if unused:
        return unused[0].position | order | {"draws_random_numbers": any(draw.is_random for draw in unused)}
    return _current_position(loader) | order


def resume(loader: StatefulLoader, position: dict[str, Any] | None, *, is_over: bool) -> None:
    """Begin the next iteration at ``position``, or anew without one.

    Args:
        loader: a watched loader.
        position: of the interrupted run.
        is_over: whether the position is the end of an epoch, so that the next iteration is that of the next epoch.
    """
    watch = loader.shardckpt_watch
    watch.waits, watch.upcoming = False, None if is_over else position
    if is_over and position is not None:
        with preserve_rng():
            _continue(loader, position)  # the iteration that is over
        set_own_states(loader, position["own"])


def _iterate(loader: StatefulLoader) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    if watch.waits:
        return iter(())
    position, watch.upcoming = watch.upcoming, None
    if position is None:
        watch.begun = random_state(loader)
        return _draw_all(loader, watch.kind.__iter__(loader))
    with preserve_rng(every_device=True):
        iterator = _continue(loader, position)
    set_own_states(loader, position["own"])
    return _draw_all(loader, iterator, position["order"])


def _continue(loader: StatefulLoader, position: dict[str, Any]) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    set_seed(loader, position["seed"])
    watch.begun = position["epoch_start"] or random_state(loader)
    set_random_state(loader, watch.begun)
    watch.kind.load_state_dict(loader, position["state"])
    iterator: Iterator[Any] = watch.kind.__iter__(loader)
    return iterator


def _draw_all(loader: StatefulLoader, iterator: Iterator[Any], order: int | None = None) -> Iterator[Any]:
    """Yield all batches. A draw that raises is kept, since the loader's state is unusable after it.

    Args:
        loader: a watched loader.
        iterator: of the loader's own class.
        order: the checksum of the order of the interrupted iteration, for comparison.
    """
    watch = loader.shardckpt_watch
    while True:
        draw, before = _Draw(watch.count(), _current_position(loader)), rng_checksum()
        watch.draws.append(draw)
        try:
            batch = next(iterator)
        except StopIteration:
            watch.draws.pop()
            return
        draw.is_random = before != rng_checksum()
        if order is not None:
            sampler, expected, order = sampler_of(loader), order, None
            if checksum_of(last_order(sampler) or []) != expected:
                warnings.warn(OTHER_ORDER.format(sampler=type(wrapped_sampler(sampler)).__name__), stacklevel=2)
        yield batch


def _current_position(loader: StatefulLoader) -> dict[str, Any]:
    watch = loader.shardckpt_watch
    position = {"epoch_start": watch.begun, "own": own_states(loader), "seed": seed_of(loader)}
    return position | {"state": deepcopy(watch.kind.state_dict(loader))}
