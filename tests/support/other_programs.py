"""Directories as other programs write them: Lightning's Trainer and Fabric, OLMo-core, ColossalAI's Booster."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import Pipeline, ShardCkptIO, ShardedStrategy
from tests.support import tiny

State = dict[Any, Any]
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself on the CPU, by its exact type; and torch wants to be told the device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def cut(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


class Net(pl.LightningModule):
    """Odd sizes, a row that no two ranks can share, a buffer, two param groups, a scheduler.

    Cut by itself under ModelParallelStrategy, which asks for that.
    """

    def __init__(self, tied: bool = False, made_by: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=not self.hparams["tied"])
        self.row = nn.Parameter(torch.randn(1, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if self.hparams["tied"]:
            self.head.weight = self.embed.weight
        if self._trainer is not None and isinstance(self.trainer.strategy, ModelParallelStrategy):
            cut(self, self.device_mesh["data_parallel"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.row
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.seen += 1
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    kinds = [[p for n, p in named.items() if ("norm" in n) == norms] for norms in (False, True)]
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


class Counts(pl.Callback):  # has state of its own
    def __init__(self) -> None:
        self.state = {"batches": 0, "kinds": ("a", 1.5)}

    def on_train_batch_end(self, *args: Any) -> None:
        self.state["batches"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def _model_parallel() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=int(os.environ["LOCAL_WORLD_SIZE"]), tensor_parallel_size=1)


STRATEGIES: dict[str, Callable[[], Strategy | str]] = {
    "model parallel": _model_parallel,
    "fsdp": lambda: CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={Block}),
    "ours": lambda: ShardedStrategy(),
    "ours, tp": lambda: ShardedStrategy(tensor_parallel_size=2, tensor_parallel_plan=TP_PLAN),
    "ours, pp": lambda: ShardedStrategy(pipeline_parallel_size=2, pipeline=Pipeline(microbatches=1)),
    "ddp": lambda: "ddp",
    "auto": lambda: "auto",
}


def trainer(strategy: str, **options: Any) -> pl.Trainer:
    plugins = [] if strategy in ("model parallel", "fsdp") else [ShardCkptIO()]
    defaults = tiny.QUIET | {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "plugins": plugins}
    return pl.Trainer(strategy=STRATEGIES[strategy](), **(defaults | options))


def loader(*, shuffle: bool = True) -> DataLoader[Any]:  # shuffled as Lightning does in any case on several ranks
    tokens = torch.randint(0, 11, (32, 5), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=2, shuffle=shuffle)


def fit(strategy: str, steps: int, save: Any = None, resume: Any = None, model: Any = None, **options: Any) -> Any:
    """Train up to ``steps``; returns this rank's losses and all state at the end, whole."""
    # what Lightning says of a loader without state, and torch of FSDP's ways, under their own strategies
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    if strategy == "fsdp":
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
    pl.seed_everything(5 if resume else 1, verbose=False)
    module, counts = Net(**(model or {})), Counts()
    run = trainer(strategy, max_steps=steps, callbacks=[counts], **options)
    run.fit(module, loader(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    found = {"losses": module.losses, "step": run.global_step, "callback": counts.state}
    found["scheduler"] = run.lr_scheduler_configs[0].scheduler.state_dict()
    found["state"] = {} if strategy == "fsdp" else tiny.full_state(module, run.optimizers)
    return found


def make(directory: str) -> dict[str, Any]:
    """Checkpoints of step 2 of Lightning's strategies, and what these come to at step 4 when they resume from them."""
    found: dict[str, Any] = {}
    for name in ("model parallel", "fsdp"):
        path = f"{directory}/{name}.ckpt"
        found[name] = {"saved": fit(name, 2, path), "continued": fit(name, 4, resume=path)}
    found["tied"] = fit("model parallel", 2, f"{directory}/tied.ckpt", model={"tied": True})
    return found


def make_others(directory: str) -> None:
    """Fabric's and OLMo-core's layouts, all with the same state."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricModelParallelStrategy(cut_for_fabric))
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    module = Net()
    module.configure_model()
    module = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(optimizer_of(module))
    for (tokens,) in list(loader())[fabric.global_rank : 6 : 2]:
        fabric.backward(module(tokens).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(f"{directory}/fabric", {"net": module, "opt": optimizer, "step": 3, "notes": {"a": [1, "b"]}})
    inner, plain = module._forward_module, optimizer.optimizer
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=True)
        state = {
            "model": get_model_state_dict(inner, options=options),
            "optim": get_optimizer_state_dict(inner, plain, options=options),
        }
        dcp.save(state, checkpoint_id=f"{directory}/step3{'-flat' if flat else ''}/model_and_optim")
    dcp.save(state["model"], checkpoint_id=f"{directory}/bare")


def cut_for_fabric(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return cut(module, mesh["data_parallel"])


def judged(path: str) -> dict[str, Any]:
    """What Lightning itself reads out of a directory, with torch: whole tensors, by its keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is not distributed here
        return _load_distributed_checkpoint(Path(path))

# ── ColossalAI's Booster: names and blocks after colossalai/checkpoint_io/utils.py and general_checkpoint_io.py ──────


def write_booster(folder: Path, state: State, *, limit: float = 1024, prefix: str | None = None, safe: bool) -> None:
    """``save_model(shard=True)``: a new file begins where the next entry would exceed the limit, in MiB.

    The last file may be empty. ``prefix`` goes before the last suffix of every file name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    before = f".{prefix}" if prefix else ""
    blocks, sizes = [State()], [0.0]
    for key, value in state.items():
        size = value.numel() * value.element_size() / 1024 / 1024 if isinstance(value, Tensor) else 0.0
        if sizes[-1] + size > limit and sizes[-1] > 0:
            blocks.append({})
            sizes.append(0.0)
        blocks[-1][key] = value
        sizes[-1] += size
    names = [f"{stem}{before}-{number:05d}.{suffix}" for number, _ in enumerate(blocks, 1)]
    for name, block in zip(names, blocks, strict=True):
        if safe:
            safetensors.torch.save_file(block, folder / name, metadata={"format": "pt"})
        else:
            torch.save(block, folder / name)
    weight_map = {key: name for name, block in zip(names, blocks, strict=True) for key in block}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index{before}.json").write_text(json.dumps(index, indent=4))
