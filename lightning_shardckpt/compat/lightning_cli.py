"""Make ``strategy="sharded"`` known to Lightning, without importing Lightning.

The tools of this package start without it. So the name is registered when Lightning's registries are there: now, if
somebody has imported them, else as soon as somebody does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "sharded"
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_shardckpt.pytorch"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_shardckpt.fabric"),
}


def register_with_lightning() -> None:
    """Register the strategies now, where Lightning is imported, and when it is elsewhere."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    registry, home = _REGISTRIES[module.__name__]
    found = getattr(module, registry, None)
    if found is not None and NAME not in found:  # None: it is being imported
        found.register(NAME, partial(_make, home), description="Sharded training and checkpoints")


def _make(home: str, **arguments: Any) -> Any:
    return import_module(home).ShardedStrategy(**arguments)


class _Finder(MetaPathFinder):
    """Looks at imports; those of the registries get a loader that registers the strategy behind them."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders have, of one of the registries' modules."""
        if name not in _REGISTRIES or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            _behind(spec.loader, _register)
        return spec


def _behind(loader: Loader, call: Callable[[ModuleType], None]) -> None:
    """Let a loader call something with the module that it has executed."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        call(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]  # of this instance alone
