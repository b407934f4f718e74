"""States of random generators. Oracle: the numbers that they draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_shardckpt.system.random_generators import (
    get_rng_state,
    preserve_rng,
    reseed_by_rank,
    rng_checksum,
    seed_and_watch,
    seed_rng,
    set_rng_state,
)

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.random,
    "a whole cycle of numpy": lambda: np.random.bytes(4 * 624),
    "a second number of a pair": np.random.standard_normal,
    "python": random.random,
    "a whole cycle of python": lambda: random.getrandbits(32 * 624),
    "gauss": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_is_noticed_and_none_leaves_the_generators_as_seeded(name: str) -> None:
    with preserve_rng():
        seed_rng(3)
        seeded, has_drawn = rng_checksum(), seed_and_watch(3)
        assert rng_checksum() == seeded and not seed_and_watch(3)(0)
        for _ in range(3):
            before = rng_checksum()
            DRAWS[name]()
            assert rng_checksum() != before and has_drawn(0)


@pytest.mark.parametrize("name", DRAWS)
def test_every_generator_continues_from_its_state(name: str) -> None:
    with preserve_rng():
        seed_rng(3)
        DRAWS[name]()
        state = get_rng_state()
        drawn = [DRAWS[name]() for _ in range(3)]
        seed_rng(4)
        set_rng_state(state)
        assert [DRAWS[name]() for _ in range(3)] == drawn


def test_ranks_with_one_state_part_in_every_generator_and_each_draws_the_same_again() -> None:
    found = []
    with preserve_rng():
        for rank in (2, 3, 3):
            seed_rng(1)
            reseed_by_rank(rank)
            found.append([torch.rand(()).item(), np.random.random(), random.random()])
    assert not set(found[0]) & set(found[1]) and found[1] == found[2]
