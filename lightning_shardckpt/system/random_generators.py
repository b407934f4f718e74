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
"""The classes of generator objects."""
_COMPARED = ("python", "numpy", "torch", "current_cuda")
"""The keys of ``get_rng_state(every_device=False)``."""


def get_rng_state(*, every_device: bool = True) -> dict[str, Any]:
    """Return the states of all global generators, as values that ``state.json_tree`` can store.

    Args:
        every_device: include every CUDA device, not only the current one, if this process uses CUDA.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = np.random.get_state()
    if every_device and torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    if _uses_cuda():
        state["current_cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set all global generators to ``state``. Devices that ``state`` does not contain keep their state.

    The current CUDA device continues from the device that was current then, even if its number differs.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:  # absent if the process that saved had no NumPy
        np.random.set_state(state["numpy"])
    for i, cuda in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, i)
    if "current_cuda" in state:
        torch.cuda.set_rng_state(state["current_cuda"])


def differing_generators(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``one`` whose generator states differ from ``other``; both are of ``get_rng_state``."""
    return {name: one[name] for name in _COMPARED if name in one and not _is_equal(one[name], other.get(name))}


def checksum_of_states(states: Mapping[str, Any], start: int = 0) -> int:
    """Return a checksum of entries of ``get_rng_state``, continued from ``start``."""
    for state in states.values():
        words = state if isinstance(state, torch.Tensor) else np.asarray(state[1])
        start = zlib.crc32(np.ascontiguousarray(words).tobytes(), start)
        if not isinstance(state, torch.Tensor):
            start = zlib.crc32(repr(state[2:]).encode(), start)
    return start


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and any(isinstance(part, np.ndarray) for part in one):  # NumPy's
        return all(map(_is_equal, one, other))
    return one == other if isinstance(one, tuple) else bool(np.array_equal(one, other))


@contextmanager
def preserve_rng(*, every_device: bool = False) -> Iterator[None]:
    """Restore the global generators on exit: of CUDA devices the current one, or all with ``every_device``."""
    before = get_rng_state(every_device=every_device)
    try:
        yield
    finally:
        set_rng_state(before)


def seed_rng(seed: int) -> None:
    """Seed all global generators with ``seed``."""
    _seed_torch(seed)
    _seed_others(seed)


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


class derive_rng:  # a class, since a step of a pipeline enters it for each module on each microbatch
    """A context in which torch's generators are seeded from their state before and ``key``; restores them on exit."""

    __slots__ = ("_cpu", "_cuda", "_key")

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        self._cpu, self._cuda = torch.get_rng_state(), torch.cuda.get_rng_state() if _uses_cuda() else None
        seed = zlib.crc32(self._key.encode(), _checksum(self._cpu))
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            torch.cuda.manual_seed_all(seed)

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def advance_rng(generator: torch.Generator | None = None) -> None:
    """Draw one number from a generator on the CPU; by default from torch's."""
    torch.rand((), device="cpu", generator=generator)


def seed_and_watch(seed: int) -> Callable[[int], bool]:
    """Seed all global generators, and return a function that tells if numbers were drawn from them since.

    The function takes the number of calls of ``advance_rng``, which are allowed. It compares the next numbers of NumPy
    and Python, as reading a state of NumPy takes 0.1 ms. It leaves the generators as they were if nothing was drawn;
    else they have drawn one more number.
    """
    seed_rng(seed)
    first = np.random.random_sample(), random.random()
    seed_rng(seed)
    cuda = torch.cuda.get_rng_state() if _uses_cuda() else None

    def drew(advances: int) -> bool:
        state, expected = torch.get_rng_state(), torch.Generator().manual_seed(seed)
        for _ in range(advances):
            advance_rng(expected)
        if (np.random.random_sample(), random.random()) != first:
            return True
        _seed_others(seed)
        same_cuda = cuda is None or cuda.equal(torch.cuda.get_rng_state())
        return not (same_cuda and state.equal(expected.get_state()))

    return drew


def draw_seed() -> int:
    """Return a 31-bit seed drawn from torch's CPU generator."""
    return int(torch.randint(1 << 31, ()))


def rng_checksum() -> int:
    """Return a checksum of the generator states of torch, NumPy and Python, which changes with each draw.

    Includes the current CUDA device; does not wait for it, since its generator's state is in host memory.
    """
    numpy = np.random.get_state(legacy=False)
    _, words, gauss = random.getstate()
    rest = numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"], hash(words), gauss  # hash of ints is not salted
    checksum = zlib.crc32(numpy["state"]["key"].data, _checksum(torch.get_rng_state()))
    if _uses_cuda():
        checksum = zlib.crc32(torch.cuda.get_rng_state().numpy().data, checksum)
    return zlib.crc32(repr(rest).encode(), checksum)


def _checksum(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().data)


def _seed_others(seed: int) -> None:
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _seed_torch(seed: int) -> None:
    """Seed like ``torch.manual_seed``, which spends over 1 ms on each absent device type."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # asking must not create a context
