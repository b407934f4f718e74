"""Parts that are frozen, thawed, added, replaced, pruned and made anew while a module trains."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from tests.sweeps.twins.base import CLASSES, COMPUTED_WEIGHTS, TENSOR_PARALLEL, WIDTH, Manual, Natural, Net


class Regroups(Natural, abstract=True):  # tells its optimizer
    def exchange(self, old: list[Tensor], new: list[Tensor]) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        group["params"] = [p for p in group["params"] if not any(p is q for q in old)] + new


class AddsAHead(Natural):  # a module that comes while it trains, with a param group of its own
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            torch.manual_seed(5)
            self.extra = nn.Linear(WIDTH, CLASSES).to(self.net.scale)
            self.trainer.optimizers[0].add_param_group({"params": list(self.extra.parameters())})

    def loss(self, batch: list[Tensor]) -> Tensor:
        features = self.net.features(batch[0])
        out = self.net.head(features)
        return F.cross_entropy(out + self.extra(features) if hasattr(self, "extra") else out, batch[1])


class ReplacesItsHead(Regroups):  # a head for other classes, made where an epoch begins; the optimizer is told
    def on_train_epoch_start(self) -> None:
        torch.manual_seed(5)
        old = list(self.net.head.parameters())
        self.net.head = nn.Linear(WIDTH, CLASSES).to(self.net.scale)
        self.exchange(old, list(self.net.head.parameters()))


class ReassignsAWeight(Regroups):
    """``module.weight = nn.Parameter(…)`` at the start of the fit, before anything has been optimized."""

    def on_fit_start(self) -> None:
        old = self.net.head.weight
        self.net.head.weight = nn.Parameter(old.new_ones(CLASSES, WIDTH) * 0.1)
        self.exchange([old], [self.net.head.weight])


class NormsWeightsLate(Regroups):
    """Weight norm from the start of the fit, with the parameters that it makes in the optimizer."""

    def on_fit_start(self) -> None:
        old = self.net.head.weight
        parametrizations.weight_norm(self.net.head)
        self.exchange([old], list(self.net.head.parametrizations.weight.parameters()))


class BuildsItsOptimizerLate(Manual):  # one made in ``on_train_start``, for a part that is made there
    def configure_optimizers(self) -> None: ...

    def on_train_start(self) -> None:
        torch.manual_seed(4)
        self.probe = nn.Linear(WIDTH, CLASSES).to(self.net.scale)
        self.own = torch.optim.SGD([*self.net.head.parameters(), *self.probe.parameters()], lr=0.1, momentum=0.9)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        features = self.net.features(batch[0])
        self.own.zero_grad()
        self.manual_backward(F.cross_entropy(self.probe(features) + self.net.head(features), batch[1]))
        self.own.step()


class PrunesLayers(Natural, max_epochs=2):
    """torch's pruning when an epoch begins: masks, and weights that are computed before each forward."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            prune.l1_unstructured(self.net.head, "weight", amount=0.3)
            prune.ln_structured(self.net.embed, "weight", amount=0.25, n=2, dim=0)
        self.seen.append(float(sum(p.numel() for p in self.parameters())))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            prune.remove(self.net.head, "weight")
            prune.remove(self.net.embed, "weight")


class PrunesFromTheStart(Natural, refused=COMPUTED_WEIGHTS):
    def build(self) -> None:
        super().build()
        prune.custom_from_mask(self.net.layers[0].a, "weight", (torch.arange(12 * WIDTH) % 2).view(12, WIDTH))
        prune.random_unstructured(self.net.head, "bias", amount=2)


class Halved(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


class ParametrizesLate(Natural):
    """A parametrization without an inverse, registered on a module that trains already, and removed."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            parametrize.register_parametrization(self.net.head, "weight", Halved())
        if index == 3:
            parametrize.remove_parametrizations(self.net.head, "weight")


class PicklesItself(Natural, refused=dict.fromkeys(TENSOR_PARALLEL, "Can't pickle local object")):
    """A module that is pickled whole in a hook."""

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            self.seen.append(float(len(pickle.dumps(self.net.layers[0])) > 0))


class CopiesLayers(Natural):
    """Depth that grows: a layer that is a copy of another, with its parameters in the optimizer."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            self.net.layers.append(copy.deepcopy(self.net.layers[1]))
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.layers[2].parameters())})


class LoadsByAssignment(Natural):
    """``load_state_dict(assign=True)``, with the optimizer built anew on what is there then."""

    def on_fit_start(self) -> None:
        torch.manual_seed(9)
        self.net.load_state_dict(Net().to(self.net.scale).state_dict(), assign=True)
        self.trainer.optimizers[0].param_groups[0]["params"] = list(self.net.parameters())


class Swaps(Natural):
    """Exchanges the weights of two layers, and the modules themselves.

    Resumed on one process by plain Lightning, it has the momentum of the other layer, which is stored by number.
    """

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        one, two = self.net.layers
        if index == 1:
            for p, q in zip(one.parameters(), two.parameters(), strict=True):
                p.data, q.data = q.data.clone(), p.data.clone()
        if index == 2:
            self.net.layers[0], self.net.layers[1] = two, one
        self.seen.append(float(one.a.weight.sum()))


class IsLazy(Natural):  # layers that get their shapes in a dry run
    def build(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(CLASSES))
        self.net(torch.zeros(1, 6))
