"""Make ``strategy="sharded"`` known to Lightning, without importing Lightning.

The tools of this package start without it. So the name is registered when Lightning's registries are there: now, if
somebody has imported them, else as soon as somebody does. Checked with Lightning 2.5.6 and 2.6.6, whose registries are
``StrategyRegistry`` and ``STRATEGY_REGISTRY``.
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
_REGISTRIES = {"lightning.pytorch.strategies": "StrategyRegistry", "lightning.fabric.strategies": "STRATEGY_REGISTRY"}


def register_with_lightning(*, trainer: str, fabric: str) -> None:
    """Register the strategies now, where Lightning is imported, and as soon as it is elsewhere.

    Args:
        trainer: the module that has the ``ShardedStrategy`` of the Trainer; imported when the strategy is made.
        fabric: the module that has Fabric's.
    """
    finder = _Finder(dict(zip(_REGISTRIES, (trainer, fabric), strict=True)))
    for name in _REGISTRIES:
        if name in sys.modules:
            finder.register(sys.modules[name])
    sys.meta_path.insert(0, finder)


def _make(home: str, **arguments: Any) -> Any:
    return import_module(home).ShardedStrategy(**arguments)


class _Finder(MetaPathFinder):
    """Looks at imports; those of the registries get a loader that then registers the strategy."""

    def __init__(self, homes: dict[str, str]) -> None:
        self._homes, self._looking = homes, False

    def register(self, module: ModuleType) -> None:
        """Register the strategy in a registry's module."""
        found = getattr(module, _REGISTRIES[module.__name__], None)
        if found is not None and NAME not in found:  # None: it is being imported
            make = partial(_make, self._homes[module.__name__])
            found.register(NAME, make, description="Sharded training and checkpoints")

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
            _call_after(spec.loader, self.register)
        return spec


def _call_after(loader: Loader, call: Callable[[ModuleType], None]) -> None:
    """Let a loader call something with the module that it has executed."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        call(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]  # of this instance alone
