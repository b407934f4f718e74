"""Section small: the cost of tensors that have hardly any bytes."""

from __future__ import annotations

from argparse import Namespace

import ours
import peers
from state import small as small_state
from turns import Facts, Row, Way, case, clear, on_ranks, take_turns, timed

_MICRO = 1e6
_SLOW = 1  # rounds, where one takes minutes


def small(options: Namespace, folder: str) -> list[Row]:
    """Two ranks with 2 KB of each tensor."""
    count, many = options.tensors, 5 * options.tensors
    rows = case("small", _case(count), on_ranks, 2, _small, peers.SMALL, count, options.rounds, folder)
    if options.slow:
        rows += case("small", _case(many), on_ranks, 2, _small, peers.MANY, many, min(options.rounds, _SLOW), folder)
    return rows


def _case(count: int) -> str:
    return f"{count:,} tensors, 2 ranks"


def _small(others: list[Way], count: int, rounds: int, folder: str) -> list[Row]:
    state, path = small_state(count), f"{folder}/small"

    def turn(way: Way) -> Facts:
        peers.prepare(state)
        saved = timed(lambda: way.save(state, path))
        loaded = timed(lambda: way.load(state, path))
        one = _MICRO / count
        return {"save_us": saved["seconds"] * one, "load_us": loaded["seconds"] * one, "extra_mb": saved["extra_mb"]}

    def act(way: Way) -> Facts:
        try:
            return turn(way)
        finally:
            clear(path)

    def check(way: Way) -> Facts:
        """The first save of this state in these processes: nothing is cached yet."""
        try:
            peers.prepare(state)
            first = timed(lambda: way.save(state, path))
            state.spoil()
            way.load(state, path)
            state.check()
            return {"first_us": first["seconds"] * _MICRO / count}
        finally:
            state.fill()
            clear(path)

    ways = [*others, ours.way(limit=peers.SAFETENSORS, peer="DCP")]
    rows = take_turns(ways, rounds, check, act, section="small", case=_case(count))
    for row in rows:
        for facts in row["rounds"]:
            facts.update(row["checked"] or {})
    return rows
