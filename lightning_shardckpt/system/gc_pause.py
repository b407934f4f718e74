"""Pause Python's garbage collector while tens of thousands of long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Start no collection inside this context; also works as a decorator.

    The collector would scan the plans and all other objects and free nothing, which doubles the time of a save or load
    of many small tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
