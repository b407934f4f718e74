"""Random number generators: those of this process (Python's, NumPy's, torch's on each device) and single objects."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The kinds of random generators that are objects."""
GENERATED = ("python", "numpy", "torch", "current_cuda")
"""What ``get_rng_state`` has without ``every_device``."""


def get_rng_state(*, every_device: bool = True) -> dict[str, Any]:
    """Return the state of every generator of the process, as values that ``state.json_tree`` can store.

    Args:
        every_device: whether it has every CUDA device, beside the current one, if this process uses any.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    state["numpy"] = np.random.get_state()
    if every_device and torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    if _uses_cuda():
        state["current_cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue every generator from ``state``. Devices that were not there when it was taken stay as they are.

    The current CUDA device continues from what was the current one, which may have had another number.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:  # a checkpoint of a process without NumPy has none
        np.random.set_state(state["numpy"])
    for i, cuda in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, i)
    if "current_cuda" in state:
        torch.cuda.set_rng_state(state["current_cuda"])


def different_rng(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return from ``one``, of ``get_rng_state``, the generators that draw other numbers than they do in ``other``."""
    return {kind: one[kind] for kind in GENERATED if kind in one and not _is_equal(one[kind], other.get(kind))}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and any(isinstance(part, np.ndarray) for part in one):  # NumPy's
        return all(map(_is_equal, one, other))
    return one == other if isinstance(one, tuple) else bool(np.array_equal(one, other))


@contextmanager
def kept_rng(*, every_device: bool = False) -> Iterator[None]:
    """After it, all generators are as before; of CUDA devices, the current one is, or ``every_device``."""
    before = get_rng_state(every_device=every_device)
    try:
        yield
    finally:
        set_rng_state(before)


def seed_rng(seed: int) -> None:
    """Let all generators start from ``seed``."""
    _seed_torch(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, every generator starts from ``seed``, of 32 bits; after it, they are as before."""
    with kept_rng(every_device=True):
        seed_rng(seed)
        yield


@contextmanager
def derived_rng(key: str) -> Iterator[None]:
    """Inside, torch draws numbers that follow from its present state and ``key``; after it, the state is as before."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state() if _uses_cuda() else None
    _seed_torch(zlib.crc32(key.encode(), _checksum(cpu)))
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def advance_rng() -> None:
    """Draw one number from torch's CPU generator."""
    torch.rand(())


def checksum_after(seed: int, advances: int) -> int:
    """Return the `rng_checksum` after ``seed_rng`` and so many ``advance_rng``; the generators stay as they are."""
    with kept_rng():
        seed_rng(seed)
        for _ in range(advances):
            advance_rng()
        return rng_checksum()


def draw_seed() -> int:
    """Return a number from torch's generator of this process."""
    return int(torch.randint(1 << 31, ()))


def rng_checksum() -> int:
    """Return a checksum of the states of torch, NumPy and Python: it changes with each draw, on this process's device.

    It does not wait for the device: the state of its generator is in host memory.
    """
    drawn = np.random.get_state(legacy=False)
    _, words, gauss = random.getstate()
    rest = drawn["state"]["pos"], drawn["has_gauss"], drawn["gauss"], hash(words), gauss  # of integers: as everywhere
    mark = zlib.crc32(drawn["state"]["key"].tobytes(), _checksum(torch.get_rng_state()))
    if _uses_cuda():
        mark = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), mark)
    return zlib.crc32(repr(rest).encode(), mark)


def generator_state(generator: Any) -> Any:
    """Return the state of one of the ``GENERATORS``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Give one of the ``GENERATORS`` a state that ``generator_state`` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _checksum(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def _seed_torch(seed: int) -> None:
    """Seed like ``torch.manual_seed``, without the 1 ms and more that it costs for each kind of absent device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # asking must not create a context
