"""What the checkpoints of a run will not hold is said when training begins, not when the first one is saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_shardckpt import ShardCkptIO, load, load_from_checkpoint
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.from_checkpoint import stored_hyper_parameters
from tests.support import tiny
from tests.support.own_state import AddsObject, Wraps
from tests.support.pool import run_ranks

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "limit_train_batches": 2,
    "limit_val_batches": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


class Uploads(MLFlowLogger):
    """Lightning's logger without a server; ``uploaded`` are the files that it would have sent."""

    name = version = "uploads"
    save_dir = None

    def __init__(self, log_model: Any) -> None:
        Logger.__init__(self)
        self._log_model, self._logged_model_time = log_model, {}
        self.uploaded: list[str] = []

    @property
    def experiment(self) -> Any:
        return self

    _run_id = "a run"

    def log_artifact(self, run: str, path: str, place: str) -> None:
        self.uploaded.append(path)

    def log_artifacts(self, *args: Any) -> None: ...

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def finalize(self, status: str = "success") -> None: ...


def told_of_uploads(folder: str, strategy: str) -> tuple[list[str], int]:
    logger = Uploads("all")
    plugins: list[Any] = [ShardCkptIO()] if strategy != "plain" else []
    trainer = pl.Trainer(
        **QUIET,
        devices=2 if strategy == "sharded" else 1,
        strategy={"plain": "auto"}.get(strategy, strategy),
        plugins=plugins,
        logger=logger,
        callbacks=[ModelCheckpoint(folder)],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(BoringModel())
    return [str(w.message) for w in caught if "uploads none" in str(w.message)], len(logger.uploaded)


def test_a_logger_that_is_to_upload_checkpoints_is_told_that_it_can_not(tmp_path: Path) -> None:
    (plain,) = run_ranks(1, told_of_uploads, str(tmp_path / "plain"), "plain")
    assert plain == ([], 1)  # as it is under plain Lightning
    said, uploaded = run_ranks(2, told_of_uploads, str(tmp_path / "sharded"), "sharded")[0]
    assert uploaded == 0 and len(said) == 1 and "Uploads(log_model=…)" in said[0]


class Keeps(pl.Callback):
    def __init__(self, where: str) -> None:
        self.where, self.saves = where, 0
        self.epochs, self.mean = list[int](), torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        torch.rand(1)
        return {"saves": self.saves} | ({"lock": object()} if self.where == "callback" else {})

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.saves += 1
        self.epochs.append(trainer.current_epoch)
        self.mean.add_(1.0)
        if self.where == "hook of a callback":
            checkpoint["scaler"] = object()


class Brings(BoringModel):
    """Brings what can't be stored, in one place or another; notes what its own hook saw."""

    def __init__(self, where: str = "", encoder: Any = None, nested: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters("encoder", "nested")
        self.where, self.saves, self.began = where, 0, False
        self.seen = list[float]()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.began = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saves += 1
        self.seen.append(torch.rand(1).item())
        checkpoint["saves"] = self.saves
        if self.where == "hook":
            checkpoint["encoder"] = object()

    def configure_optimizers(self) -> Any:
        kind = {"optimizer": AddsObject, "optimizer wraps": Wraps}.get(self.where, torch.optim.SGD)
        optimizer = kind(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, Decay() if self.where == "scheduler" else lambda step: 1.0
        )
        return [optimizer], [scheduler]


class Decay:
    def __init__(self) -> None:
        self.lock = object()

    def __call__(self, step: int) -> float:
        return 1.0


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return BoringModel().train_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": object()}


def begun(folder: str, where: str, options: Any = ()) -> tuple[str, bool, list[str], tuple[Any, ...]]:
    """Collective: every rank must call it. Returns an error, whether training began, warnings, what hooks have seen."""
    pl.seed_everything(3)
    options = dict(options)
    world = torch.distributed.get_world_size()
    module = Brings(where, **{key: options.pop(key) for key in ("encoder", "nested") if key in options})
    keeps, said = Keeps(where), list[str]()
    saver = ModelCheckpoint(folder, **options.pop("saver", {}))
    data = Data() if where == "datamodule" else None
    resume = options.pop("resume", None)
    strategy = options.pop("strategy", "sharded")
    trainer = pl.Trainer(**QUIET, devices=world, strategy=strategy, logger=False, callbacks=[keeps, saver], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = ""
        try:
            trainer.fit(module, data, ckpt_path=resume)
        except StateError as raised:
            error = str(raised)
    said = [str(one.message) for one in caught if "hyper-parameters" in str(one.message)]
    drawn = torch.rand(1).item()
    marks = module.saves, keeps.saves, module.seen, drawn, keeps.epochs, keeps.mean.tolist()
    return error, module.began, said, marks


REFUSED = {
    "callback": "callbacks/Keeps/lock: builtins.object",
    "scheduler": "lr_schedulers/0/lr_lambdas/0/lock: builtins.object",
    "datamodule": "Data/vocabulary: builtins.object",
    "optimizer": "optimizer_states/0/generator: builtins.object",
    "optimizer wraps": "Wraps has a state_dict of its own",
}


def begun_everywhere(folder: str) -> dict[str, tuple[str, bool, list[str], tuple[Any, ...]]]:
    """Collective: every rank must call it."""
    return {where: begun(f"{folder}/{where}", where) for where in REFUSED}


def test_what_cannot_be_saved_is_refused_by_the_first_save_with_its_path(tmp_path: Path) -> None:
    for found in run_ranks(2, begun_everywhere, str(tmp_path)):
        for where, expected in REFUSED.items():
            assert expected in found[where][0], where
    assert [folder.name for folder in tmp_path.iterdir() if any(folder.iterdir())] == []


def begun_quietly(folder: str) -> list[Any]:
    """Collective: every rank must call it."""
    never = {"save_top_k": 0}
    light = {"save_weights_only": True}
    return [
        begun(f"{folder}/a", "callback", {"saver": never}),
        begun(f"{folder}/b", "optimizer", {"saver": light}),
        begun(f"{folder}/c", "hook"),
        begun(f"{folder}/d", "hook of a callback"),
    ]


def test_only_what_is_going_to_be_saved_is_refused_and_of_hooks_at_the_save(tmp_path: Path) -> None:
    for found in run_ranks(1, begun_quietly, str(tmp_path)):
        assert all(began for _, began, _, _ in found)
        errors = [error for error, _, _, _ in found]
        assert errors[:2] == ["", ""] and "encoder: builtins.object" in errors[2]
        assert "scaler: builtins.object" in errors[3]


def test_hooks_have_run_as_often_as_under_plain_lightning(tmp_path: Path) -> None:
    plain, ours = (run_ranks(1, begun, str(tmp_path / name), "", {"strategy": name})[0] for name in ("ddp", "sharded"))
    assert ours == plain and plain[3][:2] == (1, 1)


def test_hyper_parameters_that_are_missing_are_named_at_a_save_and_at_a_load(tmp_path: Path) -> None:
    nested = {"scale": [1, print]}
    found = run_ranks(2, begun, str(tmp_path), "", {"encoder": print, "nested": nested})
    assert all(began for _, began, _, _ in found)
    assert len(found[0][2]) == 1 and "hyper_parameters/nested/scale/1: builtins.builtin_function" in found[0][2][0]
    (saved,) = tmp_path.iterdir()
    with pytest.raises(StateError, match=r"(?s)encoder  .*nested/scale/1  .*encoder=…, nested=…"):
        load_from_checkpoint(Brings, saved)
    with pytest.raises(StateError, match=r"nested=…\)$"):
        load_from_checkpoint(Brings, saved, encoder=print)
    assert load_from_checkpoint(Brings, saved, encoder=1, nested=2).hparams == {"encoder": 1, "nested": 2}
    with pytest.warns(UserWarning, match=r"does not hold the hyper-parameters \['encoder', 'nested'\]"):
        assert stored_hyper_parameters(str(saved)) == {}
    with pytest.warns(UserWarning, match="takes no hyper-parameters from .*which cannot be read as it is"):
        assert stored_hyper_parameters(str(tmp_path / "none")) == {}


class Saves(tiny.TinyLM):
    """Its hook looks at what it saves, as they do."""

    hooked = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hooked += 1
        checkpoint["names"] = sorted(checkpoint["state_dict"])
        checkpoint["weight"] = next(iter(checkpoint["state_dict"].values())).sum()


def saves_as_a_stage(folder: str, strategy: dict[str, Any]) -> tuple[int, list[str]]:
    """Collective: every rank must call it."""
    pl.seed_everything(1)
    saver = ModelCheckpoint(folder, every_n_train_steps=2)
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0, callbacks=[saver], enable_checkpointing=True)
    run.fit(module := Saves(), tiny.loader())
    return module.hooked, list(load(saver.best_model_path)["names"])


@pytest.mark.parametrize(
    "strategy",
    [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}],
    ids=["pipeline", "tensor"],
)
def test_a_run_on_stages_is_looked_at_as_well(strategy: dict[str, Any], tmp_path: Path) -> None:
    found = run_ranks(2, saves_as_a_stage, str(tmp_path), strategy)
    assert [hooked for hooked, _ in found] == [1, 1] and found[0][1] == found[1][1]
