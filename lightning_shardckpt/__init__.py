"""Sharded checkpoints for PyTorch Lightning: every rank writes its own slices, any topology loads them.

Public names are resolved when they are first used: the tools in this package start without importing torch. Lightning
and Fabric know ``strategy="sharded"`` after this import, also if they are imported later.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.strategy.registration import register_strategies

if TYPE_CHECKING:
    from lightning_shardckpt.api import load, save, save_async, wait
    from lightning_shardckpt.callbacks import FollowedMetrics
    from lightning_shardckpt.checkpoint_io import ShardCkptIO
    from lightning_shardckpt.from_checkpoint import load_from_checkpoint
    from lightning_shardckpt.lazy import load_keys, metadata
    from lightning_shardckpt.lazy import open as open  # not in __all__: import * would hide Python's own
    from lightning_shardckpt.merging import merge
    from lightning_shardckpt.parallel.pipeline.build import Pipeline
    from lightning_shardckpt.parallel.sharding.fsdp import FSDP
    from lightning_shardckpt.parallel.tensors.values import full_state_dict
    from lightning_shardckpt.pytorch import ShardedStrategy
    from lightning_shardckpt.strategy.pretrained import Pretrained

__all__ = ["ShardedStrategy", "FSDP", "Pipeline", "Pretrained", "ShardCkptIO", "FollowedMetrics", "full_state_dict"]
__all__ += ["load_from_checkpoint", "save", "save_async", "load", "wait", "load_keys", "metadata", "merge"]
_HOMES = {
    "ShardedStrategy": "pytorch",
    "FSDP": "parallel.sharding.fsdp",
    "Pipeline": "parallel.pipeline.build",
    "Pretrained": "strategy.pretrained",
    "ShardCkptIO": "checkpoint_io",
    "FollowedMetrics": "callbacks",
    "load_from_checkpoint": "from_checkpoint",
    **dict.fromkeys(("load_keys", "metadata", "open"), "lazy"),
    **dict.fromkeys(("save", "save_async", "load", "wait"), "api"),
    "full_state_dict": "parallel.tensors.values",
    "merge": "merging",
}
register_strategies()


if not TYPE_CHECKING:  # a type checker would take a module with __getattr__ to have every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = import_module(f"{__name__}.{_HOMES[name]}")
        except AttributeError as error:  # of which `from lightning_shardckpt import …` would not tell the cause
            raise ImportError(f"{__name__}.{name} cannot be imported: {error}", name=__name__) from error
        return getattr(home, name)
