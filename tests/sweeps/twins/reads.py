"""Values of parameters and gradients that code reads: to log them, to decide by them, to compute with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.twins.base import WIDTH, Natural, case


@case()
class LogsGradients(Natural):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen += [float(v) for v in norms.values()]

    def on_after_backward(self) -> None:
        self.seen += [p.grad.norm().item() for p in self.parameters()]
        self.seen.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())


@case()
class LogsWeights(Natural):
    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            self.seen += [p.mean().item(), p.std().item(), p.abs().max().item(), p.min().item(), p.norm(1).item()]
            self.seen += [float(p.detach().sum()), p.detach().square().sum().sqrt().item(), float(p.var())]
            self.seen += [float((p > 0).sum()), float(p.count_nonzero()), float(p.isnan().any()), float(p.median())]
        w = self.net.head.weight
        self.seen += [w[0, 0].item(), float(w.max(dim=1).values.sum()), float(w.argmax()), float(w.sum(0)[1])]
        self.seen += [float(torch.linalg.matrix_norm(w, 2)), float(torch.linalg.norm(w)), w.amax().item()]
        self.seen += [float(w.norm(float("inf"))), float(w.logsumexp((0, 1)))]
        self.seen.append(float(torch.dist(w, torch.zeros_like(w))))


@case()
class ReadsAsNumpy(Natural):
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight.detach()
        self.seen += w.cpu().numpy().ravel()[:4].tolist() + w.tolist()[3][:2]
        self.seen += np.asarray(w)[4].tolist() + torch.histc(w, bins=3).tolist()
        self.seen += [float(x) for x in self.net.head.bias.detach()]
        self.seen += [float(f"{self.net.scale[0]:.4f}"), len(w), w.topk(2).values.sum().item()]
        self.seen += torch.quantile(w, torch.tensor([0.1, 0.5], dtype=w.dtype)).tolist()
        self.seen += [float(torch.allclose(w, w + 1e-3)), float(torch.equal(w, w.clone())), float(w.unique().numel())]


@case()
class DecidesByValues(Natural):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        w = self.net.head.weight
        if w.norm() > 0.9:
            w.mul_(0.9)
        if (w.abs() > 0.3).any():
            w.clamp_(-0.3, 0.3)
        if bool(self.net.scale.mean() > 1) or not torch.isfinite(w).all():
            self.net.scale.sub_(0.01)
        while self.net.embed.weight.square().sum() > 3.0:
            self.net.embed.weight *= 0.95
        self.net.head.bias.add_(float(w.mean()) * w.shape[0])


@case()
class PenalizesWeights(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        sparse = self.net.head.weight.abs().sum() + self.net.layers[0].a.weight.norm() + self.net.scale.mean()
        return self.loss(batch) + 1e-2 * penalty + 1e-2 * sparse


@case()
class PenalizesOverlap(Natural):
    """Orthogonality, spectral norms, variance of weights."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        w, v = self.net.head.weight, self.net.layers[1].b.weight
        overlap = (w @ w.t() - torch.eye(len(w), dtype=w.dtype, device=w.device)).square().sum()
        spectral = torch.linalg.matrix_norm(v, 2) + F.normalize(v, dim=1).sum(0).square().mean()
        both = torch.cat([w.flatten(), v.flatten()]).var() + torch.einsum("ij,ij->", w, w) + w[1:3].mean()
        return self.loss(batch) + 0.1 * overlap + 0.1 * spectral + 0.1 * both


@case()
class UsesWeightsByHand(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = F.linear(batch[0], self.net.embed.weight, self.net.embed.bias) * self.net.scale
        for layer in self.net.layers:
            x = x + torch.addmm(layer.b.bias, F.gelu(x @ layer.a.weight.t() + layer.a.bias), layer.b.weight.t())
        x = F.layer_norm(x, x.shape[1:], self.net.norm.weight, self.net.norm.bias)
        return F.cross_entropy(torch.einsum("bi,ci->bc", x, self.net.head.weight) + self.net.head.bias, batch[1])


@case()
class UsesWeightsInInferenceMode(Natural):
    """After each step, and changes one."""

    @torch.inference_mode()
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        weight = self.net.head.weight
        weight.mul_(0.99)
        x = torch.ones(2, WIDTH, dtype=weight.dtype, device=weight.device)
        self.seen += [float(v.sum()) for v in (F.linear(x, weight), x @ weight.t(), weight[0], (weight - 1)[0])]


@case()
class ReducesLoss(Natural):
    """For a log, in place: the loss trains as it did."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.append(float(self.trainer.strategy.reduce(loss)))
        return loss
