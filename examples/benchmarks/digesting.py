"""Section digests: what it costs that a save records them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import ours
import torch.distributed as dist
from saving import checked
from state import State, llama, small
from turns import Facts, Row, Way, case, clear, on_ranks, take_turns, timed, use_page_cache


def digests(options: Namespace, folder: str) -> list[Row]:
    """On 1 and 2 ranks: --gb GB, and --tensors parameters of 4 KB."""
    states = {f"{options.gb:g} GB": (llama, options.gb), f"{options.tensors:,} tensors": (small, options.tensors)}
    rows = []
    for name, about in states.items():
        for world in (1, 2):
            one = f"{name}, {world} rank{'s' * (world > 1)}"
            rows += case("digests", one, on_ranks, world, _digests, one, *about, options.rounds, folder)
    return rows


def _digests(name: str, made: Callable[[Any], State], size: float, rounds: int, folder: str) -> list[Row]:
    state, path = made(size), f"{folder}/digests"

    def act(way: Way) -> Facts:
        use_page_cache(f"{folder}/{dist.get_rank()}", state.nbytes)
        dist.barrier()
        try:
            return timed(lambda: way.save(state, path))
        finally:
            clear(path)

    def check(way: Way) -> Facts:
        return checked(state, way, path, lambda: way.save(state, path))

    return take_turns(ours.DIGESTS, rounds, check, act, section="digests", case=name)
