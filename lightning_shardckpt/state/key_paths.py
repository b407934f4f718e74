"""Places in a nested dict, and the keys that have a meaning of their own in a checkpoint. No torch."""

from __future__ import annotations

from typing import TypeAlias

KEYS = "shardckpt_keys"
"""Key of trainer state that tells where objects were: ``{"modules": {key: prefix}, "optimizers": [key, …]}``."""

RESERVED = ("state_dict", "optimizer_states", "rank_state", KEYS)

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the outermost dict to a value."""


def key_of(path: Path) -> str:
    """A path as trainer state spells it.

    >>> key_of(("nets", 0, "ema"))
    'nets/0/ema'
    """
    return "/".join(map(str, path))
