"""``FSDP(ignored=…)``: modules that every data-parallel rank has whole. Oracle: one process under plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt import FSDP, load_keys
from lightning_shardckpt.errors import TopologyError
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_each, run_ranks
from tests.sweeps.twins.base import PLAN, Natural

HSDP = {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}
TOPOLOGIES: dict[str, dict[str, Any]] = {"hsdp": HSDP, "pp2 x fsdp2": {"pipeline_parallel_size": 2}}
IGNORED = ["net.head", "net.layers.*.norm"]


def train(strategy: dict[str, Any] | str, path: Path | None = None) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    module = Natural()
    trainer = tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False)
    trainer.fit(module)
    if path is not None:
        whole = {name for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        names = ("net.head.weight", "net.layers.0.norm.weight", "net.layers.1.norm.weight", "net.embed.weight")
        there = [name for name in names if name in module.state_dict()]
        assert [name for name in there if name in whole] == [name for name in there if name != "net.embed.weight"]
        trainer.save_checkpoint(path)
    return full_state(module)


def test_ignored_modules_train_as_on_one_process_and_are_saved_once(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, train, "auto", init_process_group=False)
    calls = {
        name: (4, train, {**strategy, "fsdp": FSDP(ignored=IGNORED)}, tmp_path / f"{name}.ckpt")
        for name, strategy in TOPOLOGIES.items()
    }
    for name, ranks in run_each(calls).items():
        found = {key: value for rank in ranks for key, value in rank.items()}
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=name)
        stored = dict(load_keys(tmp_path / f"{name}.ckpt", list(expected)))
        assert [key for key, value in stored.items() if not torch.equal(value, found[key])] == []
        files = map(load_file, (tmp_path / f"{name}.ckpt").glob("model-dist-*.safetensors"))
        written = sum(part.numel() for file in files for part in file.values())
        assert written == sum(value.numel() for value in expected.values()), name


def refuse(strategy: dict[str, Any]) -> str:
    with pytest.raises(TopologyError) as raised:
        train(strategy)
    return str(raised.value)


def test_patterns_that_match_nothing_or_a_planned_module_are_refused() -> None:
    planned = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN, "fsdp": FSDP(ignored=["net.layers.0"])}
    found = run_each({"none": (2, refuse, {"fsdp": FSDP(ignored=["net.haed"])}), "planned": (4, refuse, planned)})
    assert all("FSDP(ignored=…): 1 patterns match no module" in said and "net.head" in said for said in found["none"])
    assert all("tensor_parallel_plan shards net.layers.0" in said for said in found["planned"])
