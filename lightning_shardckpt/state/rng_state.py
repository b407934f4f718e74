"""Random number generators of this process: Python's, NumPy's where it is in use, torch's on CPU and accelerators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def get_rng_state() -> dict[str, Any]:
    """The state of every generator, as values that ``state.json_tree`` can store."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys, *rest)
    if torch.cuda.is_available():  # not run on a GPU by the tests
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue every generator from ``state``. Accelerators that were not there when it was taken stay as they are."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    for i, cuda in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, i)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, every generator starts from ``seed``, of 32 bits; after it, they are as before."""
    before = get_rng_state()
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        yield
    finally:
        set_rng_state(before)
