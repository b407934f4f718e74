"""Training of the cases of nets.py under ShardedStrategy, and of their twins."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_shardckpt.pytorch import ShardedStrategy
from tests.support.nets import PLAN, Case, Module, Trained, full_state, trainer_for, twin

TOLERANCE = 1e-12


def train(case: Case, sizes: dict[str, Any]) -> Trained:
    """Collective: every rank must call it."""

    # Only rank 0 has the right seed for weights that are built early: they must come from it.
    pl.seed_everything(3 if case.late or dist.get_rank() == 0 else 99, verbose=False)
    plan: Any = PLAN if "net" in case.net else "auto"
    strategy = ShardedStrategy(**{"tensor_parallel_plan": plan, **sizes, **dict(case.strategy)})
    options = {"gradient_clip_val": case.clip, "accumulate_grad_batches": case.accumulate}
    trainer = trainer_for(strategy, dist.get_world_size(), **options)
    module, first = Module(case), []

    def on_train_start() -> None:
        first.append(full_state(module))

    module.on_train_start = on_train_start
    trainer.fit(module)
    losses = [strategy.reduce(loss).item() for loss in module.losses]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Trained(losses, first[0], full_state(module), metrics)


def train_all(cases: list[Case], sizes: dict[str, Any]) -> list[Trained]:
    return [train(case, sizes) for case in cases]


def twins(cases: list[Case]) -> list[Trained]:
    return [twin(case) for case in cases]
