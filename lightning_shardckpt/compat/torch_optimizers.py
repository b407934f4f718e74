"""Change what optimizers are given when they are built, and ask how they save and load.

Checked with torch 2.12 to 2.15."""

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


def saves_in_its_own_way(optimizer: Optimizer) -> bool:
    """Return whether ``state_dict()`` may have other entries than torch's: the method is overridden, or has hooks after
    it.

    Relies on ``_optimizer_state_dict_post_hooks``, where ``register_state_dict_post_hook`` puts them.
    """
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(
        getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    )


def has_load_hooks(optimizer: Optimizer) -> bool:
    """Return whether functions run before or after ``load_state_dict``.

    Relies on the dicts of ``register_load_state_dict_pre_hook`` and ``register_load_state_dict_post_hook``, which an
    optimizer that wraps another one may lack.
    """
    kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in kinds)


def loads_in_its_own_way(optimizer: Optimizer) -> bool:
    """Return whether ``load_state_dict`` may take other entries than torch's: the method is overridden."""
    return type(optimizer).load_state_dict is not Optimizer.load_state_dict
