"""Sections save and async: the time of a save, and the time for which it blocks training."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence

import limits
import others
import ours
import peers
import torch.distributed as dist
from state import State, llama
from turns import Facts, Row, Way, case, chosen, clear, memory_mb, on_ranks, take_turns, timed, use_page_cache

_GROWTH_GB = 0.25


def save(options: Namespace, folder: str) -> list[Row]:
    """On 1, 2 and 4 ranks; packages that are not torch's on 2 only."""
    found = []
    for world in chosen(options, 1, 2, 4):
        found += case("save", _ranks(world), on_ranks, world, _save, options, folder)
    return found


def _save(options: Namespace, folder: str) -> list[Row]:
    state, path = llama(options.gb), f"{folder}/save"
    ways = limits.WRITES + ours.SAVES + peers.SAVES + (others.SAVES if dist.get_world_size() == 2 else [])

    def check(way: Way) -> Facts:
        return checked(state, way, path, lambda: way.save(state, path))

    def act(way: Way) -> Facts:
        peers.prepare(state)
        use_page_cache(f"{folder}/{dist.get_rank()}", state.nbytes)
        dist.barrier()
        try:
            return timed(lambda: way.save(state, path))
        finally:
            clear(path)

    return take_turns(ways, options.rounds, check, act, section="save", case=_ranks(dist.get_world_size()))


def checked(state: State, way: Way, path: str, save: Callable[[], None]) -> Facts:
    """Save, overwrite everything, load, compare. Leaves the state as it was; raises if the way fails."""
    peers.prepare(state)
    try:
        begin = time.perf_counter()
        save()
        seconds = time.perf_counter() - begin
        state.spoil()
        way.load(state, path)
        state.check()
        return {"seconds": seconds}
    finally:
        state.fill()
        clear(path)


def _ranks(world: int) -> str:
    return f"{world} rank{'s' * (world > 1)}"


def asynchronous(options: Namespace, folder: str) -> list[Row]:
    """On 1 and 2 ranks; and what many saves leave in memory."""
    rows = []
    for world in chosen(options, 1, 2):
        rows += case("async", _ranks(world), on_ranks, world, _async, options, folder)
    growing = _async_ways(options) if chosen(options, 2) else ()
    for way in growing:  # each in processes of its own: memory that one leaves is not the next one's
        rows += case("async", _growth_of(options), on_ranks, 2, _growth, options, folder, [way])
    return rows


def _async_ways(options: Namespace) -> list[Way]:
    return limits.COPIES + ours.COPIES + peers.COPIES + (peers.PROCESSES if options.slow else [])


def _async(options: Namespace, folder: str) -> list[Row]:
    state, path = llama(options.gb), f"{folder}/async"

    def check(way: Way) -> Facts:
        def save() -> None:
            finish = way.begin(state, path)  # type: ignore[misc]
            state.spoil()  # as training may, once the call has returned
            finish()

        return checked(state, way, path, save)

    def act(way: Way) -> Facts:
        peers.prepare(state)
        blocked = 0.0

        def save() -> None:
            nonlocal blocked
            begin = time.perf_counter()
            finish = way.begin(state, path)  # type: ignore[misc]
            blocked = time.perf_counter() - begin
            finish()

        try:
            found = timed(save)
        finally:
            clear(path)
        return {"blocked": blocked, "complete": found["seconds"], "extra_mb": found["extra_mb"]}

    return take_turns(
        _async_ways(options), options.rounds, check, act, section="async", case=_ranks(dist.get_world_size())
    )


def _growth(options: Namespace, folder: str, ways: Sequence[Way]) -> list[Row]:
    """MB that a rank holds after --saves beyond its state, and how many of them came after the second save."""
    state, path = llama(min(options.gb, _GROWTH_GB)), f"{folder}/growth"

    def act(way: Way) -> Facts:
        peers.prepare(state)
        before = early = memory_mb("VmRSS")
        for number in range(options.saves):
            way.begin(state, path)()  # type: ignore[misc]
            clear(path)
            if number == 1:
                early = memory_mb("VmRSS")
        return {"after_mb": memory_mb("VmRSS") - before, "grown_mb": memory_mb("VmRSS") - early}

    return take_turns(ways, 1, lambda way: {}, act, section="async", case=_growth_of(options))


def _growth_of(options: Namespace) -> str:
    return f"{options.saves} saves of {min(options.gb, _GROWTH_GB):g} GB on 2 ranks"
