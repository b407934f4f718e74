"""Flags of the Trainer, loaders, loops, hooks of Lightning, and what is logged."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.sweeps.twins.base import BATCH, BY_FUNCTION, CLASSES, Natural, dataset


class Logged(Natural, abstract=True):  # at the end it has seen all that was logged, the step and the learning rates
    def on_train_end(self) -> None:
        self.seen += [float(v) for _, v in sorted(self.trainer.callback_metrics.items())]
        self.seen.append(float(self.trainer.global_step))
        self.seen += [g["lr"] for o in self.trainer.optimizers for g in o.param_groups]


class Validated(Logged, abstract=True):
    val_dataloader = Natural.loader

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class LogsInEveryWay(Logged):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", out.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("least", out.min(), on_epoch=True, reduce_fx=torch.min, sync_dist=True)
        self.log("hits", (out.argmax(1) == batch[1]).sum().float(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log_dict({"a": loss * 2, "b": self.net.head.weight.norm()}, on_epoch=True, sync_dist=True, batch_size=16)
        self.log("weight", self.net.scale.mean())
        self.log("step", float(index), on_step=True, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(p.grad.norm() for p in self.parameters()))
        self.log("rate", optimizer.param_groups[0]["lr"], on_epoch=True)


class StopsEarly(
    Validated, max_epochs=6, limit_val_batches=2, callbacks=lambda: [EarlyStopping("val", patience=0, min_delta=0.05)]
): ...


class Loads(Logged, abstract=True):  # has a loader of its own
    more: Any = None

    def train_dataloader(self) -> Any:
        ranks = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        return DataLoader(dataset(), batch_size=BATCH // ranks, **(self.more or {}))


class Overfits(Loads, overfit_batches=2, max_epochs=3, use_distributed_sampler=True): ...


class ValidatesBySteps(
    Validated, max_epochs=3, check_val_every_n_epoch=None, val_check_interval=3, limit_val_batches=1
):
    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.global_step))


class ValidatesWithGradients(
    Validated, num_sanity_val_steps=1, inference_mode=False, limit_val_batches=2, whole=BY_FUNCTION
):  # test-time adaptation: a gradient in validation
    def validation_step(self, batch: list[Tensor], index: int) -> None:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(self.net(x), batch[1], reduction="sum"), x)
            adapted = torch.autograd.grad(self.loss(batch), list(self.net.head.parameters()))
        self.log("slope", slope.square().sum(1).mean(), sync_dist=True)
        self.log("adapted", sum(g.norm() for g in adapted), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen += [float(v) for k, v in sorted(self.trainer.callback_metrics.items()) if k in ("slope", "adapted")]


class LetsLightningSample(Loads, use_distributed_sampler=True, max_epochs=2): ...


class SamplesByLength(Loads, use_distributed_sampler=True, max_epochs=2):
    """A sampler of its own, in an order of its own."""

    def build(self) -> None:
        super().build()
        self.more = {"sampler": sorted(range(len(dataset())), key=lambda n: int(dataset()[n][3].sum()))}


class LetsLightningShuffle(Loads, use_distributed_sampler=True, max_epochs=2):
    """Of a shuffled epoch, what is the same on any number of ranks: sums over all batches."""

    lr, more = 0.0, {"shuffle": True}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("sum", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss


FINDER = {"min_lr": 1e-4, "max_lr": 1.0, "num_training_steps": 4, "early_stop_threshold": None}


class FindsItsRate(Logged, callbacks=lambda: [LearningRateFinder(**FINDER)]):
    momentum = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05


class MixesPrecisions(Logged, precision="bf16-mixed", tolerance=0.02):  # on batches of float32
    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return [t.float() if t.is_floating_point() else t for t in batch]


class TrainsInBfloat16(Logged, precision="bf16-true", tolerance=0.05): ...


class GathersUnevenly(Logged):  # a last batch that is smaller, and features of all ranks
    def train_dataloader(self) -> Any:
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        rows = torch.utils.data.Subset(dataset(), range(place["rank"], 21, place["num_replicas"]))
        return DataLoader(rows, batch_size=BATCH // place["num_replicas"])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.all_gather(self.net(batch[0]), sync_grads=True).reshape(-1, CLASSES)
        return (x @ x.t()).square().mean()
