"""What hooks and callbacks of pipeline stages save is one state. Oracle: torch's gather of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt import full_state_dict
from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.state.local_tensors import is_elsewhere
from lightning_shardckpt.strategy.resume import DataShare
from tests.support import tiny
from tests.support.pool import run_ranks

PP = {"pipeline_parallel_size": 2}


class Average(pl.Callback):
    """Keeps averages by name under a prefix, others in a list, and values that all ranks have."""

    def __init__(self) -> None:
        self.average, self.listed = dict[str, Any](), list[Any]()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.average = {f"module.{name}": p.detach() * 2 for name, p in module.named_parameters()}
        self.average |= {f"module.{name}": b.detach() * 2 for name, b in module.named_buffers() if name != "scratch"}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "listed": self.listed, "decay": 0.5, "large": torch.arange(999.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["decay"] == 0.5 and torch.equal(state["large"], torch.arange(999.0))
        self.average = state["average"]


class Data(pl.LightningDataModule):
    seen = 0

    def train_dataloader(self) -> Any:
        return tiny.loader()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 11}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def averaged(strategy: dict[str, Any], save: str | None, resume: str | None) -> tuple[dict[str, Any], bool]:
    """The averages that this rank has, whole, and whether they are sharded as the weights are."""
    pl.seed_everything(1)
    callback, data = Average(), Data()
    tiny.train(tiny.TinyLM(), strategy, 2, save=save, resume=resume, data=data, callbacks=[callback])
    assert data.seen == (11 if resume else 0)
    mine = {name: value for name, value in callback.average.items() if not is_elsewhere(value)}
    sharded = any(isinstance(value, DTensor) for value in mine.values())
    return {name: tiny.whole(value) for name, value in mine.items()}, sharded


def test_what_callbacks_keep_by_parameter_name_is_saved_by_all_stages(tmp_path: Path) -> None:
    path, expected = str(tmp_path / "a.ckpt"), dict[str, Any]()
    for found, _ in run_ranks(4, averaged, PP, path, None):
        expected |= found
    assert {"module.embed.weight", "module.head.weight", "module.mean"} <= expected.keys()
    for strategy in ({}, PP):
        loaded = run_ranks(2, averaged, strategy, None, path)
        assert set().union(*(found for found, _ in loaded)) == expected.keys()
        for found, sharded in loaded:
            assert sharded == (not strategy)
            assert tiny.differences({name: expected[name] for name in found}, found) == []


class Tied(tiny.TinyLM):
    """Replaces entries of the state dict as it is saved: all, or one name of a tie."""

    only = ""

    def _build(self) -> None:
        super()._build()
        self.head.weight = self.embed.weight

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v * 2 if k.endswith(self.only) else v for k, v in state.items()}


def replaced(folder: str) -> tuple[dict[str, Any], list[str]]:
    """This rank's weights, and what the saves say that are refused."""
    pl.seed_everything(1)
    run = tiny.train(module := Tied(), PP, 1, save=f"{folder}/all", callbacks=[callback := Average()])
    averages, said = [*callback.average.values()], list[str]()
    mine = [value for value in averages if not is_elsewhere(value)]
    for module.only, callback.listed in (("head.weight", []), ("", mine), ("", averages)):
        with pytest.raises((MismatchError, StateError)) as refused:
            run.save_checkpoint(f"{folder}/refused")
        said.append(str(refused.value))
    return tiny.full_state(module, []), said


def test_what_hooks_replace_is_tied_like_the_model_and_what_stages_hold_otherwise_is_refused(tmp_path: Path) -> None:
    expected = dict[str, Any]()
    for found, (of_tie, of_stages, elsewhere) in run_ranks(4, replaced, str(tmp_path)):
        expected |= {name.removeprefix("model/"): value * 2 for name, value in found.items()}
        assert "model/embed.weight  ranks " in of_tie and "a tied weight under all its names" in of_tie
        assert "callbacks/Average/listed/" in of_stages
        assert "callbacks/Average/listed/" in elsewhere and "is on another pipeline stage" in elsewhere
    assert tiny.differences(load_full(str(tmp_path / "all"))["state_dict"], expected) == []
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


@pytest.mark.parametrize(
    ("place", "saved", "rank"),
    [
        ((1, 2, 1), {"data_rank": 0, "data_size": 4, "ranks_each": 2}, 2),  # a checkpoint without stages
        ((1, 4, 2, 1, 2), {"data_rank": 3, "data_size": 4, "ranks_each": 2, "stage": 0, "stages": 2}, 10),
        ((1, 4, 2, 2, 3), {"data_rank": 3, "data_size": 4, "ranks_each": 2, "stage": 1, "stages": 2}, 2),
    ],
)
def test_a_rank_continues_the_one_of_its_stage_and_data(place: Any, saved: dict[str, int], rank: int) -> None:
    assert DataShare(*place).source_rank({"place": saved}) == rank


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
