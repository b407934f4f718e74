"""Private attributes and methods of Lightning's objects, for code that does not import Lightning.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def override_methods(owner: object, **methods: Any) -> Callable[[], None]:
    """Override methods of one object by attributes; return the undo, which may be called again."""
    vars(owner).update(methods)

    def undo() -> None:
        for name in methods:
            vars(owner).pop(name, None)

    return undo


def fabric_original(module: nn.Module) -> nn.Module | None:
    """Return the user's module in a module from Fabric's ``setup``; None for other modules.

    Relies on the child ``_original_module`` of ``_FabricModule``.
    """
    return module._modules.get("_original_module")


def loader_of_fabric(value: object) -> object:
    """Return the user's loader in a loader from Fabric's ``setup_dataloaders``; other objects unchanged.

    Relies on the name of ``_FabricDataLoader``, and on its attribute ``_dataloader``.
    """
    return value._dataloader if type(value).__name__ == "_FabricDataLoader" else value  # type: ignore[attr-defined]


