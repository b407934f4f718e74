"""What torch's engine communicates in a step. Oracle: ``fully_shard`` under Lightning's ModelParallelStrategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_shardckpt import FSDP, Pipeline, ShardedStrategy
from lightning_shardckpt.errors import UnsupportedCodeError
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_ranks

WIDTH, BLOCKS, STEPS = 16, 6, 3
Event = tuple[str, int]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Notes when a block runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.events = nn.ModuleList(Block() for _ in range(BLOCKS)), list[Event]()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.events.append(("forward", number))
            x = block(x)
            if x.requires_grad:
                x.register_hook(partial(self.note_backward, number))
        return x

    def note_backward(self, number: int, gradient: Tensor) -> None:
        self.events.append(("backward", number))


class Stages(Blocks):
    """Notes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Module(pl.LightningModule):
    def __init__(self, by_hand: bool, net: type[Blocks]) -> None:
        super().__init__()
        self.by_hand, self.net = by_hand, net()

    def configure_model(self) -> None:
        if self.by_hand and not isinstance(self.net, FSDPModule):
            mixed = self.trainer.precision == "bf16-mixed"
            policy = MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32, cast_forward_inputs=False)
            mesh, over = (self.device_mesh[f"{axis}_parallel"] for axis in ("data", "tensor"))
            if over.size() > 1:
                styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
                parallelize_module(self.net, over, styles)
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trained(NamedTuple):
    events: list[Event]
    state: dict[str, Tensor]


PLAN = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}


def _train(
    by_hand: bool,
    precision: Any = "32-true",
    model_ranks: int = 1,
    **options: Any,
) -> Trained:
    """Train on two data-parallel ranks, each of so many of a tensor-parallel group, or of ``options``."""
    pl.seed_everything(5, verbose=False)
    module = Module(by_hand, Stages if "pipeline_parallel_size" in options else Blocks)
    if model_ranks > 1 and not options:
        options |= {"tensor_parallel_size": model_ranks, "tensor_parallel_plan": PLAN}
    lightnings = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=model_ranks)
    strategy: Any = lightnings if by_hand else ShardedStrategy(**options)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2 * model_ranks, strategy=strategy, precision=precision, max_steps=STEPS,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    with _noted(module.net.events):
        trainer.fit(module, DataLoader(torch.randn(8 * STEPS, WIDTH), batch_size=8))
    return Trained(module.net.events, full_state(module))


@contextmanager
def _noted(events: list[Event]) -> Iterator[None]:
    """Note collectives of tensors as large as parameters, by what goes in or comes out on a rank."""
    kinds = {"all_gather_single": "gather", "all_gather_into_tensor": "gather", "all_reduce": "reduce"}
    kinds |= {"reduce_scatter_single": "reduce", "reduce_scatter_tensor": "reduce"}
    before = {name: getattr(dist, name) for name in kinds if hasattr(dist, name)}

    def noting(name: str) -> Callable[..., Any]:
        def noted(*tensors: Any, **kwargs: Any) -> Any:
            largest = max(t.numel() * t.itemsize for t in [*tensors, *kwargs.values()] if isinstance(t, Tensor))
            if largest > 4 * WIDTH * WIDTH:
                events.append((kinds[name], largest))
            return before[name](*tensors, **kwargs)

        return noted

    for name in before:
        setattr(dist, name, noting(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _train_both(precision: str, tensor: int) -> tuple[Trained, Trained]:
    return _train(False, precision, tensor), _train(True, precision, tensor)


@pytest.mark.parametrize(
    ("precision", "tensor"), [("bf16-mixed", 1), pytest.param("32-true", 2, marks=pytest.mark.slow)]
)
def test_a_step_communicates_as_fully_shard_does(precision: str, tensor: int) -> None:
    ours, theirs = run_ranks(2 * tensor, _train_both, precision, tensor)[0]
    assert ours.state.keys() == theirs.state.keys()
    torch.testing.assert_close(ours.state, theirs.state, rtol=0, atol=0)
    events, expected = (  # the first forward also checks the plan
        trained.events[trained.events.index(("forward", 0), 1) :] for trained in (ours, theirs)
    )
    assert events == expected


@pytest.mark.slow
def test_a_stage_reduces_each_unit_once_for_all_microbatches() -> None:
    (alone, _) = run_ranks(2, _train, False)
    schedule = Pipeline(schedule="interleaved_1f1b", microbatches=4, stages_per_rank=2, loss="microbatch")
    for trained in run_ranks(4, _train, False, model_ranks=2, pipeline_parallel_size=2, pipeline=schedule):
        assert [kind for kind, _ in trained.events].count("reduce") == BLOCKS // 2 * STEPS
        expected = {name: alone.state[name] for name in trained.state}
        torch.testing.assert_close(trained.state, expected, rtol=1e-5, atol=1e-7)  # sums in another order


def _train_reduced() -> list[Trained]:
    return [_train(False, "bf16-true", fsdp=FSDP(reduce_dtype=dtype)) for dtype in (None, "float32")]


def test_bfloat16_is_gathered_and_reduced_as_it_is_or_in_float32() -> None:
    ours, wide = run_ranks(2, _train_reduced)[0]
    elements = sum(value.numel() for value in ours.state.values()) // BLOCKS
    sizes = {kind: max(size for name, size in ours.events if name == kind) for kind in ("gather", "reduce")}
    assert (sizes["gather"], sizes["reduce"]) == (2 * elements, 2 * elements)
    assert max(size for name, size in wide.events if name == "reduce") == 4 * elements


class Refused(Module):
    """Does in its step, or in a forward, what ``fully_shard`` cannot follow."""

    def __init__(self, how: str) -> None:
        super().__init__(False, Blocks)
        self.how, self.kept = how, list[Any]()
        if how == "a late hook":
            self.net.blocks[3].register_full_backward_hook(lambda *_: self.hook_late())
        if how in IN_FORWARD:
            self.net.blocks[2].up.register_forward_hook(lambda module, *_: self.kept.append(IN_FORWARD[how](module)))

    def hook_late(self) -> None:
        self.weights[1].register_hook(torch.neg)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [block.up.weight for block in self.net.blocks]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return IN_STEP[self.how](loss, self) if self.how in IN_STEP else loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.net(batch)


def _penalize(loss: Tensor, module: Refused) -> Tensor:
    loss.backward(create_graph=True)
    return loss


def _backward_into(loss: Tensor, module: Refused) -> Tensor:
    loss.backward(inputs=module.weights)
    return loss


IN_STEP: dict[str, Callable[[Tensor, Refused], Tensor]] = {
    "gradients by function": lambda loss, module: torch.autograd.grad(loss, module.weights)[0].sum(),
    "unused ones, too": lambda loss, module: torch.autograd.grad(loss, module.weights, allow_unused=True)[0].sum(),
    "backward into some": _backward_into,
    "differentiated gradients": _penalize,
    "a late hook": lambda loss, module: loss,
}
IN_FORWARD: dict[str, Callable[[Any], Any]] = {
    "a kept view": lambda module: module.weight.t(),
    "an array": lambda module: module.weight.detach().numpy(),
    "a conversion": lambda module: module.double(),
    "a view in validation": lambda module: module.weight.t() if not torch.is_grad_enabled() else None,
    "a copy in validation": lambda module: module.weight.t().contiguous() if not torch.is_grad_enabled() else None,
}


def _refuse(how: str) -> None:
    pl.seed_everything(5, verbose=False)
    module, data = Refused(how), DataLoader(torch.randn(16, WIDTH), batch_size=4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = tiny.trainer({}, max_steps=2, val_check_interval=1)
    if how == "a copy in validation":
        trainer.fit(module, data, data)
        return
    with pytest.raises(UnsupportedCodeError) as caught:
        trainer.fit(module, data, data)
    assert "keeps a view" in str(caught.value) or how != "a view in validation"
    assert ("FSDP(ignored=[…])" in str(caught.value) and "net" in str(caught.value)) or "validation" in how, how
    assert "validation" in how or tiny.differences(before, full_state(module)) == [], how


def _refuse_each() -> None:
    for how in (*IN_STEP, *IN_FORWARD):
        _refuse(how)


def test_what_fully_shard_cannot_follow_is_refused_by_name_before_anything_is_trained() -> None:
    run_ranks(2, _refuse_each)
