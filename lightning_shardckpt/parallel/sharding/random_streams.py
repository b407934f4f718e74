"""Let ranks draw the same random numbers where they must.

Ranks that build the same weights, or that hold parts of one activation, must; data-parallel ranks need not.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The kinds of random generators that are objects."""


def rng_state() -> dict[str, Any]:
    """The state of the generators of torch (CPU and current CUDA device), numpy and python."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if _has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def generator_state(generator: Any) -> Any:
    """Return the state of one of the ``GENERATORS``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Inverse of `generator_state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def rng_checksum() -> int:
    """A checksum of the states of torch's CPU generator, numpy and python: it changes when somebody draws."""
    drawn = np.random.get_state(legacy=False)
    _, words, gauss = random.getstate()
    rest = drawn["state"]["pos"], drawn["has_gauss"], drawn["gauss"], hash(words), gauss  # of integers: as everywhere
    mark = zlib.crc32(drawn["state"]["key"].tobytes(), _checksum(torch.get_rng_state()))
    return zlib.crc32(repr(rest).encode(), mark)


@contextmanager
def same_rng() -> Iterator[None]:
    """Inside, every rank draws what rank 0 draws; after it, a rank whose state was its own gets that back.

    Collective: every rank of the world must enter it.
    """
    own = rng_state()
    shared = _broadcast(own, None)
    differs = not torch.equal(own["torch"], shared["torch"])
    set_rng_state(shared)
    try:
        yield
    finally:
        if differs:
            set_rng_state(own)


def broadcast_rng(group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the random state of its first. Collective: every rank of it must call it."""
    set_rng_state(_broadcast(rng_state(), group))


@contextmanager
def derived_rng(key: str) -> Iterator[None]:
    """Inside, torch draws numbers that follow from its present state and ``key``; after it, the state is as before."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state() if _has_cuda() else None
    _seed(zlib.crc32(key.encode(), _checksum(cpu)))
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def advance_rng() -> None:
    """Draw one number from torch's CPU generator."""
    torch.rand(())


def draw_seed() -> int:
    """A number from torch's generator of this process."""
    return int(torch.randint(1 << 31, ()))


@contextmanager
def kept_rng() -> Iterator[None]:
    """After it, all generators are as before."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def seed_rng(seed: int) -> None:
    """Let all generators start from ``seed``."""
    _seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _checksum(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def _seed(seed: int) -> None:
    """Seed like ``torch.manual_seed``, without the 1 ms and more that it costs for each kind of absent device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # asking must not create a context


def _broadcast(state: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return state
    box = [state]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
