"""Training under ShardedStrategy equals plain torch on every topology; options, stages of the Trainer, and errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric

from lightning_shardckpt import FSDP, ShardedStrategy
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.tensor_parallel import without_experts
from tests.support import tiny
from tests.support.fabrics import assert_close
from tests.support.nets import (
    PLAN,
    TOLERANCE,
    VOCABULARY,
    Case,
    Module,
    Trained,
    dataset,
    full_state,
    loss_of,
    train_all,
    trainer_for,
    twins,
)
from tests.support.pool import run_each, run_ranks, selected

State = dict[str, Tensor]


def fit(module: pl.LightningModule, strategy: ShardedStrategy, **options: Any) -> pl.Trainer:
    trainer = trainer_for(strategy, dist.get_world_size(), **options)
    trainer.fit(module)
    return trainer


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Overflow(Module):  # in the second batch, one element of one gradient is infinite: a shard of rank 0 has it
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss + self.net.position[0, 0] * torch.inf if index == 1 else loss  # type: ignore[index]


def train_with_scaler() -> tuple[State, list[float]]:
    pl.seed_everything(3, verbose=False)
    module, scaler = Overflow(Case()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    options = {"precision": None, "gradient_clip_val": 0.5, "limit_val_batches": 0}
    trainer = fit(module, ShardedStrategy(), plugins=[plugin], **options)
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    return full_state(module), [scaler.get_scale(), *steps]


@pytest.mark.slow
def test_every_rank_skips_the_step_in_which_one_overflows(found: dict[Any, Any]) -> None:
    for state, scale_and_steps in found[train_with_scaler, 2]:
        assert scale_and_steps == [512, 3]  # halved once; three of four steps
        assert all(value.isfinite().all() for value in state.values())


# ── Trainer's other entry points ────────────────────────────────────────────────────────────────────────────────────


class Everything(Module):  # has a metric that counts samples
    def __init__(self) -> None:
        super().__init__(Case(late=True))
        self.samples = SumMetric()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        super().validation_step(batch, index)
        self.samples.update(len(batch[0]))
        self.log("samples", self.samples)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test", loss_of(self.net, batch), sync_dist=True)

    test_dataloader = Module.train_dataloader


def run_stages() -> None:
    pl.seed_everything(3, verbose=False)
    strategy = partial(ShardedStrategy, tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    module, world = Everything(), dist.get_world_size()
    trainer = trainer_for(strategy(), world)
    (before,) = trainer.validate(module, verbose=False)
    assert before["samples"] == len(dataset())  # the ranks of a tensor group count once
    trainer.fit(module)
    fitted = float(trainer.callback_metrics["val"])
    assert fitted < before["val"]
    assert trainer.validate(module, verbose=False)[0]["val"] == fitted
    assert trainer.test(module, verbose=False)[0]["test"] == fitted
    again = trainer_for(strategy(), world)
    assert again.validate(module, verbose=False)[0]["val"] == fitted
    again.fit(module)
    assert float(again.callback_metrics["val"]) < fitted
    with pytest.raises(TopologyError, match=r"already sharded as .*tensor=2.*asks for .*tensor=1"):
        trainer_for(ShardedStrategy(), world).validate(module, verbose=False)
    module.configure_model = lambda: setattr(module, "extra", nn.Linear(2, 2))  # type: ignore[method-assign]
    with pytest.raises(UnsupportedCodeError, match=r"got 2 parameters after it was sharded, the first is extra.weight"):
        trainer.validate(module, verbose=False)


@pytest.mark.slow
def test_stages_and_trainers_share_a_module(found: dict[Any, Any]) -> None:
    assert found[run_stages, 2] == [None, None]  # which asserts


# ── modules that shard themselves ───────────────────────────────────────────────────────────────────────────────────


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x)  # type: ignore[no-any-return]


class ShardsItself(Module):  # as for Lightning's ModelParallelStrategy: this strategy is not asked to shard anything
    def __init__(self) -> None:
        super().__init__(Case(late=True))
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Feedforward()
        if self.trainer.world_size == 1 or isinstance(self.net.up.weight, DTensor):
            return
        assert self.device_mesh is not None
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.net.up, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def train_what_shards_itself() -> State:
    pl.seed_everything(3, verbose=False)
    size = min(2, dist.get_world_size())
    options = {"gradient_clip_val": 0.05, "limit_train_batches": 2, "limit_val_batches": 1}
    trainer = fit(module := ShardsItself(), ShardedStrategy(tensor_parallel_size=size), **options)
    trainer.validate(module, verbose=False)
    return full_state(module)


@pytest.mark.slow
def test_a_module_that_shards_itself_trains_as_on_one_process(found: dict[Any, Any]) -> None:
    for got in found[train_what_shards_itself, 4]:
        assert_close(got, found[train_what_shards_itself, 1][0])


def sequence_parallel(root: nn.Module, mesh: Any) -> None:
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    plan = {
        "net.embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "net.norm": SequenceParallel(),
        "net.up": ColwiseParallel(input_layouts=Shard(1)),
        "net.down": RowwiseParallel(output_layouts=Shard(1)),
        "net.head": whole,
    }
    parallelize_module(root, mesh, plan)


def train_sequence_parallel() -> State:
    pl.seed_everything(3, verbose=False)
    module = Module(Case(late=True))
    module.net = Feedforward()
    module.train_dataloader = module.val_dataloader = even_length  # type: ignore[method-assign,assignment]
    size = dist.get_world_size()
    plan: Any = {"tensor_parallel_plan": sequence_parallel} if size > 1 else {}
    fit(module, ShardedStrategy(tensor_parallel_size=size, **plan), gradient_clip_val=0.05, accumulate_grad_batches=2)
    return full_state(module)


def even_length() -> DataLoader[tuple[Tensor, ...]]:
    tokens = dataset().tensors
    return DataLoader(TensorDataset(tokens[0][:, :4], tokens[1][:, :4]), batch_size=12)


@pytest.mark.slow
def test_a_callable_plan_may_use_sequence_parallel_norms(found: dict[Any, Any]) -> None:
    for got in found[train_sequence_parallel, 2]:
        assert_close(got, found[train_sequence_parallel, 1][0])


WAYS = [(train_with_scaler, 2), (run_stages, 2), (train_what_shards_itself, 1), (train_what_shards_itself, 4)]
WAYS += [(train_sequence_parallel, 1), (train_sequence_parallel, 2)]


@pytest.fixture(scope="module")
def found() -> dict[Any, list[Any]]:
    return run_each({(fn, world): (world, fn) for fn, world in WAYS})


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_without_the_style_of_norms() -> None:
    module = Module(Case("qwen3"))
    plan = {
        **{f"net.model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "net.model.layers.*.self_attn.o_proj": "rowwise",
    }
    fit(module, ShardedStrategy(tensor_parallel_size=2, tensor_parallel_plan=plan))


class OtherBatches(Module):
    def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        if dist.get_rank() == 3:
            batch[0][0, 0] += 1
        return batch


def train_on_other_batches() -> None:
    fit(OtherBatches(Case()), ShardedStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN))


class OtherValidation(Module):
    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(), batch_size=2, sampler=DistributedSampler(dataset()))  # over the whole world


def validate_on_other_batches() -> None:
    strategy = ShardedStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer_for(strategy, dist.get_world_size()).validate(OtherValidation(Case()), verbose=False)


class DrawsAlone(tiny.TinyLM):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            torch.randn(1)


def train_tiny(kind: type[tiny.TinyLM] = DrawsAlone) -> State:
    torch.manual_seed(dist.get_rank())  # as without a seed: every rank would draw its own numbers
    tiny.train(module := kind(), {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}, 3)
    return full_state(module)


DRIFTS: dict[Callable[[], Any], str] = {
    validate_on_other_batches: "the ranks of a tensor-parallel group got different batches",
    train_tiny: "drew different random numbers in training_step",
    train_without_the_style_of_norms: "replicated parameters have different gradients on the ranks of a tensor-p",
    train_on_other_batches: "the ranks of a tensor-parallel group got different batches",
}


def drift() -> None:
    for train, message in DRIFTS.items():
        with pytest.raises(UnsupportedCodeError, match=message):
            train()


def test_ranks_of_a_tensor_group_that_drift_apart_are_an_error_everywhere() -> None:
    run_ranks(4, drift)


def test_replicas_stay_equal_to_the_bit_under_dropout_without_a_seed() -> None:
    first, second = run_ranks(2, train_tiny, tiny.TinyLM)
    assert tiny.differences(first, second) == []


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


TIED = Case("tied net", late=True)
LATE = Case(late=True, clip=0.05, accumulate=2)
CLIPPED = Case(clip=0.05)
ACCUMULATED = Case(clip=0.05, accumulate=2)
QWEN3 = Case("qwen3", accumulate=2)
EVERY_CASE = [TIED, LATE, CLIPPED, ACCUMULATED, QWEN3]
TP = {"tensor_parallel_size": 2}
OPTIONS = FSDP(
    units=["net.blocks.*.attention", "Block", "net.embed"],
    activation_checkpointing=["Attention", "net.blocks.1"],
    cpu_offload=True,
)


@pytest.fixture(scope="module")
def expected() -> dict[Case, Trained]:
    return dict(zip(EVERY_CASE, run_ranks(1, twins, EVERY_CASE)[0], strict=True))


TOPOLOGIES: dict[str, tuple[int, dict[str, Any], list[Case]]] = {
    "one process": (1, {}, [ACCUMULATED]),
    "fsdp2": (2, {}, [CLIPPED]),
    "fsdp3 uneven": (3, {}, [TIED]),
    "fsdp2, options": (2, {"fsdp": OPTIONS}, [LATE]),
    "replicate2": (2, {"data_parallel_replicate_size": 2}, [ACCUMULATED]),
    "tp2": (2, TP, [QWEN3]),
    "fsdp2 x tp2": (4, TP, [TIED]),
}
MARKS = {"one process": [], "replicate2": [], "fsdp3 uneven": [pytest.mark.slow, pytest.mark.sweep]}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, list[list[Trained]]]:
    """What each rank saw of the cases of each selected way."""
    ways = {way: TOPOLOGIES[way] for way in selected(request, "way")}
    return run_each({way: (world, train_all, cases, sizes) for way, (world, sizes, cases) in ways.items()})


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, pytest.mark.slow)) for way in TOPOLOGIES])
def test_training_equals_plain_torch(
    way: str, trained: dict[str, list[list[Trained]]], expected: dict[Case, Trained]
) -> None:
    for index, case in enumerate(TOPOLOGIES[way][2]):
        alone, together = expected[case], [rank[index] for rank in trained[way]]
        for got in together:
            assert got.metrics == together[0].metrics
            assert got.metrics == pytest.approx(alone.metrics, abs=TOLERANCE)
            assert got.losses == pytest.approx(alone.losses, abs=TOLERANCE)
            assert got.first.keys() == alone.first.keys()
            for name in alone.first:
                assert torch.equal(got.first[name], alone.first[name]), (case, name)
                assert torch.equal(got.last[name], together[0].last[name]), (case, name)
                torch.testing.assert_close(
                    got.last[name], alone.last[name], rtol=0, atol=TOLERANCE, msg=f"{case} {name}"
                )


# ── experts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_experts(sizes: dict[str, Any]) -> State:
    pl.seed_everything(3, verbose=False)
    fit(module := Module(Case("mixtral")), ShardedStrategy(tensor_parallel_plan="auto", **sizes), precision=None)
    return full_state(module)


@pytest.mark.slow
def test_experts_train_as_on_one_process() -> None:
    ways: dict[str, tuple[Any, ...]] = {"alone": (1, train_experts, {})}
    for axis in ("tensor", "pipeline"):
        sizes = {"data_parallel_shard_size": 1, f"{axis}_parallel_size": 2}
        ways[axis] = (2, train_experts, sizes)
    (expected,), *others = run_each(ways).values()
    for ranks in others:  # float32 sums in another order
        assert_close({name: value for rank in ranks for name, value in rank.items()}, expected, 1e-4)


def test_a_plan_of_a_model_leaves_experts_whole() -> None:
    plan = {"layers.*.attn.q": "colwise", "layers.*.mlp.up": "rowwise", "layers.*.mlp": "moe_tp_experts"}
    assert without_experts(plan) == {"layers.*.attn.q": "colwise"}
