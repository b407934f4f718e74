"""More kinds of models: experts, flows, operators, graphs, hypernetworks, losses with weights, packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.sweeps.twins.base import CLASSES, WIDTH, Natural, Net, case


@case()
class RoutesInOneTensor(Natural):
    """Weights of all experts in one 3-D parameter, and ``bmm``."""

    def build(self) -> None:
        super().build()
        self.up = nn.Parameter(torch.randn(3, WIDTH, 6) / 3)
        self.down = nn.Parameter(torch.randn(3, 6, WIDTH) / 3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.features(batch[0])
        every = torch.bmm(F.silu(torch.bmm(x.expand(3, -1, -1), self.up)), self.down)
        chosen = batch[3][:, 0] % 3
        single = torch.einsum("bi,bio->bo", x, self.up[chosen] @ self.down[chosen])
        picked = every[chosen, torch.arange(len(x))]
        return F.cross_entropy(self.net.head(picked + single), batch[1])


@case()
class Packed(Natural):
    """Sequences of several lengths, packed; the last state of each."""

    def build(self) -> None:
        self.embed = nn.Embedding(7, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, proj_size=4)
        self.gru = nn.GRU(4, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        lengths = 1 + batch[3][:, 0] % 4
        packed = pack_padded_sequence(self.embed(batch[3]), lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        _, h = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return F.cross_entropy(self.head(torch.cat([h[0], h[1]], 1)), batch[1])


@case()
class Bags(Natural):
    """``EmbeddingBag`` with weights of samples and offsets, one-hot products."""

    def build(self) -> None:
        self.bag = nn.EmbeddingBag(7, WIDTH, mode="sum", include_last_offset=False)
        self.mean = nn.EmbeddingBag(7, WIDTH, mode="mean", padding_idx=1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = batch[3]
        x = self.bag(tokens, per_sample_weights=batch[0][:, :4].sigmoid()) + self.mean(tokens)
        starts, weights = torch.arange(0, tokens.numel(), 4, device=tokens.device), batch[2][:, :4].flatten()
        flat = self.bag(tokens.flatten(), starts, per_sample_weights=weights)
        hot = F.one_hot(tokens[:, 0], 7).to(x) @ self.bag.weight
        return F.cross_entropy(self.head(x + flat + hot), batch[1])


class FourierLayer(nn.Module):
    """As in Fourier neural operators: complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128) / 3)
        self.unused = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))
        self.skip = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[:, :4] = spectrum[:, :4] * self.weight.sum(0)
        return torch.fft.irfft(out, n=6) + self.skip(x)


@case(gradient_clip_val=0.5)
class Spectral(Natural):
    def build(self) -> None:
        self.operator, self.net = FourierLayer(), Net()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(self.operator(batch[0])), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(self.operator.weight.grad.abs().norm()))
        self.seen.append(float(self.operator.weight.detach().norm()))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2, eps=1e-3)


@case()
class SpectralOnce(Spectral):
    """Complex weights that only some steps use."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index % 2:
            return self.loss(batch) + self.operator.unused.abs().square().sum()
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(sum(p.grad is None for p in self.parameters())))


@case()
class KeepsComplexPartsNegative(Natural):
    """Poles of a filter, by their parts, conjugates and angles; an odd number of them."""

    def build(self) -> None:
        super().build()
        self.poles = nn.Parameter(torch.randn(5, dtype=torch.cdouble))

    def loss(self, batch: list[Tensor]) -> Tensor:
        p = self.poles
        return super().loss(batch) + (p * p.conj()).real.sum() + p.imag.sum() + 0.1 * p.angle().sum()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.poles.real.clamp_(max=-0.1)
            self.seen.append(float(self.poles.real.sum()))
