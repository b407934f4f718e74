"""Both strategies take the same arguments, and what cannot be is refused when they are made."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

from lightning_shardckpt import fabric, pytorch
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.strategy.counterparts import COUNTERPARTS

BOTH = [pytorch.ShardedStrategy, fabric.ShardedStrategy]


def test_both_strategies_have_one_signature() -> None:
    ours, theirs = (inspect.signature(strategy) for strategy in BOTH)
    assert ours == theirs and len(ours.parameters) == 25
    assert {parameter.kind for parameter in ours.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


BY_MICROBATCH = {"pipeline_parallel_size": 2, "pipeline_loss": "microbatch"}


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_microbatches": 0}, "pipeline_microbatches must be at least 1, found 0"),
        ({"pipeline_loss": "sample"}, "pipeline_loss must be one of .*found 'sample'"),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}, 'pipeline_loss="microbatch".*"gpipe"'),
        ({"pipeline_schedule": "interleaved_1f1b", **BY_MICROBATCH}, "interleaved_1f1b.*at least 2 stages"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward is True, False or None, found 'no'"),
        ({"reshard_after_forward": True, "pipeline_parallel_size": 2}, "Use reshard_after_forward=False"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is a number .*found '2': write tensor_parallel_size=2"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is a number of processes, at least 1, found 0"),
        ({"data_parallel_replicate_size": True}, "data_parallel_replicate_size is a number .*found True"),
        ({"data_parallel_shard_size": "all"}, 'data_parallel_shard_size is .*at least 1 or "auto", found \'all\''),
        *(
            (options, message)
            for name in ("pipeline_layers", "fsdp_units", "fsdp_ignored", "activation_checkpointing")
            for options, message in [
                ({name: "blocks.*"}, rf"{name}=\['blocks.\*'\]"),
                ({name: ["blocks.*", nn.Linear]}, rf"{name} is a list.*, found <class .*: write 'Linear'"),
            ]
        ),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(strategy: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        strategy(**options)


@pytest.mark.parametrize("defers", [True, False])
def test_fabric_builds_modules_without_memory_only_if_it_may(defers: bool) -> None:
    strategy = fabric.ShardedStrategy(defer_init=defers)
    with strategy.module_init_context(empty_init=True):
        module = nn.Linear(2, 1)
    assert not module.weight.is_meta
    with without_torch_function():
        assert module.weight.is_meta == defers


def test_an_option_that_there_is_not_is_one_of_the_class_that_users_know() -> None:
    wrong: Any = {"fsdp_unit": ["Linear"]}
    for strategy in BOTH:
        with pytest.raises(TypeError, match=r"^ShardedStrategy.__init__\(\) got an unexpected .* 'fsdp_unit'"):
            strategy(**wrong)


LIGHTNINGS = [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, DDPStrategy, FullyShardedDataParallel, DDP]


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_an_option_of_another_strategy_names_its_counterpart(name: str) -> None:
    theirs, ours = ({n for s in kinds for n in inspect.signature(s).parameters} for kinds in (LIGHTNINGS, BOTH))
    assert name in theirs and name not in ours
    sentence = COUNTERPARTS[name]
    named = set(re.findall(r"(\w+)=", sentence)) - set(inspect.signature(Trainer).parameters)
    assert named <= ours and (named or sentence.startswith(("leave it out", "the Trainer")))
    for strategy in BOTH:
        with pytest.raises(TypeError, match=re.escape(f"{name}: {sentence}")):
            strategy(**{name: 2})


def test_options_of_the_sharded_strategies_that_choose_what_is_trained_have_a_counterpart() -> None:
    of_fsdp, of_parallel = (set(inspect.signature(s).parameters) for s in (FSDPStrategy, ModelParallelStrategy))
    of_fsdp.remove("kwargs")
    for name in of_fsdp | of_parallel:
        assert name in COUNTERPARTS or name in inspect.signature(pytorch.ShardedStrategy).parameters, name


def test_a_subclass_may_have_an_option_of_such_a_name() -> None:
    class Staged(pytorch.ShardedStrategy):
        def __init__(self, stage: int, **options: Any) -> None:
            super().__init__(**options)
            self.stage = stage

    assert Staged(stage=3).stage == 3
