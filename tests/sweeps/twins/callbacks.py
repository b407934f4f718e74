"""Lightning's own callbacks, and what the Trainer does around steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_swa_avg_fn

from tests.sweeps.twins.base import CLASSES, Natural, Validated


def shrink(trainer: pl.Trainer, module: Any, *args: Any) -> None:
    module.net.scale.data.mul_(0.99)


CALLBACKS: dict[str, tuple[Any, type, dict[str, Any]]] = {
    "AveragesStochastically": (
        lambda: [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)],
        Validated,
        {"max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 1},
    ),
    "PrunesGlobally": (
        lambda: [callbacks.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True)],
        Validated,
        {"limit_val_batches": 1},
    ),
    "AccumulatesByEpoch": (
        lambda: [callbacks.GradientAccumulationScheduler({0: 2, 1: 1})],
        Natural,
        {"max_epochs": 2, "accumulate_grad_batches": 1},
    ),
    "ChangesByLambda": (
        lambda: [callbacks.Timer("00:01:00:00"), callbacks.LambdaCallback(on_train_batch_end=shrink)],
        Natural,
        {},
    ),
}
if hasattr(callbacks, "WeightAveraging"):  # since Lightning 2.6
    CALLBACKS |= {
        "Averages": (lambda: [callbacks.WeightAveraging(avg_fn=get_swa_avg_fn())], Validated, {"limit_val_batches": 1}),
        "AveragesExponentially": (
            lambda: [callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=1)],
            Validated,
            {"limit_val_batches": 1},
        ),
    }
for _name, (_make, _base, _options) in CALLBACKS.items():
    type(_name, (_base,), {}, callbacks=_make, **_options)

ROWS = {"amount": 0.4, "parameter_names": ["weight"], "pruning_dim": 0, "pruning_norm": 2}
ROWS |= {"use_global_unstructured": False, "use_lottery_ticket_hypothesis": False}
FINETUNING = {"max_epochs": 3, "limit_train_batches": 2}


class PrunesRows(
    Natural, callbacks=lambda: [callbacks.ModelPruning("ln_structured", **ROWS)], max_epochs=2, limit_train_batches=2
):
    momentum = 0.0

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5)).double()


class Unfreezes(callbacks.BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.layers)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.layers, optimizer, lr=0.02)


class Finetunes(Natural, callbacks=lambda: [Unfreezes()], **FINETUNING):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


class FinetunesBackbone(
    Natural,
    callbacks=lambda: [callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)],
    **FINETUNING,
):
    configure_optimizers = Natural.adamw

    def build(self) -> None:
        super().build()
        self.backbone, self.net = self.net, nn.Linear(CLASSES, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.backbone(batch[0])), batch[1])


class Watch(pl.Callback):  # reads all that a callback of a logger might
    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            module.seen += [p.grad.norm().item() / (p.norm().item() + 1) for p in group["params"] if p.grad is not None]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        state = trainer.optimizers[0].state
        module.seen += [v.mean().item() for s in state.values() for v in s.values() if isinstance(v, Tensor)]
        module.seen.append(float(trainer.callback_metrics["loss"]))
        module.seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]).std().item())


class IsWatched(Natural, callbacks=lambda: [Watch()]):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss
