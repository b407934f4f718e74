"""What the order of a loader is drawn from: random states of the process and of its own generators, and seeds."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import torch

from lightning_shardckpt.compat.distributed_sampler import own_generator
from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state

OTHER_ORDER = (
    "{sampler} drew another order for this epoch than in the run that was interrupted: in the rest of this epoch "
    "samples come twice or not at all. Only what it draws from torch's, numpy's and python's generators, or from its "
    "own `generator`, is known here. Resume from the end of an epoch, or draw from one of these."
)


def checksum_of(order: list[Any]) -> int | None:
    """Return a checksum of an order; None of one that is not made of numbers."""
    try:
        return zlib.crc32(array("q", order))
    except TypeError:
        return None


def sampler_of(loader: Any) -> Any:
    """Return the sampler that draws a loader's order: that of its batch sampler, if it makes batches; or None."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def random_state(loader: Any) -> dict[str, Any]:
    """Return random states of this process and of the loader's own generators."""
    return {"process": get_rng_state(), "own": own_states(loader)}


def set_random_state(loader: Any, state: dict[str, Any]) -> None:
    """Continue from what ``random_state`` gave."""
    set_rng_state(state["process"])
    set_own_states(loader, state["own"])


def own_states(loader: Any) -> list[torch.Tensor]:
    """Return the states of the loader's own generators."""
    return [generator.get_state() for generator in _generators(loader)]


def set_own_states(loader: Any, states: list[torch.Tensor]) -> None:
    """Continue the loader's own generators."""
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def seed_of(loader: Any) -> int | None:
    """Return the seed of a DistributedSampler, or of another sampler that has one."""
    return getattr(sampler_of(loader), "seed", None)


def set_seed(loader: Any, seed: int | None) -> None:
    """Let a DistributedSampler shuffle as in the interrupted run, whatever this one was seeded with."""
    sampler = sampler_of(loader)
    if seed is not None and hasattr(sampler, "seed"):
        sampler.seed = seed


def _generators(loader: Any) -> list[torch.Generator]:
    sampler = sampler_of(loader)
    found = [getattr(loader, "generator", None), getattr(sampler, "generator", None), own_generator(sampler)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
