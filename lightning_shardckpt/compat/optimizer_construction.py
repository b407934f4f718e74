"""Change what optimizers are given when they are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


@contextmanager
def changed_parameters(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``Optimizer.__init__`` gets ``change(params)`` in place of its first argument.

    Checked with torch 2.12 to 2.15. Relies on every optimizer calling it with the parameters, before it does anything
    with them.
    """
    original = Optimizer.__init__

    def initialise(optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        original(optimizer, change(params), defaults)

    Optimizer.__init__ = initialise  # type: ignore[method-assign,assignment]  # restored below
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]
