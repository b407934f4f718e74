"""What a user of the Trainer does with checkpoints: ckpt_path in every form, ModelCheckpoint, stock strategies."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torchmetrics import MeanMetric, SumMetric

import lightning_shardckpt
from lightning_shardckpt import ShardCkptIO, ShardedStrategy
from lightning_shardckpt.errors import MismatchError, StateError, UnsupportedCodeError
from tests.support import tiny
from tests.support.pool import run_ranks
from tests.support.stores import Bucket


def _held_out() -> Any:
    return tiny.loader(count=8, shuffle=False)


TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


def save_with_model_checkpoint(directory: str) -> dict[str, Any]:
    pl.seed_everything(1)
    best = ModelCheckpoint(directory, monitor="val_loss", save_top_k=2, save_last="link", filename="{step}")
    run = tiny.trainer(TP2, max_epochs=3, limit_train_batches=2, callbacks=[best], enable_checkpointing=True)
    run.fit(module := tiny.TinyLM(), tiny.loader(), _held_out())
    state = tiny.full_state(module, run.optimizers)
    return {
        "names": sorted(os.listdir(directory)),
        "last": os.path.realpath(best.last_model_path),
        "best": best.best_model_path,
        "kept": sorted(best.best_k_models),
        "state": state,
    }


def use_every_ckpt_path(directory: str, best: str) -> dict[str, Any]:
    pl.seed_everything(2)
    keeping = ModelCheckpoint(directory, monitor="val_loss", save_top_k=2, save_last="link", filename="{step}")
    run = tiny.trainer({}, max_epochs=4, limit_train_batches=2, callbacks=[keeping], enable_checkpointing=True)
    module = tiny.TinyLM()
    run.fit(module, tiny.loader(), _held_out(), ckpt_path="last")
    found: dict[str, Any] = {"steps": run.global_step, "losses": len(module.losses)}
    for path in ("best", "last", keeping.best_model_path):
        (metrics,) = run.validate(module, _held_out(), ckpt_path=path, verbose=False)
        (tested,) = run.test(module, _held_out(), ckpt_path=path, verbose=False)
        found[path] = (metrics["val_loss"], tested["val_loss"])
    found["score"] = float(keeping.best_model_score)
    predictions = run.predict(tiny.TinyLM(), _held_out(), ckpt_path=best)
    found["predictions"] = torch.cat(predictions).shape
    return found


def test_model_checkpoint_keeps_and_finds_checkpoints(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    saved = run_ranks(2, save_with_model_checkpoint, directory)[0]
    assert len(saved["kept"]) == 2
    assert saved["names"] == sorted([*(os.path.basename(p) for p in saved["kept"]), "last.ckpt"])
    assert saved["last"] in saved["kept"] and os.path.islink(os.path.join(directory, "last.ckpt"))
    for found in run_ranks(2, use_every_ckpt_path, directory, saved["best"]):
        assert (found["steps"], found["losses"]) == (8, 2)  # of the fourth epoch only
        assert found["best"][0] == found["best"][1] == pytest.approx(found["score"], abs=0)


def weights_only(directory: str) -> tuple[str, float]:
    tiny.train(tiny.TinyLM(), {}, 2).save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)
    again = tiny.trainer({}, max_steps=4)
    (metrics,) = again.validate(tiny.TinyLM(), _held_out(), ckpt_path=f"{directory}/weights.ckpt", verbose=False)
    with pytest.raises(MismatchError) as raised:
        again.fit(tiny.TinyLM(), tiny.loader(), ckpt_path=f"{directory}/weights.ckpt")
    return str(raised.value), metrics["val_loss"]


@pytest.mark.slow
def test_weights_only_checkpoint_validates_and_says_why_it_cannot_resume(tmp_path: Path) -> None:
    for message, loss in run_ranks(2, weights_only, str(tmp_path)):
        assert "weights only" in message and "save_weights_only=False" in message
        assert loss > 0


def stock(strategy: str, steps: int, path: str, resume: str | None) -> dict[str, Any]:
    found = tiny.fit(strategy, steps, save=path, resume=resume)
    return {k: v for k, v in found["state"].items() if k != "model/scratch"}


@pytest.mark.parametrize(("strategy", "world"), [pytest.param("ddp", 2, marks=pytest.mark.slow), ("auto", 1)])
def test_stock_strategies_save_load_and_exchange_checkpoints(strategy: str, world: int, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / f"{i}.ckpt") for i in range(3))
    expected = run_ranks(world, stock, strategy, 2, first, None)[0]
    sharded = run_ranks(2, resume_sharded, first, second)
    assert tiny.differences(expected, sharded[0]) == []
    back = run_ranks(world, stock, strategy, 2, third, second)
    for found in back:
        assert tiny.differences(expected, found) == []


def resume_sharded(path: str, save: str) -> dict[str, Any]:
    return tiny.fit(TP2, 2, resume=path, save=save, seed=5)["state"]


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO(ShardCkptIO())], ids=["torch", "async"])
def test_other_checkpoint_ios_are_refused_with_the_remedy(io: Any) -> None:
    with pytest.raises(TypeError, match="ShardCkptIO"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=ShardedStrategy(), plugins=[io], logger=False)


def test_storage_options_are_refused_for_paths() -> None:
    with pytest.raises(ValueError, match=r"storage_options are for URLs, and 'x\.ckpt' is none"):
        ShardCkptIO().save_checkpoint({}, "x.ckpt", storage_options={"a": 1})


def saved_with_options_of_the_call(url: str, options: dict[str, Any]) -> None:
    tiny.train(module := tiny.TinyLM(), {}, 1).save_checkpoint(url, storage_options=options)
    stored = lightning_shardckpt.load(url, storage_options=options)
    assert torch.equal(stored["state_dict"]["head.weight"], module.head.weight)


def test_storage_options_of_a_save_are_for_its_url(s3: Bucket) -> None:
    run_ranks(1, saved_with_options_of_the_call, s3.url("a.ckpt"), s3.options)


class Counts(tiny.TinyLM):  # counts samples in metrics that are saved with the model
    def __init__(self) -> None:
        super().__init__()
        self.samples, self.average = SumMetric(), MeanMetric()
        self.samples.persistent(mode=True)
        self.average.persistent(mode=True)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.samples.update(len(batch[0]))
        self.average.update(batch[0].float())
        return super().training_step(batch, index)


def count_samples(steps: int, **paths: Any) -> tuple[float, float]:
    data = tiny.loader(8 // dist.get_world_size(), shuffle=False)
    tiny.train(module := Counts(), {}, steps, data=data, **paths)
    return float(module.samples.compute()), float(module.average.compute())


def refused_metrics(path: str) -> None:
    with pytest.raises(UnsupportedCodeError, match=r"the state of samples is saved with the model"):
        count_samples(3, resume=path)


def test_a_metric_that_is_saved_goes_on_on_one_rank_and_is_refused_on_several(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(1, count_samples, 2, save=path)
    ((samples, mean),) = run_ranks(1, count_samples, 3, resume=path)
    assert (samples, mean) == run_ranks(1, count_samples, 3)[0]
    run_ranks(2, refused_metrics, path)


class Fails(tiny.TinyLM):
    def on_train_batch_end(self, *arguments: Any) -> None:
        raise KeyError("a batch")


def fit_often(strategy: dict[str, Any]) -> list[int]:
    counts = []
    for module in (tiny.TinyLM(), tiny.TinyLM(), Fails(), tiny.TinyLM()):
        run = tiny.trainer(strategy, max_steps=1, limit_val_batches=0)
        with pytest.raises(KeyError, match="a batch") if isinstance(module, Fails) else nullcontext():
            run.fit(module, tiny.loader())
        counts.append(dist.get_pg_count())
    return counts


def test_a_run_takes_the_process_groups_of_the_one_before_unless_that_failed() -> None:
    strategy = {"data_parallel_shard_size": 1, "pipeline_parallel_size": 2}
    for first, second, failed, last in run_ranks(2, fit_often, strategy):
        assert first == second == failed < last


class Halves(tiny.TinyLM):
    """Its hooks store other values than it has, and undo that; one entry is a copy, one is the module's own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        state["blocks.0.down.bias"] = state["blocks.0.down.bias"].clone()
        return state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v / 2 if k == "head.weight" else v for k, v in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["head.weight"] = checkpoint["state_dict"]["head.weight"] * 2
        checkpoint["state_dict"]["gate"] = torch.ones(2, 16)
        checkpoint["state_dict"]["blocks.0.up.bias"] = self.state_dict()["blocks.0.up.bias"]  # as before the load


@pytest.mark.slow
def test_what_hooks_change_in_the_state_dict_counts(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(2, tiny.fit, TP2, 2, kind=Halves, save=path)[0]
    torch.manual_seed(2)
    fresh = Halves()
    for found in run_ranks(2, tiny.fit, {}, 2, kind=Halves, resume=path, seed=2):
        assert tiny.differences(expected["state"], found["state"]) == ["model/blocks.0.up.bias", "model/gate"]
        assert torch.equal(found["state"]["model/blocks.0.up.bias"], fresh.blocks[0].up.bias)
        assert torch.equal(found["state"]["model/gate"], torch.ones(2, 16))


class Edits(tiny.TinyLM):
    """Its hooks change loops and a rate, put another optimizer state into the dict, read it, or replace a parameter."""

    does = "deletes loops"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.does == "deletes loops":
            del checkpoint["loops"]
        elif self.does == "replaces states":
            checkpoint["optimizer_states"] = []
        elif self.does == "reads states":
            checkpoint["optimizer_states"][0]["state"].clear()

    def on_fit_start(self) -> None:
        group = self.optimizers().param_groups[0]  # type: ignore[union-attr]  # there is one
        if self.does == "replaces parameters":
            group["params"] = [torch.nn.Parameter(torch.ones(2))]
        group["lr"] = 9.0  # which the checkpoint's is written over


class KeepsLoaded(pl.Callback):
    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        checkpoint["state_dict"]["gate"].zero_()  # the module is loaded already
        self.head = checkpoint["state_dict"]["head.bias"]


def resume_with_edits(strategy: Any, path: str, does: str = "deletes loops") -> tuple[Any, ...]:
    pl.seed_everything(2, verbose=False)
    keeps, module = KeepsLoaded(), Edits()
    module.does = does
    for block in module.blocks:
        block.dropout.p = 0.0  # Lightning does not go on with random numbers
    run = tiny.train(module, strategy, 6, resume=path, data=tiny.loader(shuffle=False), callbacks=[keeps])
    return tiny.full_state(module, run.optimizers), tiny.whole(keeps.head), run.global_step, run.current_epoch


def resume_with_a_new_optimizer(path: str) -> None:
    for does in ("replaces states", "replaces parameters"):
        with pytest.raises(StateError, match="optimizer_states or the parameters of AdamW"):
            resume_with_edits({}, path, does)
    with pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
        resume_with_edits({}, path, "reads states")


def test_what_hooks_change_of_loops_counts_and_callbacks_see_copies(tmp_path: Path) -> None:
    """Oracle: Lightning on one process, which loads them from the dict when all hooks are done."""
    path = str(tmp_path / "a.ckpt")
    (saved,) = run_ranks(1, tiny.fit, {}, 3, save=path, data={"shuffle": False})
    (expected,) = run_ranks(1, resume_with_edits, "auto", path, init_process_group=False)
    (found,) = run_ranks(1, resume_with_edits, {}, path)
    run_ranks(1, resume_with_a_new_optimizer, path)
    assert tiny.differences(found[0], expected[0]) == [] and found[2:] == expected[2:]
    assert torch.equal(found[1], expected[1]) and torch.equal(found[1], saved["state"]["model/head.bias"])


def test_what_is_no_checkpoint_or_cannot_be_removed_stays_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "foreign.ckpt").mkdir()
    (tmp_path / "foreign.ckpt" / "precious").touch()
    with pytest.warns(UserWarning, match=r"not removed: .*foreign\.ckpt"):
        ShardCkptIO().remove_checkpoint(tmp_path / "foreign.ckpt")
    assert (tmp_path / "foreign.ckpt" / "precious").exists()
    ShardCkptIO().remove_checkpoint(tmp_path / "nothing.ckpt")
