"""Section training: optimizer steps and tokens per second, beside Lightning's strategies and plain torch.

The same model, data and AdamW everywhere; tiny, so that hardly anything but the cost of the machinery is left, and of a
size at which layers take most of the time. A way counts only if its first losses are those of one process.
"""

from __future__ import annotations

import gc
import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from turns import MB, Facts, Row, case, chosen, device, now, on_ranks, take_turns

from lightning_shardckpt import ShardedStrategy

OURS = "ours"
_BYTES = 256
_MILLI = 1e3
_FLOPS_OF_A_WEIGHT = 6  # for each token: two forward, four backward
_CHECKED = 3  # steps
_TOLERANCE = 1e-4  # of losses in float32, whose sums have another order
_ROUNDED = 2e-2  # the same in bf16
_MICROBATCHES = 4  # as ours on two stages


@dataclass(frozen=True)
class Size:
    """A model, a batch, and how many steps are timed after those that are not."""

    name: str
    layers: int
    width: int
    samples: int
    length: int
    warm: int
    steps: int

    @property
    def weights(self) -> int:
        """Of matrices: each token is multiplied by each of them."""
        return 8 * self.layers * self.width**2 + _BYTES * self.width


SIZES = [Size("tiny", 4, 32, 8, 16, warm=5, steps=30), Size("mid", 8, 512, 8, 32, warm=3, steps=4)]
LARGE = Size("large", 6, 2048, 16, 512, warm=3, steps=6)  # of GPUs: 0.2 billion parameters


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Half of what a transformer's layer is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Predicts bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size

    def configure_model(self) -> None:
        torch.manual_seed(0)
        with torch.device("cpu"):  # one process of Lightning's draws values on its GPU, sharded strategies don't
            self.embed = nn.Embedding(_BYTES, self.size.width)
            self.layers = nn.ModuleList(Block(self.size.width) for _ in range(self.size.layers))
            self.head = nn.Linear(self.size.width, _BYTES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return loss_of(self(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class SplitByHand(Net):
    """What ``ModelParallelStrategy`` asks of a module."""

    def configure_model(self) -> None:
        super().configure_model()
        if self.device_mesh["tensor_parallel"].size() > 1:
            parallelize_module(self, self.device_mesh["tensor_parallel"], _styles())
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Stage(nn.Module):
    """Half of a ``Net``."""

    def __init__(self, net: Net, index: int) -> None:
        super().__init__()
        half = len(net.layers) // 2
        self.layers = nn.ModuleList(net.layers[:half] if index == 0 else net.layers[half:])
        self.before, self.after = (net.embed, nn.Identity()) if index == 0 else (nn.Identity(), net.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def _styles() -> dict[str, Any]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def loss_of(logits: Tensor, x: Tensor) -> Tensor:
    """The loss of one batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def batches(size: Size, steps: int, ranks: int) -> DataLoader[tuple[Tensor, ...]]:
    """The batches of this rank, where so many ranks share each of them."""
    shape = (steps, ranks, size.samples // ranks, size.length)
    tokens = torch.randint(_BYTES, shape, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens[:, dist.get_rank() % ranks].flatten(0, 1)), shape[2])


# ── ways to train ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Steps:
    """The time at the end of each step, and its loss on this rank, if this rank knows it."""

    ends: list[float]
    losses: list[Tensor | None]


class Watch(pl.Callback):
    """Notes what the ``Trainer`` does."""

    def __init__(self) -> None:
        self.steps = Steps([], [])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.steps.ends.append(now())
        self.steps.losses.append(outputs["loss"])


Train = Callable[[Size, int], Steps]


def with_trainer(
    strategy: Callable[[], Any], module: Callable[[Size], Net] = Net, ranks: int = 1, precision: Any = "32-true"
) -> Train:
    """``Trainer.fit`` with a strategy; ``ranks`` share a batch."""

    def train(size: Size, steps: int) -> Steps:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        watch = Watch()
        trainer = pl.Trainer(
            accelerator=device().type,
            devices=dist.get_world_size(),
            strategy=strategy(),
            precision=precision,
            callbacks=[watch],
            max_steps=steps,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module(size), batches(size, steps, ranks))
        return watch.steps

    return train


def loop(net: nn.Module, step: Callable[[Tensor], Tensor | None], data: Iterable[tuple[Tensor, ...]]) -> Steps:
    """A training loop of four lines."""
    found, optimizer = Steps([], []), torch.optim.AdamW(net.parameters(), lr=1e-4)
    for (x,) in data:
        optimizer.zero_grad()
        found.losses.append(step(x.to(device())))
        optimizer.step()
        found.ends.append(now())
    return found


def whole_net(size: Size) -> Net:
    """A ``Net`` on this process alone."""
    net = Net(size)
    net.configure_model()
    return net.to(device())


def on_one_process(size: Size, steps: int) -> Steps:
    """A plain loop; each rank runs it for itself."""
    return loop(net := whole_net(size), lambda x: _back(net, x), batches(size, steps, 1))


def fsdp_by_hand(size: Size, steps: int) -> Steps:
    """``fully_shard`` and a plain loop; two ranks share a batch."""
    net, mesh = whole_net(size), init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return loop(net, lambda x: _back(net, x), batches(size, steps, dist.get_world_size()))


def _fsdp1() -> FSDPStrategy:
    return FSDPStrategy(auto_wrap_policy={Block})  # of torch's first FSDP, which has no kernels for CPUs


def tensor_parallel_by_hand(size: Size, steps: int) -> Steps:
    """torch's styles and a plain loop."""
    net = whole_net(size)
    parallelize_module(net, init_device_mesh(device().type, (dist.get_world_size(),)), _styles())
    return loop(net, lambda x: _back(net, x), batches(size, steps, 1))


def pipeline_by_hand(size: Size, steps: int) -> Steps:
    """torch's schedule and a plain loop."""
    rank, count = dist.get_rank(), dist.get_world_size()
    module = Stage(whole_net(size), rank)
    schedule = ScheduleGPipe(PipelineStage(module, rank, count, device()), _MICROBATCHES, loss_fn=loss_of)

    def step(x: Tensor) -> Tensor | None:
        if rank == 0:
            schedule.step(x)
            return None
        losses: list[Tensor] = []
        schedule.step(target=x, losses=losses)
        return torch.stack(losses).mean()

    return loop(module, step, batches(size, steps, 1))


def _back(net: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(net(x), x)
    loss.backward()
    return loss.detach()


# ── cases ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Training:
    """A way to train, by name, with what it is to be compared with."""

    name: str
    train: Train
    peer: str | None = None
    limit: str | None = None


def _split(**sizes: int) -> Callable[[], ShardedStrategy]:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    return lambda: ShardedStrategy(**{"tensor_parallel_plan": plan, **sizes})  # type: ignore[arg-type]


def _cases() -> Iterator[tuple[str, int, list[Training]]]:
    auto, lightning, by_hand = 'Lightning, "auto"', "Lightning, ModelParallelStrategy", "torch, by hand"

    def split(data: int, tensor: int) -> Callable[[], ModelParallelStrategy]:
        return lambda: ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)

    yield "one process", 1, [
        Training(auto, with_trainer(lambda: "auto")),
        Training(by_hand, on_one_process, peer=auto),
        Training(lightning, with_trainer(split(1, 1), SplitByHand), peer=auto),
        Training(OURS, with_trainer(_split()), peer=auto),
    ]
    mixed: Any = "bf16-mixed"
    on_gpus = torch.cuda.device_count() > 0
    if on_gpus:  # slow on CPUs
        yield f"one process, {mixed}", 1, [
            Training(auto, with_trainer(lambda: "auto", precision=mixed)),
            Training(lightning, with_trainer(split(1, 1), SplitByHand, precision=mixed), peer=auto),
            Training(OURS, with_trainer(_split(), precision=mixed), peer=auto),
        ]
    yield "FSDP2, 2 ranks", 2, [
        Training(lightning, with_trainer(split(2, 1), SplitByHand, 2)),
        Training("torch, by hand", fsdp_by_hand, peer=lightning),
        *([Training("Lightning, FSDPStrategy", with_trainer(_fsdp1, ranks=2), peer=lightning)] if on_gpus else []),
        Training(OURS, with_trainer(_split(data_parallel_shard_size=2), ranks=2), peer=lightning),
    ]
    yield "tensor parallel, 2 ranks", 2, [
        Training(by_hand, tensor_parallel_by_hand),
        Training(lightning, with_trainer(split(1, 2), SplitByHand), peer=by_hand),
        Training(OURS, with_trainer(_split(tensor_parallel_size=2)), peer=by_hand),
    ]
    yield "pipeline (gpipe), 2 ranks", 2, [
        Training(by_hand, pipeline_by_hand),
        Training(OURS, with_trainer(_split(pipeline_parallel_size=2)), peer=by_hand),
    ]


def training(options: Namespace, folder: str) -> list[Row]:
    """Each way of each size."""
    rows = []
    sizes = [*SIZES, LARGE] if torch.cuda.device_count() else SIZES
    for size, (name, world, ways) in product(sizes, _cases()):
        if chosen(options, world):
            label = f"{size.name} model, {name}"
            rows += case("training", label, on_ranks, world, _measure, ways, size, options.rounds, label)
    return rows


def _measure(ways: list[Training], size: Size, rounds: int, label: str) -> list[Row]:
    reference = [float(loss or 0) for loss in on_one_process(size, _CHECKED).losses]
    peak = _fastest_product(torch.bfloat16 if "bf16" in label else torch.float32) if device().type == "cuda" else 0.0

    def check(way: Training) -> Facts:
        losses = [_of_all(loss) for loss in way.train(size, _CHECKED).losses]
        tolerance = _ROUNDED if "bf16" in label else _TOLERANCE
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(losses, reference, strict=True)):
            raise ValueError(f"trains something else: losses {losses}, on one process {reference}")
        return {"loss": losses[-1]}

    def act(way: Training) -> Facts:
        on_gpu = device().type == "cuda"
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ends = way.train(size, size.warm + size.steps).ends[size.warm - 1 :]
        seconds, tokens = median(b - a for a, b in pairwise(ends)), size.samples * size.length
        facts = {"ms": _MILLI * seconds, "tokens_s": tokens / seconds}
        if not on_gpu:
            return facts
        share = _FLOPS_OF_A_WEIGHT * size.weights * tokens / seconds / dist.get_world_size() / peak
        return {**facts, "of_peak": 100 * share, "gpu_mb": torch.cuda.max_memory_allocated() / MB}

    return take_turns(ways, rounds, check, act, section="training", case=label)


def _fastest_product(dtype: torch.dtype) -> float:
    """Operations per second of large matrix products on this rank's GPU: what no training exceeds."""
    a, seconds = torch.randn(8192, 8192, device=device(), dtype=dtype), list[float]()
    for _ in range(5):
        begin = now()
        a @ a
        seconds.append(now() - begin)
    return 2 * len(a) ** 3 / min(seconds)


def _of_all(loss: Tensor | None) -> float:
    """The mean over the ranks that know the loss: of parts of the batch, or of the same one."""
    known = torch.tensor([0.0 if loss is None else float(loss), loss is not None], dtype=torch.float64)
    dist.all_reduce(known)
    return float(known[0] / known[1])
