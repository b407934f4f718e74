"""Strategies that would never ask ShardCkptIO are refused with it, when the Trainer or Fabric is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.compat.strategy_assignment import check_asks, is_wrapper
from tests.support.lightning_dirs import CPUFSDPStrategy, cut_for_fabric

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "devices": 2}


def trainer(strategy: Any, io: Any) -> pl.Trainer:
    return pl.Trainer(**OPTIONS, strategy=strategy, plugins=[io], logger=False, enable_checkpointing=False)


def fabric(strategy: Any, io: Any) -> Fabric:
    return Fabric(**OPTIONS, strategy=strategy, plugins=[io])


BY_THEMSELVES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "model parallel": (trainer, lambda: ModelParallelStrategy()),
    "model parallel, whole": (trainer, lambda: ModelParallelStrategy(save_distributed_checkpoint=False)),
    "fsdp": (trainer, lambda: CPUFSDPStrategy(state_dict_type="sharded")),
    "fsdp, whole": (trainer, lambda: CPUFSDPStrategy(state_dict_type="full")),
    "model parallel of Fabric": (fabric, lambda: FabricModelParallelStrategy(cut_for_fabric)),
    "fsdp of Fabric": (fabric, lambda: type("CPU", (FabricFSDPStrategy,), {})()),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_a_strategy_that_saves_by_itself_is_refused_with_what_to_use(name: str, wrapped: bool) -> None:
    make, strategy = BY_THEMSELVES[name]
    io: Any = AsyncCheckpointIO(ShardCkptIO()) if wrapped else ShardCkptIO()
    of = r"lightning_shardckpt\.fabric\.Sharded" if make is fabric else r"lightning_shardckpt\.Sharded"
    expected = rf"{type(strategy()).__name__} writes and reads checkpoints by itself.*strategy={of}Strategy\(\)"
    with pytest.raises(TypeError, match=expected):
        make(strategy(), io)


def test_it_is_refused_where_the_strategy_was_given_the_plugin() -> None:
    with pytest.raises(TypeError, match="CPUFSDPStrategy writes and reads checkpoints by itself"):
        pl.Trainer(**OPTIONS, strategy=CPUFSDPStrategy(checkpoint_io=ShardCkptIO()), logger=False)


def test_a_strategy_that_asks_passes_and_another_one_is_named() -> None:
    check_asks(trainer("ddp", TorchCheckpointIO()).strategy, "ShardCkptIO")
    with pytest.raises(TypeError, match=r"^ModelParallelStrategy writes and reads .* would not use ShardCkptIO"):
        check_asks(ModelParallelStrategy(), "ShardCkptIO")


def test_a_wrapper_is_told_from_what_it_wraps() -> None:
    assert is_wrapper(AsyncCheckpointIO(TorchCheckpointIO())) and not is_wrapper(TorchCheckpointIO())


def test_other_plugins_and_other_strategies_are_as_they_were() -> None:
    torchs, ours = TorchCheckpointIO(), ShardCkptIO()
    assert trainer(CPUFSDPStrategy(), torchs).strategy.checkpoint_io is torchs
    assert trainer("ddp", ours).strategy.checkpoint_io is ours
    assert fabric("ddp", ours).strategy.checkpoint_io is ours
    with pytest.raises(NotImplementedError, match="does not support setting a `CheckpointIO`"):
        fabric(FabricModelParallelStrategy(cut_for_fabric), torchs)
