"""The dicts in which a module keeps what is registered, by the class that each is of.

Checked with torch 2.12 to 2.15. The public iterators leave out what is None or there twice, and ``setattr`` runs code
of the user's class; assigning here does neither.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

BatchNorm = _BatchNorm
"""What every batch norm derives from, synchronized and lazy ones included."""

NormWithStatistics = _NormBase
"""What every norm with running statistics derives from: batch and instance norms."""


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, in order of registration, to be read and assigned."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, in order of registration, to be read and assigned."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """The names of the module's own buffers that are not in its state dict."""
    return frozenset(module._non_persistent_buffers_set)


def refresh_flat_weights(modules: Iterable[nn.Module]) -> list[tuple[nn.RNNBase, list[Tensor | None]]]:
    """Let recurrent modules have no parameters but those of their slots: they keep them in a list besides.

    Their forward makes the list anew when it finds others in the slots, and keeps them alive with it.

    Returns:
        The recurrent ones among ``modules``, each with its list of before, for `restore_flat_weights`.
    """
    before = [(m, m.__dict__["_flat_weights"]) for m in modules if isinstance(m, nn.RNNBase)]
    for module, _ in before:
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in module._flat_weights_names]
    return before


def restore_flat_weights(before: Iterable[tuple[nn.RNNBase, list[Tensor | None]]]) -> None:
    """Undo `refresh_flat_weights`."""
    for module, weights in before:
        module.__dict__["_flat_weights"] = weights
