"""Aliases that make ``pytorch_lightning`` and ``lightning.pytorch``, two copies of the same code, one package.

A Trainer accepts only strategies that are subclasses of its own package's ``Strategy``. Checked with Lightning 2.5.6
and 2.6.6.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def unify_lightning() -> None:
    """Make ``pytorch_lightning`` an alias of ``lightning.pytorch``, and ``lightning_fabric`` of ``lightning.fabric``.

    Packages that import the aliases then get the Trainer that accepts ``ShardedStrategy``; pickles and checkpoints
    with classes of either name can be read. Call it before these packages are imported; it may be called again.

    Raises:
        RuntimeError: if the package ``pytorch_lightning`` or ``lightning_fabric`` has been imported already.
    """
    if any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        return
    if imported := sorted(name for name in _NAMES if name in sys.modules):
        raise RuntimeError(
            f"imported already, as packages of their own: {', '.join(imported)}. Call "
            "lightning_shardckpt.unify_lightning() before that, at the beginning of the program"
        )
    sys.meta_path.insert(0, _Aliases())


class _Aliases(MetaPathFinder, Loader):
    """Imports Lightning's module in place of an alias."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec with this loader for an alias; None for other names."""
        return spec_from_loader(name, self) if name.partition(".")[0] in _NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return Lightning's module."""
        first, dot, rest = spec.name.partition(".")
        module = import_module(f"{_NAMES[first]}{dot}{rest}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import of the alias has replaced; it was executed already."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)
