"""First values that no file has: of modules on the meta device, and of modules that rank 0 builds in configure_model.

Oracle: the same module built on one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import tiny
from tests.support.pool import run_each, run_ranks

Build = Callable[[], nn.Module]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, whole; of a stage those that it has."""
    return {name: tiny.whole(tensor) for name, tensor in [*module.state_dict().items(), *module.named_buffers()]}


class Built(pl.LightningModule):
    """Trains what a function builds in ``configure_model``, and notes what it begins with."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = self.build()

    def on_train_start(self) -> None:
        self.first = tensors(self.net)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def begin(build: Build, strategy: dict[str, Any], kind: type[Built] = Built) -> dict[str, Tensor]:
    pl.seed_everything(6, verbose=False)
    tiny.train(module := kind(build), strategy, 1)
    return module.first


# ── built by rank 0 ─────────────────────────────────────────────────────────────────────────────────────────────────


class ShardsItself(Built):
    """Is built by rank 0 and sharded in ``configure_model``, as under Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        super().configure_model()
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.net[1:]:
            if tensor.size() > 1:
                parallelize_module(block, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(block, mesh=data)
        fully_shard(self, mesh=data)


def blocks() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
    net = nn.Sequential(nn.Embedding(tiny.VOCABULARY, 8), *blocks)
    nn.init.normal_(net[2][0].weight)
    return net


def begin_by_hand(strategy: dict[str, Any]) -> list[str]:
    torch.manual_seed(6)
    return tiny.differences(tensors(blocks()), begin(blocks, strategy, ShardsItself))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_modules_that_shard_themselves_begin_as_on_one_process(world: int) -> None:
    strategy = {"tensor_parallel_size": world // 2, "data_parallel_shard_size": 2}
    assert run_ranks(world, begin_by_hand, strategy) == [[]] * world


class Counted(TorchDispatchMode):
    """Counts the elements of the live parameters with memory, and notes the most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = dict[int, tuple[StorageWeakRef, int]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() >= 64:
                memory = tensor.untyped_storage()
                self.alive[memory._cdata] = StorageWeakRef(memory), memory.nbytes() // 4
        self.alive = {n: (weak, size) for n, (weak, size) in self.alive.items() if not weak.expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def deep() -> nn.Module:
    return nn.Sequential(nn.Embedding(tiny.VOCABULARY, 64), *[nn.Linear(64, 64, bias=False) for _ in range(12)])


def most_memory() -> int:
    """The most elements of tensors with memory, from the beginning to the first step."""
    counted, until = Counted(), list[int]()

    class Measured(Built):
        def configure_optimizers(self) -> Any:
            until.append(counted.most)
            return super().configure_optimizers()

    with counted:
        begin(deep, {}, Measured)
    return until[0]


def test_other_ranks_hold_their_shards_and_one_tensor() -> None:
    first, second = run_ranks(2, most_memory)
    whole, largest = tiny.VOCABULARY * 64 + 12 * 64 * 64, 64 * 64
    assert first >= whole
    assert whole / 2 <= second <= whole / 2 + 3 * largest  # a tensor that is sent, its bytes, and a slice


# ── built on the meta device by the user ────────────────────────────────────────────────────────────────────────────


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


class Encoder(nn.Module):
    """Every kind of module of torch that has an initialisation of its own, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCABULARY, 8, padding_idx=0)
        sizes: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, **sizes) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, tiny.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_what_modules_on_the_meta_device_make_themselves_is_the_same_on_every_topology() -> None:
    plan = {"net.layers.*.linear1": "colwise", "net.layers.*.linear2": "rowwise"}
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "replicas": (2, {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}),
        "FSDP3": (3, {}),
        "TP": (2, {"tensor_parallel_size": 2, "tensor_parallel_plan": plan}),
        "PP": (2, {"pipeline_parallel_size": 2}),
    }
    found = run_each({name: (world, begin, partial(on_meta, Encoder), way) for name, (world, way) in ways.items()})
    (first,) = found.pop("one")
    for of_rank in (rank for ranks in found.values() for rank in ranks):
        assert tiny.differences({name: first[name] for name in of_rank}, of_rank) == []
    assert first["embed.weight"][0].eq(0).all() and 0.7 < first["embed.weight"][1:].std() < 1.3
    assert first["layers.0.self_attn.in_proj_bias"].eq(0).all() and first["norm.running_var"].eq(1).all()
    assert not torch.equal(first["layers.0.linear1.weight"], first["layers.1.linear1.weight"])


class Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(tiny.VOCABULARY, 4)
        self.register_buffer("scale", torch.tensor(3.0))


def resume_without_value(path: str) -> list[str]:
    tiny.train(trained := Built(Scaled), {}, 1, save=path)
    tiny.train(resumed := Built(partial(on_meta, Scaled)), {}, 2, resume=path)
    return tiny.differences(tensors(trained.net), resumed.first)


def test_what_has_no_value_may_come_from_the_checkpoint_of_a_resume(tmp_path: Path) -> None:
    assert run_ranks(2, resume_without_value, str(tmp_path / "a.ckpt")) == [[], []]


class Repeated(nn.Module):
    """Initialises itself as many do: ``self.apply(self._init_weights)``, and then more."""

    def __init__(self, more: Callable[[Tensor], Any] = lambda weight: None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tiny.VOCABULARY, 64), nn.Linear(64, 64)
        self.apply(self._init_weights)
        more(self.head.weight)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.3)  # of several operations, none of which runs without values

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_an_initialisation_on_the_meta_device_that_methods_repeat_is_that_of_the_methods() -> None:
    for found in run_ranks(2, begin, partial(on_meta, Repeated), {}):
        assert 0.018 < found["head.weight"].std() < 0.022 and found["head.bias"].eq(0).all()
        assert 0.27 < found["embed.weight"].std() < 0.33


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Aliasing(nn.Embedding):
    """Its buffer is a row of its weight, which changes with it on one process."""

    def __init__(self) -> None:
        super().__init__(tiny.VOCABULARY, 4)
        self.register_buffer("first_row", self.weight.detach()[0])


class Unrepeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)
        nn.init.normal_(self.head.weight, std=0.02)


def change_view(weight: Tensor) -> None:
    weight.detach()[0].zero_()


def fails(on: int) -> nn.Module:
    if dist.get_rank() == on:
        raise KeyError("no such file")
    return nn.Embedding(tiny.VOCABULARY, 4)


def differs(how: str) -> nn.Module:
    """Another shape, another name or no tie on rank 1."""
    is_other = dist.get_rank() == 1
    net = nn.ModuleDict({"a": nn.Embedding(10, 6 if is_other and how == "shape" else 4), "b": nn.Embedding(10, 4)})
    if is_other and how == "name":
        net["extra"] = nn.Linear(2, 2)
    elif not is_other and how == "tie":
        net["b"].weight = net["a"].weight
    return net


DIFFERENT = "rank 0 and rank 1 have built different modules:\n.*"
FAILED = "failed while building the module in configure_model: .*KeyError: 'no such file'"
CHANGED = (
    "  net.head.weight  parameter of Linear, which was changed {} times while it was built, "
    "and is changed {} times by methods"
)
REFUSED: dict[str, tuple[Build, str]] = {
    "a buffer in the memory of a parameter": (
        *(Aliasing, "the buffer net.first_row is in the memory of the parameter net.weight"),
    ),
    "a buffer without a value": (partial(on_meta, Scaled), "  net.scale  buffer of Scaled"),
    "what no method does": (partial(on_meta, Unrepeated), CHANGED.format(2, 1)),
    "more than a method": (partial(on_meta, partial(Repeated, nn.init.orthogonal_)), CHANGED.format(3, 2)),
    "more by a view": (partial(on_meta, partial(Repeated, change_view)), CHANGED.format(3, 2)),
    "a failure of rank 0": (partial(fails, 0), f"rank 0 {FAILED}|^'no such file'"),
    "a failure of rank 1": (partial(fails, 1), f"rank 1 {FAILED}.*belongs into __init__|^'no such file'"),
    "a shape": (partial(differs, "shape"), DIFFERENT + r"net.a.weight  parameter of Embedding  \(10, 4\)"),
    "a name": (partial(differs, "name"), DIFFERENT + "net.extra.weight  parameter of Linear"),
    "a tie": (partial(differs, "tie"), DIFFERENT + "net.b.weight  parameter of Embedding"),
}


def refuse_each() -> dict[str, str]:
    said = {}
    for name, (build, _) in REFUSED.items():
        try:
            begin(build, {})
        except Exception as error:  # its class depends on the rank
            said[name] = str(error)
    return said


def test_what_cannot_begin_as_on_one_process_is_refused_by_every_rank() -> None:
    for found in run_ranks(2, refuse_each):
        for name, (_, said) in REFUSED.items():
            assert re.search(said, found.get(name, ""), re.DOTALL), (name, found.get(name))
