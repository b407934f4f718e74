"""Sections save and async: the time of a save, and the time for which it blocks training."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable

import limits
import ours
import peers
import torch.distributed as dist
from state import State, llama
from turns import Facts, Row, Way, case, chosen, clear, on_ranks, take_turns, timed, use_page_cache


def save(options: Namespace, folder: str) -> list[Row]:
    """On 1, 2 and 4 ranks."""
    found = []
    for world in chosen(options, 1, 2, 4):
        found += case("save", _ranks(world), on_ranks, world, _save, options, folder)
    return found


def _save(options: Namespace, folder: str) -> list[Row]:
    state, path = llama(options.gb), f"{folder}/save"
    ways = limits.WRITES + ours.SAVES + peers.SAVES

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
    """On 1 and 2 ranks."""
    rows = []
    for world in chosen(options, 1, 2):
        rows += case("async", _ranks(world), on_ranks, world, _async, options, folder)
    return rows


def _async(options: Namespace, folder: str) -> list[Row]:
    state, path, ways = llama(options.gb), f"{folder}/async", limits.COPIES + ours.COPIES + peers.COPIES

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
        ways, options.rounds, check, act, section="async", case=_ranks(dist.get_world_size())
    )
