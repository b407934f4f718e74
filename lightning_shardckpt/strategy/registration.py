"""Registration of ``strategy="sharded"`` with Lightning and Fabric, whichever is imported first.

Does not import them, since this package's tools run without Lightning. Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_shardckpt.pytorch"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_shardckpt.fabric"),
}


def register_strategies() -> None:
    """Register the name with each registry: now if it is imported, else when it is."""
    for module in _REGISTRIES:
        if not _register(module):
            sys.meta_path.insert(0, _RegisterOnImport(module))


def _register(module: str) -> bool:
    """Register the name with a registry; return False if it is not imported."""
    name, home = _REGISTRIES[module]
    registry = getattr(sys.modules.get(module), name, None)
    if registry is not None and "sharded" not in registry:
        text = "Sharded training and checkpoints"  # the import of the strategy waits until it is created
        registry.register("sharded", lambda **given: import_module(home).ShardedStrategy(**given), description=text)
    return registry is not None


class _RegisterOnImport(MetaPathFinder):
    """Finds nothing itself: it lets the module of a registry register the name at the end of its import, once."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the other finders for the module; None for other modules."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one module
        return spec
