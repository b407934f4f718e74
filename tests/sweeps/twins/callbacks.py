"""Lightning's own callbacks, and what the Trainer does around steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_swa_avg_fn

from tests.sweeps.twins.base import CLASSES, Natural, case


class Validated(Natural):
    val_dataloader = Natural.loader

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


if hasattr(pl.callbacks, "WeightAveraging"):  # since Lightning 2.6

    @case(callbacks=lambda: [pl.callbacks.WeightAveraging(avg_fn=get_swa_avg_fn())], limit_val_batches=1)
    class Averages(Validated): ...

    @case(callbacks=lambda: [pl.callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=1)], limit_val_batches=1)
    class AveragesExponentially(Validated): ...


@case(
    callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)],
    max_epochs=3,
    limit_train_batches=2,
    limit_val_batches=1,
)
class AveragesStochastically(Validated): ...


@case(
    callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True)],
    limit_val_batches=1,
)
class PrunesGlobally(Validated): ...


@case(
    callbacks=lambda: [
        ModelPruning(
            "ln_structured",
            parameter_names=["weight"],
            amount=0.4,
            pruning_dim=0,
            pruning_norm=2,
            use_global_unstructured=False,
            use_lottery_ticket_hypothesis=False,
        )
    ],
    max_epochs=2,
    limit_train_batches=2,
)
class PrunesRows(Natural):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5)).double()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Unfreezes(BaseFinetuning):
    at = 1

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.layers)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.at:
            self.unfreeze_and_add_param_group(module.net.layers, optimizer, lr=0.02)


@case(callbacks=lambda: [Unfreezes()], max_epochs=3, limit_train_batches=2)
class Finetunes(Natural):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


@case(
    callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)],
    max_epochs=3,
    limit_train_batches=2,
)
class FinetunesBackbone(Natural):
    def build(self) -> None:
        super().build()
        self.backbone, self.net = self.net, nn.Linear(CLASSES, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2, eps=1e-3)


@case(
    callbacks=lambda: [GradientAccumulationScheduler({0: 2, 1: 1})],
    max_epochs=2,
    accumulate_grad_batches=1,
)
class AccumulatesByEpoch(Natural): ...


def shrink(trainer: pl.Trainer, module: Any, *args: Any) -> None:
    module.net.scale.data.mul_(0.99)


@case(callbacks=lambda: [Timer("00:01:00:00"), LambdaCallback(on_train_batch_end=shrink)])
class ChangesByLambda(Natural): ...


class Watch(pl.Callback):
    """Reads all that a callback of a logger might."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            module.seen += [p.grad.norm().item() / (p.norm().item() + 1) for p in group["params"] if p.grad is not None]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        state = trainer.optimizers[0].state
        module.seen += [v.mean().item() for s in state.values() for v in s.values() if isinstance(v, Tensor)]
        module.seen.append(float(trainer.callback_metrics["loss"]))
        whole = torch.cat([p.detach().flatten() for p in module.parameters()])
        module.seen.append(whole.std().item())


@case(callbacks=lambda: [Watch()])
class IsWatched(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss
