"""Private attributes of Lightning's objects, for code that does not import Lightning.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

from typing import Any

from torch import nn

SET_LATER = frozenset(
    {
        *("trainer", "_trainer", "_fabric", "_device", "_dtype", "_device_mesh", "_compiler_ctx", "_current_fx_name"),
        *("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"),
    }
)
"""Attributes that Lightning gives its modules, datamodules and callbacks after they are constructed."""


def attached_trainer(module: object) -> Any:
    """Return the Trainer of a LightningModule, or None; ``LightningModule.trainer`` raises where there is none.

    Relies on the attribute ``_trainer``.
    """
    return getattr(module, "_trainer", None)


def fabric_original(module: nn.Module) -> nn.Module | None:
    """Return the module that Fabric's ``setup`` was given, from what it returned; None for other modules.

    Relies on ``_FabricModule`` having it as a child named ``_original_module``.
    """
    return module._modules.get("_original_module")


def loader_of_fabric(value: object) -> object:
    """Return the loader that Fabric's ``setup_dataloaders`` was given, from what it returned, and else the object.

    Relies on the name of ``_FabricDataLoader``, and on its attribute ``_dataloader``.
    """
    return value._dataloader if type(value).__name__ == "_FabricDataLoader" else value  # type: ignore[attr-defined]


def fabric_forward(module: nn.Module | None) -> nn.Module | None:
    """Return the module whose forward a module from Fabric's ``setup`` calls: what the strategy's ``setup_module``
    returned. Other modules are returned as they are.

    Relies on the attribute ``_forward_module``.
    """
    found: nn.Module | None = getattr(module, "_forward_module", module)
    return found
