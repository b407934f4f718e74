"""Models, LightningModules and data for the pipeline tests, and their twin: plain torch, one process, whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.support.nets import LENGTH, VOCABULARY, Block, Net, llama, optimizer_of

WIDTH, PATIENCE = 12, 2
SHORT = (12,) * 4
RAGGED = (12, 8, 12, 5, 3, 2, 1)  # the default number of microbatches is 4
VALIDATION = (12, 8, 6)

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Deep(Net):
    """Five blocks: two stages per rank, or four ranks, are uneven."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(5))


class Recomputed(Net):
    """The user's own gradient checkpointing around each block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(self.norm(x)) * self.temperature


class Feedforward(nn.Module):
    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Adapted(nn.Module):
    """Registers its head before the layers, and uses one module with parameters between all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Feedforward() for _ in range(4))
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(self.adapter(layer(x))) + x
        return self.head(x)


class Conditional(Feedforward):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * condition)


class Conditioned(nn.Module):
    """Every layer takes something that the first stage computes from parameters, beside the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.condition = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({name: Conditional() for name in ("first", "second", "third")})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, condition = self.embed(tokens), self.condition(tokens[:, :1])
        for layer in self.layers.values():
            x = layer(x, condition=condition)
        return self.head(x)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "tied net": lambda: Net(tied=True),
    "tied deep net": lambda: Deep(tied=True),
    "recomputed": Recomputed,
    "adapted": Adapted,
    "conditioned": Conditioned,
    "tied llama": lambda: llama(num_hidden_layers=3, tie_word_embeddings=True),
}

# ── data and losses ─────────────────────────────────────────────────────────────────────────────────────────────────


class Answer(NamedTuple):
    loss: Tensor
    logits: Tensor
    targets: Tensor


def next_token(net: nn.Module, batch: list[Tensor]) -> Answer:
    """Targets of -100 don't count: with them it is no mean of the samples' means."""
    tokens, targets = batch
    output = net(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    return Answer(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits, targets)


def token_rows(count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    for tokens in torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator):
        yield tokens[:-1], tokens[1:]


def masked_rows(count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    for tokens, targets in token_rows(count, generator):
        hidden = torch.rand(LENGTH, generator=generator) < 0.5
        hidden[0] = False  # a batch of one sample has a target
        yield tokens, targets.masked_fill(hidden, -100)


class Task(NamedTuple):
    rows: Callable[[int, torch.Generator], Iterator[Any]]
    answer: Callable[[nn.Module, Any], Answer]


TASKS = {
    "tokens": Task(token_rows, next_token),
    "masked": Task(masked_rows, next_token),
}

# ── one way to train ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """One way to train; ``strategy`` must not change the numbers: the twin doesn't read it."""

    net: str = "net"
    task: str = "tokens"
    module: str = "Pipe"
    late: bool = False
    clip: float | None = None
    accumulate: int = 1
    sizes: tuple[int, ...] = SHORT
    epochs: int = 1
    scheduler: str | None = None
    strategy: tuple[tuple[str, Any], ...] = ()

    def batches(self, sizes: tuple[int, ...], part: int = 0, parts: int = 1, seed: int = 1) -> list[Any]:
        """Batches of ``sizes``; of each, the rows ``part``, ``part + parts``, …"""
        task = TASKS[self.task]
        rows = iter(task.rows(sum(sizes), torch.Generator().manual_seed(seed)))
        return [default_collate([next(rows) for _ in range(size)][part::parts]) for size in sizes]


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    if case.scheduler == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


# ── LightningModules ────────────────────────────────────────────────────────────────────────────────────────────────


class Pipe(pl.LightningModule):
    """An ordinary module; what its steps returned is noted in a hook, which is never split into stages."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.returned = case, []
        if not case.late:
            self.net = BUILDERS[case.net]()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = BUILDERS[self.case.net]()

    def answer(self, batch: Any) -> Answer:
        return TASKS[self.case.task].answer(self.net, batch)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.answer(batch).loss
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.answer(batch).loss, sync_dist=True, batch_size=len(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.returned.append(outputs)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        if self.case.scheduler is None:
            return optimizer
        schedule = {"scheduler": schedule_of(self.case, optimizer), "monitor": "val"}
        interval = "epoch" if self.case.scheduler == "plateau" else "step"
        return {"optimizer": optimizer, "lr_scheduler": schedule | {"interval": interval}}

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.case.sizes, 1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(VALIDATION, 2)

    test_dataloader = predict_dataloader = val_dataloader

    def _loader(self, sizes: tuple[int, ...], seed: int) -> DataLoader[Any]:
        """Rank r of n gets rows r, r + n, … of each batch that the twin has."""
        place = self.trainer.strategy.distributed_sampler_kwargs
        batches = self.case.batches(sizes, place["rank"], place["num_replicas"], seed)
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


class Answering(Pipe):
    """Its step returns more than the loss."""

    def training_step(self, batch: Any, index: int) -> Any:
        answer = self.answer(batch)
        self.log("train", answer.loss, on_step=False, on_epoch=True, sync_dist=True)
        right = (answer.logits.argmax(-1) == answer.targets).sum()
        return {"loss": answer.loss, "logits": answer.logits.detach(), "right": right, "note": f"step {index}"}


class Counting(Pipe):
    """Counts its steps in a buffer."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen += 1
        return super().training_step(batch, index)


def accuracy(top_k: int = 1) -> MulticlassAccuracy:
    return MulticlassAccuracy(VOCABULARY, top_k=top_k, average="micro")


class Measured(Pipe):
    """Logs in all the ways there are, and has every stage of the Trainer."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.train_right, self.val_right = accuracy(), accuracy()
        self.val_loss = MeanMetric()
        self.scores = MetricCollection({"top1": accuracy(), "top3": accuracy(3)}, prefix="val_")
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss, logits, targets = self.answer(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("rows", float(len(logits)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.train_right(logits.flatten(0, 1), targets.flatten())
        self.log("right", self.train_right, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss, logits, targets = self.answer(batch)
        self.outputs.append(loss)
        self.val_loss.update(loss, len(logits))
        self.log("val_loss", self.val_loss)
        self.val_right.update(logits.flatten(0, 1), targets.flatten())
        self.log("val_right", self.val_right, on_step=False, on_epoch=True)
        self.scores.update(logits.flatten(0, 1), targets.flatten())
        self.log_dict(self.scores)

    def on_validation_epoch_end(self) -> None:
        self.log("val_stacked", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()

    def on_train_epoch_end(self) -> None:
        self.log("steps", float(self.global_step), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.answer(batch).loss, sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.answer(batch).logits


class Deciding(Pipe):
    """Callbacks that act on what was logged."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EarlyStopping("val", patience=PATIENCE), ModelCheckpoint("saved", monitor="val", filename="{epoch}")]


MODULES: dict[str, type[Pipe]] = {
    kind.__name__: kind for kind in (Pipe, Answering, Counting, Measured, Deciding)
}

# ── the twin ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Trained:
    """What one rank, or the twin, saw.

    Attributes:
        returned: per step, what training_step returned, as on_train_batch_end gets it.
        rates: the learning rates at the end.
        held: names of the parameters that this rank has.
        numel: elements of parameters in this rank's memory.
        more: what only some modules have.
    """

    returned: list[dict[str, Any]]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    metrics: dict[str, float]
    rates: list[float]
    held: list[str] = field(default_factory=list)
    numel: int = 0
    more: dict[str, Any] = field(default_factory=dict)


class Twin:
    """Trains a case in plain torch: one process, whole batches, nothing of Lightning or of this package.

    ``parts``: into how many parts data parallelism splits a batch; the loss is the mean of the parts' losses, which is
    another one if it is no mean over samples.
    """

    def __init__(self, case: Case, parts: int = 1) -> None:
        self._case, self._parts = case, parts
        pl.seed_everything(3, verbose=False)
        # Weights of a late case are drawn in the precision of the training, as under Lightning.
        torch.set_default_dtype(torch.float64 if case.late else torch.float32)
        net = BUILDERS[case.net]()
        torch.set_default_dtype(torch.float32)
        self._root = nn.ModuleDict({"net": net}).double()
        self._optimizer = optimizer_of(self._root)
        self._schedule = schedule_of(case, self._optimizer) if case.scheduler else None
        self._answers: list[Answer] = []

    def train(self) -> Trained:
        case = self._case
        first = {name: value.clone() for name, value in self._root.state_dict().items()}
        vals: list[float] = []
        while len(vals) < case.epochs and not (case.module == "Deciding" and stops(vals)):
            self._epoch()
            validated = self._evaluate()
            vals.append(mean_over_samples(validated))
            if case.scheduler == "plateau":
                self._schedule.step(vals[-1])
        metrics = {"train": mean_over_samples(self._answers[-len(case.sizes) :]), "val": vals[-1]}
        more: dict[str, Any] = {"vals": vals}
        if case.module == "Measured":
            metrics = measurements(self._answers, validated, self._parts)
            more = {"test": mean_over_samples(validated), "predictions": [answer.logits for answer in validated]}
        returned = [{"loss": a.loss / case.accumulate, "logits": a.logits, "targets": a.targets} for a in self._answers]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        last = dict(self._root.state_dict())
        if case.module == "Counting":
            first["seen"], last["seen"] = torch.tensor(0), torch.tensor(len(self._answers))
        return Trained(returned, first, last, metrics, rates, more=more)

    def _epoch(self) -> None:
        case = self._case
        for step, batch in enumerate(self._batches(case.sizes, 1), 1):
            answer = self._answer(batch)
            (answer.loss / case.accumulate).backward()
            self._answers.append(Answer(*(value.detach() for value in answer)))
            if step % case.accumulate and step < len(case.sizes):
                continue
            if case.clip is not None:
                nn.utils.clip_grad_norm_(self._root.parameters(), case.clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if case.scheduler == "step":
                self._schedule.step()

    @torch.no_grad()
    def _evaluate(self) -> list[Answer]:
        self._root.eval()
        answers = [self._answer(batch) for batch in self._batches(VALIDATION, 2)]
        self._root.train()
        return answers

    def _batches(self, sizes: tuple[int, ...], seed: int) -> Iterator[tuple[Any, ...]]:
        parts = [self._case.batches(sizes, part, self._parts, seed) for part in range(self._parts)]
        return zip(*parts, strict=True)

    def _answer(self, batch: tuple[Any, ...]) -> Answer:
        answers = [TASKS[self._case.task].answer(self._root["net"], part) for part in batch]
        loss = torch.stack([answer.loss for answer in answers]).mean()
        return Answer(loss, *(torch.cat([answer[i] for answer in answers]) for i in (1, 2)))


def mean_over_samples(answers: list[Answer]) -> float:
    return sum(a.loss.item() * len(a.logits) for a in answers) / sum(len(a.logits) for a in answers)


def stops(vals: list[float]) -> bool:
    """Whether EarlyStopping ends the training: the best epoch is followed by ``PATIENCE`` others."""
    return len(vals) - 1 - min(range(len(vals)), key=vals.__getitem__, default=-1) >= PATIENCE


def measurements(trained: list[Answer], validated: list[Answer], parts: int) -> dict[str, float]:
    """What `Measured` logs. A metric's value of one step is each rank's own, so it is left out of several parts."""
    found = {
        "loss": mean_over_samples(trained),
        "loss_step": trained[-1].loss.item(),
        "loss_epoch": mean_over_samples(trained),
        "largest": max(a.logits.max().item() for a in trained),
        "rows": float(sum(len(a.logits) for a in trained)),
        "right_epoch": share_of_right(trained),
        "steps": float(len(trained)),
        "val_loss": mean_over_samples(validated),
        "val_right": share_of_right(validated),
        "val_top1": share_of_right(validated),
        "val_top3": share_of_right(validated, 3),
        "val_stacked": torch.stack([a.loss for a in validated]).mean().item(),
    }
    return found if parts > 1 else found | {"right_step": share_of_right(trained[-1:])}


def share_of_right(answers: list[Answer], top_k: int = 1) -> float:
    """In float32, as torchmetrics counts."""
    hits = [(a.logits.topk(top_k).indices == a.targets.unsqueeze(-1)).any(-1).flatten() for a in answers]
    return torch.cat(hits).float().mean().item()
