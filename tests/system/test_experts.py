"""Mixtures of experts, as transformers has them, under tensor and pipeline parallelism."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_shardckpt import ShardedStrategy
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.tensor_parallel import without_experts
from tests.support.pool import run_ranks


class Experts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        torch.manual_seed(0)
        self.net = MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=32))

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(32, (12, 6), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens), batch_size=4)


def train(devices: int, **topology: Any) -> dict[str, Tensor]:
    module = Experts()
    strategy: Any = ShardedStrategy(**topology) if topology else "auto"
    pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        use_distributed_sampler=False,  # which would shuffle
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)
    state = module.state_dict()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in state.items()}


def tensor_parallel() -> dict[str, Tensor]:
    return train(2, data_parallel_shard_size=1, tensor_parallel_size=2, tensor_parallel_plan="auto")


def pipelined() -> dict[str, Tensor]:
    return train(2, data_parallel_shard_size=1, pipeline_parallel_size=2)


def alone() -> dict[str, Tensor]:
    return train(1)


@pytest.mark.slow
def test_experts_train_as_on_one_process() -> None:
    (expected,) = run_ranks(1, alone, init_process_group=False)
    for function in (tensor_parallel, pipelined):
        every = run_ranks(2, function)
        found = {name: value for state in every for name, value in state.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_a_plan_of_a_model_says_what_to_leave_out() -> None:
    plan = {"layers.*.attn.q": "colwise", "layers.*.mlp.up": "packed_colwise", "layers.*.mlp.down": "rowwise"}
    with pytest.raises(TopologyError, match=r"layers\.\*\.mlp\.up \(packed_colwise\)") as error:
        without_experts(dict(plan))
    assert "tensor_parallel_plan={'layers.*.attn.q': 'colwise'}" in str(error.value)
    kept = without_experts({**plan, "layers.*.mlp.up": "rowwise", "layers.*.mlp": "moe_tp_experts"})
    assert kept == {"layers.*.attn.q": "colwise"}
