"""When should Python's garbage collector rest? While tens of thousands of objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting() -> Iterator[None]:
    """No collection begins meanwhile; also as a decorator.

    The collector would look at plans and at all other objects in vain: with many small tensors that doubles the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
