"""Make ``strategy="sharded"`` and directories known to Lightning, without importing Lightning.

The tools of this package start without it. So the name is registered when Lightning's registries are there: now, if
somebody has imported them, else as soon as somebody does. Checked with Lightning 2.5.6 and 2.6.6, whose registries are
``StrategyRegistry`` and ``STRATEGY_REGISTRY``. LightningCLI, likewise, then takes hyper-parameters from directories.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "sharded"
Heed = Callable[[ModuleType], None]


def register_with_lightning(*, trainer: str, fabric: str) -> None:
    """Register the strategies now, where Lightning is imported, and as soon as it is elsewhere.

    Args:
        trainer: the module that has the ``ShardedStrategy`` of the Trainer; imported when the strategy is made.
        fabric: the module that has Fabric's.
    """
    heeds: dict[str, Heed] = {
        "lightning.pytorch.strategies": partial(_register, "StrategyRegistry", trainer),
        "lightning.fabric.strategies": partial(_register, "STRATEGY_REGISTRY", fabric),
        "lightning.pytorch.cli": _take_hyper_parameters,
    }
    for name, heed in heeds.items():
        if name in sys.modules:
            heed(sys.modules[name])
    sys.meta_path.insert(0, _Finder(heeds))


def _register(registry: str, home: str, module: ModuleType) -> None:
    found = getattr(module, registry, None)
    if found is not None and NAME not in found:  # None: it is being imported
        found.register(NAME, partial(_make, home), description="Sharded training and checkpoints")


def _make(home: str, **arguments: Any) -> Any:
    return import_module(home).ShardedStrategy(**arguments)


def _take_hyper_parameters(module: ModuleType) -> None:
    from lightning_shardckpt.compat.lightning_cli import take_hyper_parameters

    def stored(path: str, weights_only: bool) -> dict[str, Any]:
        from lightning_shardckpt.from_checkpoint import stored_hyper_parameters  # imports torch and Lightning

        return stored_hyper_parameters(path, weights_only=weights_only)

    if hasattr(module, "LightningCLI"):
        take_hyper_parameters(module.LightningCLI, stored)


class _Finder(MetaPathFinder):
    """Looks at imports; of the modules that ``heeds`` names, each is told of when it is there."""

    def __init__(self, heeds: Mapping[str, Heed]) -> None:
        self._heeds, self._looking = heeds, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders have, of one of these modules."""
        if name not in self._heeds or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, self._heeds[name])
        return spec


def _call_after(loader: Loader, call: Heed) -> None:
    """Let a loader call something with the module that it has executed."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        call(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]  # of this instance alone
