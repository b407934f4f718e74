"""Make optimizers wait, before they step, until what they change is copied.

Knows no save: whoever copies says how to wait. Not collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_T = TypeVar("_T")


class CopyBarrier:
    """Holds back the steps of all torch optimizers of this process, from when it is made until ``close``.

    Args:
        wait: returns when parameters and optimizer state may change; called before every step, so it must be cheap.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._closure_first: Optimizer | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Let optimizers step freely again."""
        self._hook.remove()

    @contextmanager
    def around_step(self, optimizer: Optimizer, closure: Callable[[], _T]) -> Iterator[Callable[[], _T]]:
        """Let ``optimizer`` step in this context with the closure that is given: it waits after forward and backward.

        So the copies go on during both. Torch's own optimizers call the closure first. Others, and those that step
        meanwhile, wait before they begin.
        """

        def waiting() -> _T:
            found = closure()
            self._wait()
            return found

        self._closure_first = optimizer if type(optimizer).__module__.startswith("torch.optim") else None
        try:
            yield waiting
        finally:
            self._closure_first = None

    def _before_step(self, optimizer: Optimizer, *args: object) -> None:
        if optimizer is not self._closure_first:
            self._wait()
