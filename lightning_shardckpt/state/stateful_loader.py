"""Continue a loader with a state of its own (``state_dict`` and ``load_state_dict``) after the batches that were used.

Such as torchdata's StatefulDataLoader. Its state says how far it has drawn, which is further than training is: by a
batch where their number is not known, as Lightning then draws one ahead, and by one that an exception interrupted. So
the state is taken before each batch is drawn, with the random state of the process. A run that resumes gives the loader
the state before the first batch that was not used, and draws those again that were drawn. Before, it puts back the
random states with which the loader began to iterate, for an order that is drawn from them.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from lightning_shardckpt.compat.data_loading import draw_orders_within, drawn_order, wrapped_sampler
from lightning_shardckpt.state.data_position import (
    OTHER_ORDER,
    checksum_of,
    own_states,
    random_state,
    sampler_of,
    seed_of,
    set_own_states,
    set_random_state,
    set_seed,
)
from lightning_shardckpt.system.random_generators import get_rng_state, preserve_rng, set_rng_state

_KEPT = 3  # Lightning draws one batch ahead, and one is in use


@dataclass(slots=True)
class _Draw:
    """A loader before a batch: the numbers of its epoch and in it, the process's random state, the position."""

    number: tuple[int, int]
    process: dict[str, Any]
    position: dict[str, Any]


@dataclass(slots=True)
class Watch:
    """The progress of a loader, seen from outside.

    Attributes:
        kind: the loader's own class.
        count: returns the number of the epoch, and how many of its batches were drawn.
        begun: random states before the present iteration drew its order, or began; None before the first one.
        order: a checksum of the order that a sampler of the user's drew then, inside of Lightning's.
        draws: the last ones.
        failed: a draw that raised, after which the loader can't be asked any more.
        ended: the position, of a loader that was taken down after training.
        resumption: position and random states with which the next iteration goes on.
        waits: the next iteration is empty.
    """

    kind: Any
    count: Callable[[], tuple[int, int]]
    begun: dict[str, Any] | None = None
    order: int | None = None
    draws: deque[_Draw] = field(default_factory=lambda: deque(maxlen=_KEPT))
    failed: _Draw | None = None
    ended: dict[str, Any] | None = None
    resumption: tuple[dict[str, Any], dict[str, Any]] | None = None
    waits: bool = False


class StatefulLoader:
    """A loader that ``watch_state`` has given another ``__iter__``, ``state_dict`` and ``load_state_dict``.

    It is a base after the loader's own class: before it, Python would not take the class for one of the same layout.
    """

    __slots__ = ()
    shardckpt_watch: Watch


def watch_state(loader: Any, count: Callable[[], tuple[int, int]]) -> bool:
    """Let a loader with a state of its own resume, in place; False if its class can't be changed.

    Args:
        loader: of training.
        count: returns the number of the present epoch, and how many of its batches were drawn.
    """
    if isinstance(loader, StatefulLoader):
        loader.shardckpt_watch.count = count
        return True
    kind = type(loader)
    methods = {"__iter__": _iterate, "state_dict": _state_dict, "load_state_dict": _load_state_dict}
    added = {"__module__": kind.__module__, "shardckpt_watch": Watch(kind, count)}
    try:
        loader.__class__ = type(kind.__name__, (kind, StatefulLoader), methods | added)
    except TypeError:  # of a class with __slots__, or of another language
        return False
    return True


def position_of(loader: StatefulLoader, used: int | None) -> dict[str, Any] | None:
    """Return what a resumed run must know: the loader's state, random states when this iteration began, its seed.

    Args:
        loader: whose position it is.
        used: so many batches of the epoch are used; None where it is over.

    Returns:
        The position after the batches that are used; None if it is not known.
    """
    watch = loader.shardckpt_watch
    if watch.ended is not None:
        return watch.ended
    if watch.resumption is not None:
        return watch.resumption[0]
    first = None if used is None else (watch.count()[0], used)
    unused = [] if first is None else [draw for draw in watch.draws if draw.number >= first]
    if watch.waits or (unused and unused[0].number != first):
        return None
    if unused:
        return unused[0].position | {"drawn": [draw.process for draw in unused]}
    return _present(loader) if watch.failed is None else watch.failed.position


def random_state_before_failure(loader: StatefulLoader) -> dict[str, Any]:
    """Return the process's random state before a draw that failed; nothing if none did."""
    failed = loader.shardckpt_watch.failed
    return {} if failed is None else failed.process


def wait(loader: StatefulLoader) -> None:
    """Let the next iteration be empty: Lightning begins the loaders before it can be known where to go on."""
    loader.shardckpt_watch.waits = True


def finish(loader: StatefulLoader, used: int | None) -> None:
    """Keep the position of a loader that is going to be taken down."""
    loader.shardckpt_watch.ended = position_of(loader, used)


def resume(loader: StatefulLoader, position: dict[str, Any], then: dict[str, Any]) -> None:
    """Let the next iteration go on from a position, with these random states after what was drawn already."""
    loader.shardckpt_watch.resumption = (position, then)


def restore(loader: StatefulLoader, position: dict[str, Any]) -> None:
    """Put a loader at the end of an iteration that is over, so that the next one is that which followed."""
    with preserve_rng():
        _continue(loader, position)
    set_own_states(loader, position["own"])


def _iterate(loader: StatefulLoader) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    if watch.waits:
        watch.waits = False
        return iter(())
    watch.ended = watch.failed = None
    resumption, watch.resumption = watch.resumption, None
    if resumption is None:
        watch.begun, watch.order = random_state(loader), None
        draw_orders_within(sampler_of(loader), partial(_drawing_order, loader))
        iterator = watch.kind.__iter__(loader)
        return _draw_all(loader, iterator)
    position, then = resumption
    iterator, again = _continue(loader, position), []
    epoch, used = watch.count()
    for number, process in enumerate(position["drawn"], used):
        set_rng_state(process)
        again.append(_draw(loader, iterator, (epoch, number)))
    set_random_state(loader, then)
    return chain(again, _draw_all(loader, iterator))


def _state_dict(loader: StatefulLoader) -> Any:
    """Return the loader's own state; after training that of its end, as loaders are taken down then."""
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
    """Note the random states before a sampler's order; or draw again that of a position. The last one is what counts.

    Loaders draw it when they begin, or when their first batch is asked for; torchdata's draws some that it drops.
    """
    watch, process = loader.shardckpt_watch, get_rng_state(every_device=False)
    if again is None:
        watch.begun = random_state(loader)
    elif watch.begun is not None:
        set_random_state(loader, watch.begun)
    yield
    sampler = sampler_of(loader)
    watch.order = checksum_of(drawn_order(sampler) or [])
    if again is not None:
        set_rng_state(process)
        if again["order"] not in (None, watch.order):
            again["order"] = None  # once is enough
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
    draw = _Draw(number, get_rng_state(every_device=False), _present(loader))
    try:
        batch = next(iterator)
    except BaseException as error:
        watch.failed = None if isinstance(error, StopIteration) else draw
        raise
    watch.draws.append(draw)
    return batch


def _present(loader: StatefulLoader) -> dict[str, Any]:
    watch = loader.shardckpt_watch
    position = {"epoch_start": watch.begun, "own": own_states(loader), "seed": seed_of(loader), "drawn": []}
    return position | {"order": watch.order, "state": deepcopy(watch.kind.state_dict(loader))}
