"""The whole state dict of a pipeline is there on every rank. Oracle: the module before it was split."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_shardckpt import full_state_dict
from tests.support import tiny
from tests.support.pool import run_ranks


def whole_before_and_after(strategy: dict[str, int]) -> list[str]:
    torch.manual_seed(1)
    module = tiny.TinyLM()
    module.blocks[0].register_buffer("one", torch.arange(3.0)[::3])  # contiguous, with a stride of 3
    before: dict[str, Tensor] = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = tiny.trainer(strategy, limit_val_batches=1)
    trainer.validate(module, tiny.loader(shuffle=False), verbose=False)
    after, blocks = full_state_dict(module), full_state_dict(module.blocks)
    assert {f"blocks.{name}" for name in blocks} == {name for name in before if name.startswith("blocks.")}
    assert module.state_dict().keys() < before.keys()  # this rank has only some of them
    joined = after | {f"blocks.{name}": value for name, value in blocks.items()}
    return [*tiny.differences(before, after), *tiny.differences(before, joined)]


def test_a_whole_state_dict_has_all_stages_and_shards_on_every_rank() -> None:
    strategy = {"pipeline_parallel_size": 2, "data_parallel_shard_size": 2}
    assert run_ranks(4, whole_before_and_after, strategy) == [[]] * 4
