"""Random number generators: the global ones (Python's, NumPy's, torch's on each device) and generator objects."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def get_rng_state(*, every_device: bool = True) -> dict[str, Any]:
    """Return the states of all global generators, of CUDA devices all or the current one, if this process uses CUDA."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = np.random.get_state()
    if every_device and torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    if _uses_cuda():
        state["current_cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set all global generators that ``state`` contains; the current CUDA device continues from the one of then."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    for i, cuda in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, i)
    if "current_cuda" in state:
        torch.cuda.set_rng_state(state["current_cuda"])


def differing_generators(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``one`` whose states differ from ``other``, of ``get_rng_state(every_device=False)``."""
    return {k: v for k, v in one.items() if k not in other or _bytes_of(v) != _bytes_of(other[k])}


def rng_checksum(states: Mapping[str, Any] | None = None, start: int = 0) -> int:
    """Continue a checksum of ``get_rng_state(every_device=False)``, by default of now, which changes with each draw."""
    for state in (get_rng_state(every_device=False) if states is None else states).values():
        start = zlib.crc32(_bytes_of(state), start)
    return start


def _bytes_of(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    _, words, *rest = state
    if isinstance(words, np.ndarray):
        return words.tobytes() + repr(rest).encode()
    return repr((hash(words), rest)).encode()  # of Python's many numbers; a hash of numbers is not salted


@contextmanager
def preserve_rng(*, every_device: bool = False) -> Iterator[None]:
    """Restore the global generators on exit: of CUDA devices the current one, or all with ``every_device``."""
    before = get_rng_state(every_device=every_device)
    try:
        yield
    finally:
        set_rng_state(before)


def seed_rng(seed: int) -> None:
    """Seed all global generators."""
    _seed_torch(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@contextmanager
def seed_temporarily(seed: int) -> Iterator[None]:
    """Seed all global generators with ``seed`` (32 bits) inside the context; restore them on exit."""
    with preserve_rng(every_device=True):
        seed_rng(seed)
        yield


def reseed_by_rank(rank: int) -> None:
    """Reseed each global generator with a number that it draws and ``rank``, so that ranks with one state part."""
    _seed_torch(int(torch.randint(1 << 62, ())) + rank)
    random.seed(random.getrandbits(62) + rank)
    np.random.seed((int(np.random.randint(1 << 32, dtype=np.int64)) + rank) % (1 << 32))


@contextmanager
def derive_rng(key: str) -> Iterator[None]:
    """Seed torch's generators from their state before and ``key`` inside the context; restore them on exit."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state() if _uses_cuda() else None
    _seed_torch(zlib.crc32(key.encode(), zlib.crc32(cpu.numpy().data)))
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def advance_rng(generator: torch.Generator | None = None) -> None:
    """Draw one number from a generator on the CPU; by default from torch's."""
    torch.rand((), device="cpu", generator=generator)


def seed_and_watch(seed: int) -> Callable[[int], bool]:
    """Seed all global generators; return a function of the calls of ``advance_rng`` that tells of other draws since."""
    seed_rng(seed)
    begin = get_rng_state(every_device=False)

    def drew(advances: int) -> bool:
        expected = torch.Generator().manual_seed(seed)
        for _ in range(advances):
            advance_rng(expected)
        states = begin | {"torch": expected.get_state()}
        return bool(differing_generators(states, get_rng_state(every_device=False)))

    return drew


def _seed_torch(seed: int) -> None:
    """Seed like ``torch.manual_seed``, which spends over 1 ms on each absent device type."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # asking must not create a context
