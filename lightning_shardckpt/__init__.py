"""Sharded checkpoints for PyTorch Lightning: every rank writes its own slices, any topology loads them.

Public names are resolved when they are first used: the tools in this package start without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_shardckpt.checkpoint_io import ShardCkptIO, load_from_checkpoint
    from lightning_shardckpt.functional import load, save, save_async, wait
    from lightning_shardckpt.lazy import load_keys, metadata, open
    from lightning_shardckpt.parallel.full import full_state_dict
    from lightning_shardckpt.pytorch import ShardedStrategy

__all__ = [
    "ShardedStrategy",
    "ShardCkptIO",
    "load_from_checkpoint",
    "save",
    "save_async",
    "load",
    "wait",
    "load_keys",
    "metadata",
    "open",
    "full_state_dict",
]

_WITHOUT_LIGHTNING = {
    **dict.fromkeys(("load_keys", "metadata", "open"), "lightning_shardckpt.lazy"),
    **dict.fromkeys(("save", "save_async", "load", "wait"), "lightning_shardckpt.functional"),
    "full_state_dict": "lightning_shardckpt.parallel.full",
}
register_with_lightning()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITHOUT_LIGHTNING:
        return getattr(import_module(_WITHOUT_LIGHTNING[name]), name)
    # one module knows the other names
    return getattr(import_module("lightning_shardckpt.pytorch"), name)
