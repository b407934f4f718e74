"""Kinds of models: recurrent, convolutional, attention, contrastive, diffusion, codebooks, reparametrized."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from tests.sweeps.twins.base import BATCH, CLASSES, COMPILED, COMPUTED_WEIGHTS, WIDTH, Block, Natural, Net, dataset


class Recurrent(Natural):  # speech-like: LSTM, GRU, cells in a loop
    def build(self) -> None:
        self.embed = nn.Embedding(7, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.gru(self.lstm(self.embed(batch[3]))[0])[0]
        h = c = x.new_zeros(len(x), WIDTH)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return F.cross_entropy(self.head(h), batch[1])


class Attentive(Natural):  # torch's transformer layers, in training and, on their fast path, in evaluation
    def build(self) -> None:
        self.embed = nn.Embedding(7, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.encoder(self.embed(batch[3]))
        x = self.pool(self.query.expand(len(x), -1, -1), x, x)[0][:, 0]
        return F.cross_entropy(self.head(x), batch[1])

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        self.eval()
        self.seen.append(float(self.encoder(self.embed(torch.arange(7, device=batch[3].device)[None])).sum()))
        self.train()


# ── recomputation ───────────────────────────────────────────────────────────────────────────────────────────────────


class ByLayers(Natural, abstract=True):  # passes through the layers in its own way
    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.pass_through(self.net.layers, self.net.embed(batch[0]))
        return F.cross_entropy(self.net.head(self.net.norm(x) * self.net.scale), batch[1])


class Recomputed(ByLayers):
    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        x = checkpoint(layers[0], x, use_reentrant=False)
        return checkpoint(layers[1], x, use_reentrant=True)


class RecomputesSeveralLayers(ByLayers):  # one checkpoint around two layers
    def build(self) -> None:
        super().build()
        self.net.layers = nn.Sequential(*(Block() for _ in range(4)))

    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        return checkpoint_sequential(layers, 2, x, use_reentrant=False)


class RecomputesSelectively(ByLayers):  # products of matrices are kept, and taken in their order
    def pass_through(self, layers: Any, x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=kept)
        return x


class Decay(nn.Module):  # multiplies by functions of parameters alone, as states of Mamba decay
    def __init__(self) -> None:
        super().__init__()
        self.log, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * -torch.exp(self.log) + x**2 * torch.sigmoid(self.shift)[0])


class RecomputesFunctionsOfParameters(Natural):
    class Layer(nn.Module):  # checkpoints inside its forward, as layers of transformers do
        def __init__(self) -> None:
            super().__init__()
            self.first, self.decay = nn.Linear(WIDTH, WIDTH), Decay()

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.decay.forward, self.first(x), use_reentrant=False)


# ── several views, several networks ─────────────────────────────────────────────────────────────────────────────────


class Asking(nn.Linear):
    """Converts what it gets to its own dtype, as modules of transformers and of diffusion models do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float().to(next(self.parameters()).dtype))


class AsksForParameters(Natural):
    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / sum(1 for _ in self.parameters())

    def build(self) -> None:
        super().build()
        self.net.embed = Asking(6, WIDTH)


class MixesWithTheFlipped(Natural):  # mixup as timm has it: each sample with one from the other end of the batch
    def loss(self, batch: list[Tensor]) -> Tensor:
        out = self.net(0.7 * batch[0] + 0.3 * batch[0].flip(0))
        return 0.7 * F.cross_entropy(out, batch[1]) + 0.3 * F.cross_entropy(out, batch[1].flip(0))

    def train_dataloader(self) -> DataLoader[Any]:
        """Each rank has all samples: a sample's partner may be on another rank."""
        return DataLoader(dataset(), batch_size=BATCH)


class SimSiam(Natural):
    def build(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.predictor = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: list[Tensor]) -> Tensor:
        z1, z2 = self.encoder(batch[0]), self.encoder(batch[2])
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2


class MomentumContrast(Natural):  # MoCo: a slow encoder, a queue of its outputs
    def build(self) -> None:
        self.query, self.key = Net(classes=4), Net(classes=4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 32), dim=0))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def remembered(self, batch: list[Tensor]) -> Tensor:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return F.normalize(self.key(batch[2]), dim=1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        k, q = self.remembered(batch), F.normalize(self.query(batch[0]), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        with torch.no_grad():  # in the order that one process has
            every = self.all_gather(k)
            every = every.transpose(0, 1).reshape(-1, 4) if every.ndim == 3 else every
            self.queue[:, int(self.pointer) : int(self.pointer) + len(every)] = every.t()
            self.pointer.copy_((self.pointer + len(every)) % 32)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w - w.mean(0)


class Reparametrized(Natural, refused=COMPUTED_WEIGHTS):  # weight and spectral norm, orthogonal matrices
    lr, momentum = 0.05, 0.0

    def build(self) -> None:
        super().build()
        parametrizations.weight_norm(self.net.embed)
        parametrizations.spectral_norm(self.net.layers[0].a)
        parametrizations.orthogonal(self.net.layers[1].b)
        parametrize.register_parametrization(self.net.head, "weight", Symmetric())


class ReparametrizedByHooks(Natural, refused=COMPUTED_WEIGHTS):
    def build(self) -> None:
        super().build()
        torch.nn.utils.spectral_norm(self.net.layers[0].b)
        torch.nn.utils.spectral_norm(self.net.head)


class ListsOfParameters(Natural):
    def build(self) -> None:
        super().build()
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.tensor(0.5))])
        self.tables = nn.ParameterDict({"a": torch.randn(3, WIDTH), "empty": torch.zeros(0, 4)})
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.net.features(batch[0]) * self.gates[0] + self.gates[1] * self.tables["a"][batch[1] % 3]
        return F.cross_entropy(self.bilinear(x, x) + self.tables["empty"].sum(), batch[1])


class UnusedAtTimes(Natural):  # parts that some steps do not use: their parameters must not decay
    def build(self) -> None:
        super().build()
        self.extra = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.never = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.net.features(batch[0])
        return F.cross_entropy(self.net.head(x) + self.extra[index % 2](x), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(sum(p.grad is None for p in self.parameters())))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-3, weight_decay=0.5)


class Embeds(Natural, abstract=True):
    options: dict[str, Any]

    def build(self) -> None:
        self.net, self.head = nn.Embedding(7, WIDTH, **self.options), nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.net(batch[3]).mean(1)), batch[1])


class RescalesRows(Embeds, refused={"hsdp": "the forward of net writes a tensor of shape (7, 8) into a sharded one"}):
    """An embedding whose forward changes its weight, in the rows that the rank's batch has."""

    options = {"max_norm": 0.5}  # noqa: RUF012


class SparseGradients(
    Embeds, refused=dict.fromkeys(("fsdp2", "replicas", "hsdp"), "is sparse. Make the module without sparse=True")
):
    options, momentum = {"sparse": True}, 0.0


class CompiledLayers(Natural, refused=COMPILED):
    def build(self) -> None:
        super().build()
        for layer in self.net.layers:
            layer.compile(backend="aot_eager")


class CompiledNet(Natural, refused=COMPILED):
    def build(self) -> None:
        super().build()
        self.net = torch.compile(self.net, backend="aot_eager")


class CompiledHead(Natural):  # compiled in a part of a unit, and under another name
    def build(self) -> None:
        super().build()
        self.net.head = torch.compile(self.net.head, backend="aot_eager")


class Straight(torch.autograd.Function):  # passes a gradient on to what it got, and none to the scale
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class UsesOneOfTwo(Natural):  # a layer's second output, and a parameter, whose gradients autograd leaves undefined
    class Pair(nn.Linear):  # its outputs come from one node of autograd, as those of an LSTM do on a GPU
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return super().forward(x).tanh().chunk(2, -1)

    def build(self) -> None:
        super().build()
        self.pair, self.head = self.Pair(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))

    def loss(self, batch: list[Tensor]) -> Tensor:
        used, _ = self.pair(self.net.features(batch[0]))
        return F.cross_entropy(self.head(Straight.apply(used, self.scale)), batch[1])
