"""Sections load and reshard: loads on the same and on another topology."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import limits
import ours
import peers
import torch.distributed as dist
from state import llama
from turns import Facts, Row, Way, case, clear, evict, on_ranks, recall, take_turns, timed

_SEEN_MISSING = 0.01  # of the pages: more of them still cached, and a load is not cold


@dataclass(frozen=True)
class Change:
    """Ranks that save and ranks that load; along which dim FSDP cuts on either side."""

    save: int
    load: int
    save_dim: int = 0
    load_dim: int = 0

    def __str__(self) -> str:
        kinds = f", {_KIND[self.save_dim]} → {_KIND[self.load_dim]}" if self.save_dim != self.load_dim else ""
        return f"{self.save} → {self.load}{kinds}"


_KIND = ("rows", "columns")
WARM, COLD, SAVED = "warm", "cold", "just saved"  # where the bytes are: page cache, disk, wherever the save left them
_LIMITS = limits.READS + limits.RESUMES
_RESHARDS = (Change(4, 2), Change(2, 4), Change(4, 1), Change(2, 2, 0, 1), Change(2, 2, 1, 0))


def load(options: Namespace, folder: str) -> list[Row]:
    """On 2 ranks what 2 saved: from the page cache, from the disk, and right after the save."""
    ways = limits.READS + ours.LOADS + peers.LOADS
    ways += limits.RESUMES + ours.RESUMES + peers.RESUMES
    to = Change(2, 2)
    return case("load", str(to), _saved_and_loaded, to, ways, options, folder, "load", (WARM, COLD, SAVED))


def reshard(options: Namespace, folder: str) -> list[Row]:
    """On other ranks than those that saved, and as column shards, which tensor parallelism has."""
    ways = limits.READS + ours.LOADS + peers.LOADS
    rows = []
    for to in _RESHARDS:
        rows += case("reshard", str(to), _saved_and_loaded, to, ways, options, folder, "reshard", (WARM,))
    return rows


def _saved_and_loaded(
    to: Change, ways: list[Way], options: Namespace, folder: str, section: str, caches: tuple[str, ...]
) -> list[Row]:
    saved = on_ranks(to.save, _save, to, ways, options, folder)
    try:
        return on_ranks(to.load, _load, to, ways, options, folder, section, caches, saved)
    finally:
        on_ranks(1, clear, folder)


def _path(folder: str, way: Way) -> str:
    return f"{folder}/{''.join(letter if letter.isalnum() else '-' for letter in way.name)}"


def _save(to: Change, ways: list[Way], options: Namespace, folder: str) -> dict[str, str]:
    """Save with each way that is no limit; returns the errors of those that could not, by name."""
    state = llama(options.gb, to.save_dim)

    def act(way: Way) -> Facts:
        peers.prepare(state)
        if way not in _LIMITS:
            way.save(state, _path(folder, way))
        return {}

    return {row["way"]: row["error"] for row in take_turns(ways, 0, act, act) if "error" in row}


def _load(
    to: Change,
    ways: list[Way],
    options: Namespace,
    folder: str,
    section: str,
    caches: tuple[str, ...],
    failed: dict[str, str],
) -> list[Row]:
    state = llama(options.gb, to.load_dim)
    needed, cache = state.nbytes, WARM

    def turn(way: Way) -> Facts:
        peers.prepare(state)
        if cache == SAVED:
            clear(_path(folder, way))
            way.save(state, _path(folder, way))
        if way.fresh:
            peers.forget(state)
        stayed = 0.0
        if dist.get_rank() == 0 and cache == COLD:
            stayed = evict(_path(folder, way))
        elif dist.get_rank() == 0 and cache == WARM:
            recall(_path(folder, way))
        dist.barrier()
        found = timed(lambda: way.load(state, _path(folder, way)), state.empty_moments if way.fresh else lambda: None)
        if not state.optimizer.state:
            raise ValueError("it loaded no optimizer state")
        return {**found, "needed_bytes": needed, "still_cached": stayed}

    def check(way: Way) -> Facts:
        if way.name in failed:
            raise RuntimeError(failed[way.name])
        peers.prepare(state)
        if way in _LIMITS:  # the best there could be: each rank's bytes in one piece
            way.save(state, _path(folder, way))
        try:
            if cache != SAVED:
                state.spoil()
            found = turn(way)
            state.check()
            return found
        finally:
            state.fill()

    rows = []
    for cache in caches:
        about = {"section": section, "case": f"{to}, {cache}"}
        found = take_turns(ways, options.rounds, check, turn, **about)
        for row in found:
            stayed = max((facts["still_cached"] for facts in row["rounds"]), default=0)
            if stayed > _SEEN_MISSING:
                row["note"] = f"{stayed:.0%} of its pages stayed in the page cache"
        rows += found
    return rows
