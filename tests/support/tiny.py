"""Small modules and runs that several tests share; imported in the ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import ShardCkptIO, ShardedStrategy
from lightning_shardckpt.system.host import TUNING, Tuning

EXECUTES = {"weights_only": False} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}
"""Options of ``fit`` for a file with classes in it; Lightning 2.5 has no such option, and reads them anyway."""
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
VOCABULARY = 37  # odd: no world size of the tests divides it
TP_PLAN = {
    "embed": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"
}

# ── optimizers that keep state of no parameter ──────────────────────────────────────────────────────────────────────


class Counts(SGD):  # as MADGRAD: a counter under a text in ``state``, on which the step depends
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        k = self.state.setdefault("k", torch.tensor([0]))  # type: ignore[call-overload]  # as MADGRAD does
        self.param_groups[0]["lr"] = 0.1 / (1 + k.item())
        loss = super().step(closure)
        k += 1
        return loss


class Wraps(SGD):  # as Lookahead: a state dict of another kind
    def state_dict(self) -> dict[str, Any]:
        return {"base_optimizer": super().state_dict(), "slow": {}}


KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (Counts, Wraps)}

# ── a model, and runs of it ─────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class TinyLM(pl.LightningModule):
    """Odd dims, a parameter with fewer rows than ranks, a 0-dim one, buffers of two dtypes, a frozen part."""

    def __init__(self, optimizer: str = "adamw", build_late: bool = False, frozen: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        if not build_late:
            self._build()

    def _build(self) -> None:
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.gate = nn.Parameter(torch.randn(2, 16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if self.hparams["frozen"]:
            self.blocks[0].up.requires_grad_(False)

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self._build()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale * torch.sigmoid(self.gate).sum(0))

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.seen += 1
        self.mean += 0.5
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-2},
        ]
        kinds: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2),
            "fused": lambda: torch.optim.AdamW(groups, lr=1e-2, fused=True),
            "amsgrad": lambda: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
            "sgd": lambda: torch.optim.SGD(groups, lr=1e-2),
            "adafactor": lambda: torch.optim.Adafactor(groups, lr=1e-2),
            "momentum": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        }
        name = self.hparams["optimizer"]
        optimizer = kinds[name]() if name in kinds else KINDS[name](groups, lr=1e-2, momentum=0.9)  # type: ignore[call-arg]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(
    batch_size: int = 2, count: int = 48, workers: int = 0, shuffle: bool = True, **more: Any
) -> DataLoader[Any]:
    tokens = torch.randint(0, VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=shuffle, num_workers=workers, **more)


def trainer(strategy: Mapping[str, Any] | str, tuning: Tuning = TUNING, **options: Any) -> pl.Trainer:
    """A quiet CPU Trainer over all ranks.

    ``strategy``: arguments of ShardedStrategy, which gets the ``tuning``, or a name of Lightning's.
    """
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    defaults = QUIET | {"devices": devices, "log_every_n_steps": 1, "plugins": [ShardCkptIO()]}
    chosen = strategy if isinstance(strategy, str) else ShardedStrategy(**strategy)
    if isinstance(chosen, ShardedStrategy):
        chosen.tuning = tuning
    return pl.Trainer(strategy=chosen, **(defaults | options))


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered by torch: the oracle."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def full_state(module: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    """Weights and optimizer state by FQN, whole."""
    names = {id(p): n for n, p in module.named_parameters()}
    tensors = {n: t for n, t in module.state_dict().items() if isinstance(t, Tensor)}  # without extra state
    found: dict[str, Any] = {f"model/{n}": whole(t) for n, t in tensors.items()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = f"{number}/{names[id(parameter)]}"
                found |= {f"{name}/{k}": v for k, v in group.items() if k not in ("params", "param_names")}
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{name}/state/{key}"] = whole(value) if isinstance(value, Tensor) else value
    return found


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Keys under which two states differ, bit for bit."""
    return sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or not same(a[k], b[k]))


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)


class SaveAt(pl.Callback):  # saves when a step is done, in the middle of training
    def __init__(self, step: int, path: str) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


def train(
    module: pl.LightningModule,
    strategy: Mapping[str, Any] | str,
    steps: int,
    *,
    save: str | None = None,
    resume: str | None = None,
    data: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train up to ``steps`` without validation, then save to ``save``."""
    run = trainer(strategy, **{"max_steps": steps, "limit_val_batches": 0, **options})
    run.fit(module, data or loader(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return run


def fit(
    strategy: Mapping[str, Any] | str,
    steps: int,
    *,
    seed: int = 1,
    model: Mapping[str, Any] | None = None,
    kind: type[TinyLM] = TinyLM,
    data: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """As `train`, after seeding all; returns this rank's losses and the whole state at the end."""
    pl.seed_everything(seed)
    run = train(module := kind(**(model or {})), strategy, steps, data=loader(**(data or {})), **options)
    return {
        "losses": module.losses,
        "state": full_state(module, run.optimizers),
        "step": run.global_step,
        "lr": [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups],
    }
