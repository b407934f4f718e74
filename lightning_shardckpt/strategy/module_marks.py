"""Remember on a LightningModule what was done to it: a second Trainer must find what the first one did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl

from lightning_shardckpt.errors import StateError, TopologyError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.mesh import Topology
from lightning_shardckpt.state.model import WholeNames

_SHARDED, _HALF_FILLED = "_shardckpt_sharded", "_shardckpt_half_filled"


def remember(module: pl.LightningModule, sharded: ShardedModule) -> None:
    """Keep with the module how it was sharded; not as a submodule of it."""
    object.__setattr__(module, _SHARDED, sharded)


def recall(module: pl.LightningModule, topology: Topology) -> ShardedModule | None:
    """Return how the module was sharded, by this strategy or another Trainer's; None if it was not, or is built anew.

    Raises:
        TopologyError: if it was sharded for other sizes.
    """
    sharded: ShardedModule | None = getattr(module, _SHARDED, None)
    if sharded is None or not sharded.holds(module):
        return None
    if sharded.meshes.topology != topology:
        raise TopologyError(
            f"this LightningModule is already sharded as {sharded.meshes.topology}, the strategy asks for "
            f"{topology}. Use the same sizes, or a new module."
        )
    return sharded


def whole_names(sharded: ShardedModule) -> WholeNames:
    """Return the names of the whole model, also on a pipeline stage that has a part of it."""
    parameters = dict.fromkeys(sharded.canonical_names.values()) if sharded.pipeline is not None else ()
    return WholeNames(sharded.state_names, sharded.state_ties, tuple(parameters))


@contextmanager
def filling(module: pl.LightningModule, path: str) -> Iterator[None]:
    """Mark a module as half filled, from the checkpoint at ``path``; for longer than the context if it ends early."""
    object.__setattr__(module, _HALF_FILLED, path)
    yield
    object.__delattr__(module, _HALF_FILLED)


def is_half_filled(module: pl.LightningModule) -> bool:
    """Return whether a load has changed some tensors and then failed, and no other load succeeded since."""
    return hasattr(module, _HALF_FILLED)


def check_filled(module: pl.LightningModule) -> None:
    """Check that the module's tensors are of one state.

    Raises:
        StateError: if the module `is_half_filled`.
    """
    if is_half_filled(module):
        path = getattr(module, _HALF_FILLED)
        raise StateError(
            f"loading {path!r} failed when some tensors of {type(module).__name__} were filled already: they are a mix "
            "now, which is neither trained nor saved. Load another checkpoint by ckpt_path, or make a new module."
        )
