"""Build a LightningModule in ``configure_model``: alike on all ranks, and without memory until it is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch

from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.deferred_init.materialize import broadcast_weights
from lightning_shardckpt.parallel.sharding.mesh import Topology
from lightning_shardckpt.parallel.sharding.random_streams import same_rng
from lightning_shardckpt.strategy.module_marks import recall
from lightning_shardckpt.system.tuning import Tuning


class ModuleBuild:
    """The modules that one strategy has Lightning configure, one after the other."""

    def __init__(self) -> None:
        self._deferred: DeferredInit | None = None

    @contextmanager
    def configuring(
        self, module: pl.LightningModule, topology: Topology, device: torch.device, *, deferred: Tuning | None
    ) -> Iterator[None]:
        """Return the context of ``configure_model``, which runs for every stage; only the first one may build.

        Collective: every rank of the world must call it.

        Args:
            module: whose method runs inside.
            topology: for which it is going to be sharded, or was.
            device: where the ranks meet.
            deferred: sizes of deferred init; None builds with memory.

        Raises:
            TopologyError: if the module was sharded for other sizes.
        """
        known = recall(module, topology)
        if known is not None:
            with known.gradients.strangers():
                yield
            return
        broadcast_weights(module, device)
        with same_rng():
            if deferred is None:
                yield
                return
            self._deferred = DeferredInit(deferred)
            with self._deferred:
                yield

    def first_values(self) -> DeferredInit | None:
        """Return what knows the first values of the module that was configured last, once."""
        values, self._deferred = self._deferred, None
        return values
