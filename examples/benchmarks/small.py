"""Section small: the cost of tensors that have hardly any bytes."""

from __future__ import annotations

from argparse import Namespace

import ours
import peers
from state import small as small_state
from turns import Facts, Row, Way, case, clear, on_ranks, take_turns, timed

_MICRO = 1e6


def small(options: Namespace, folder: str) -> list[Row]:
    """Two ranks with 2 KB of each tensor."""
    label = f"{options.tensors:,} tensors, 2 ranks"
    return case("small", label, on_ranks, 2, _small, options, folder, label)


def _small(options: Namespace, folder: str, label: str) -> list[Row]:
    state, path, one = small_state(options.tensors), f"{folder}/small", _MICRO / options.tensors

    def turn(way: Way) -> Facts:
        peers.prepare(state)
        try:
            saved = timed(lambda: way.save(state, path))
            loaded = timed(lambda: way.load(state, path))
        finally:
            clear(path)
        return {"save_us": saved["seconds"] * one, "load_us": loaded["seconds"] * one, "extra_mb": saved["extra_mb"]}

    def check(way: Way) -> Facts:
        peers.prepare(state)
        try:
            way.save(state, path)
            state.spoil()
            way.load(state, path)
            state.check()
            return {}
        finally:
            state.fill()
            clear(path)

    ways = [*peers.MANY, ours.way(limit=peers.SAFETENSORS, peer="DCP")]
    return take_turns(ways, options.rounds, check, turn, section="small", case=label)
