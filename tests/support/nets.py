"""Small models, their training under ShardedStrategy, and their twin: the same in plain torch, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shardckpt.pytorch import ShardedStrategy
from tests.support.tiny import QUIET

VOCABULARY, LENGTH, GLOBAL_BATCH, STEPS = 23, 5, 12, 4
TOLERANCE = 1e-12  # sums of float64 in another order


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 3)).transpose(1, 2) for f in self.qkv)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 26), nn.Linear(26, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Net(nn.Module):  # a transformer with odd sizes, a direct and a 0-dim parameter and a frozen one
    def __init__(self, tied: bool = False, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature


PLAN: dict[str, Any] = {
    "net.embed": "embedding_rowwise",
    "net.blocks.*.attention.qkv.*": "colwise",
    "net.blocks.*.attention.out": "rowwise",
    "net.blocks.*.up": "colwise",
    "net.blocks.*.down": "rowwise",
    "net.head": "colwise_gather_output",
}


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_HF, **options}))


def qwen3(**options: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_HF, head_dim=4, **options))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_HF | {"intermediate_size": 16, "num_local_experts": 4}))


def lora(net: nn.Module | None = None, **options: Any) -> nn.Module:
    """A small Llama, or another model, with adapters in layers that are sharded by columns, by rows and not at all."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM", **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # advice on merging
        return get_peft_model(net or llama(), config)


_HF: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 18, "num_hidden_layers": 2}
_HF |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8}

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "tied net": lambda: Net(tied=True),
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "qwen3": qwen3,
    "mixtral": mixtral,
    "lora": lambda: lora(modules_to_save=["lm_head", "norm"]),
    "lora embedding": lambda: lora(
        llama(tie_word_embeddings=True), target_modules=["embed_tokens", "up_proj", "down_proj"], lora_dropout=0.2
    ),
    "dora": lambda: lora(use_dora=True),
}


@dataclass(frozen=True)
class Case:  # one way to train; the fields that change the numbers are those that `twin` reads, too
    net: str = "net"
    late: bool = False
    clip: float | None = None
    accumulate: int = 1
    strategy: tuple[tuple[str, Any], ...] = ()


@dataclass
class Trained:
    losses: list[float]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    metrics: dict[str, float]


def loss_of(net: nn.Module, batch: list[Tensor]) -> Tensor:
    output = net(batch[0])
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Module(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.losses = case, []
        if not case.late:
            self.net = BUILDERS[case.net]()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = BUILDERS[self.case.net]()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Rank r of n gets rows r, r + n, … of the rows that the twin has in one batch."""
        place = self.trainer.strategy.distributed_sampler_kwargs
        sampler: DistributedSampler[Any] = DistributedSampler(dataset(), shuffle=False, **place)
        return DataLoader(dataset(), batch_size=GLOBAL_BATCH // place["num_replicas"], sampler=sampler)

    val_dataloader = train_dataloader


def dataset() -> TensorDataset:
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH * STEPS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # A large eps: AdamW divides by the square root of gradients that are zero but for rounding.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Collective: every rank must call it."""
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in module.state_dict().items()}


def trainer_for(strategy: Any, devices: int, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 1, "precision": "64-true", "use_distributed_sampler": False} | options
    return pl.Trainer(devices=devices, strategy=strategy, **QUIET, **options)


def twin(case: Case) -> Trained:
    """Train in plain torch. Weights of a late case are drawn in float64, as Lightning's 64-true does then."""
    pl.seed_everything(3, verbose=False)
    torch.set_default_dtype(torch.float64 if case.late else torch.float32)
    net = BUILDERS[case.net]()
    torch.set_default_dtype(torch.float32)
    net = nn.ModuleDict({"net": net}).double()
    first = {k: v.clone() for k, v in net.state_dict().items()}
    optimizer = optimizer_of(net)
    losses = []
    for step, batch in enumerate(batches(), 1):
        loss = loss_of(net["net"], batch)
        (loss / case.accumulate).backward()
        losses.append(loss.item())
        if step % case.accumulate == 0:
            if case.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        val = sum(loss_of(net["net"], batch).item() for batch in batches()) / STEPS
    return Trained(losses, first, dict(net.state_dict()), {"train": sum(losses) / STEPS, "val": val})


def batches() -> Iterator[list[Tensor]]:
    yield from DataLoader(dataset(), GLOBAL_BATCH)


def train(case: Case, sizes: dict[str, Any]) -> Trained:
    """Collective: every rank must call it."""

    # Only rank 0 has the right seed for weights that are built early: they must come from it.
    pl.seed_everything(3 if case.late or dist.get_rank() == 0 else 99, verbose=False)
    plan: Any = PLAN if "net" in case.net else "auto"
    strategy = ShardedStrategy(**{"tensor_parallel_plan": plan, **sizes, **dict(case.strategy)})
    options = {"gradient_clip_val": case.clip, "accumulate_grad_batches": case.accumulate}
    trainer = trainer_for(strategy, dist.get_world_size(), **options)
    module, first = Module(case), []

    def on_train_start() -> None:
        first.append(full_state(module))

    module.on_train_start = on_train_start
    trainer.fit(module)
    losses = [strategy.reduce(loss).item() for loss in module.losses]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Trained(losses, first[0], full_state(module), metrics)


def train_all(cases: list[Case], sizes: dict[str, Any]) -> list[Trained]:
    return [train(case, sizes) for case in cases]


def twins(cases: list[Case]) -> list[Trained]:
    return [twin(case) for case in cases]
