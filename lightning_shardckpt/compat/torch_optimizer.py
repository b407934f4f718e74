"""Private names of optimizers: what they do besides torch's own ``state_dict`` and ``load_state_dict``.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from torch.optim import Optimizer


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
