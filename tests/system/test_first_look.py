"""What the checkpoints of a run will not hold is said when training begins, not when the first one is saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_shardckpt import ShardCkptIO
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
    for strategy, world in (("sharded", 2), ("auto", 1)):
        said, uploaded = run_ranks(world, told_of_uploads, str(tmp_path / strategy), strategy)[0]
        assert uploaded == 0 and len(said) == 1 and "Uploads(log_model=…)" in said[0]
