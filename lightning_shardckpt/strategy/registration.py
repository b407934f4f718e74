"""Registration of ``strategy="sharded"`` with Lightning and Fabric, if they are imported already.

Does not import them, since this package's tools run without Lightning. Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

NAME = "sharded"
_REGISTRIES = {
    "lightning_shardckpt.pytorch": ("lightning.pytorch.strategies", "StrategyRegistry"),
    "lightning_shardckpt.fabric": ("lightning.fabric.strategies", "STRATEGY_REGISTRY"),
}


def register_strategies() -> None:
    """Register the name with each imported registry; a strategy is imported when it is created."""
    for home, (module, name) in _REGISTRIES.items():
        registry = getattr(sys.modules.get(module), name, None)
        if registry is not None and NAME not in registry:
            registry.register(NAME, partial(_make, home), description="Sharded training and checkpoints")


def _make(home: str, **arguments: Any) -> Any:
    return import_module(home).ShardedStrategy(**arguments)
