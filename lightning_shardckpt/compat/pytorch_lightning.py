"""One Lightning under both of its names: ``pytorch_lightning`` is the same code as ``lightning.pytorch``, loaded again.

Its Trainer knows only strategies that are subclasses of its own ``Strategy``. Here both names become one package.
Checked with Lightning 2.5.6 and 2.6.6.
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
    """Make ``pytorch_lightning`` a name of ``lightning.pytorch``, and ``lightning_fabric`` one of ``lightning.fabric``.

    So that packages which import those get the Trainer that takes ``ShardedStrategy``. Call it before they are
    imported; pickles and checkpoints in which classes have the other name are read, too. May be called again.

    Raises:
        RuntimeError: if the package ``pytorch_lightning`` or ``lightning_fabric`` has been imported already.
    """
    if any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        return
    if there := sorted(name for name in _NAMES if name in sys.modules):
        raise RuntimeError(
            f"imported already, as packages of their own: {', '.join(there)}. Call "
            "lightning_shardckpt.unify_lightning() before that, at the beginning of the program"
        )
    sys.meta_path.insert(0, _Aliases())


class _Aliases(MetaPathFinder, Loader):
    """Finds a module of the other name, and gives that of Lightning in its place."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec with this loader, for the other names alone."""
        return spec_from_loader(name, self) if name.partition(".")[0] in _NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return Lightning's module."""
        first, dot, rest = spec.name.partition(".")
        found = import_module(f"{_NAMES[first]}{dot}{rest}")
        self._specs[spec.name] = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which was executed already, the spec back that importing it by this name has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)
