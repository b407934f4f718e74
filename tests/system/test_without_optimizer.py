"""Modules without optimizers, saved and resumed through every door of the Trainer. Oracle: Lightning's own files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.cli import main
from tests.support import tiny
from tests.support.pool import run_ranks

DOORS: dict[str, dict[str, Any]] = {
    "plain": {"plugins": []},
    "own": {"plugins": [ShardCkptIO(sync_files=False)]},
    "sharded": {"plugins": [ShardCkptIO(sync_files=False)]},
}


class Counting(pl.LightningModule):
    """Learns by counting alone."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.automatic_optimization = answer is None
        self.embed = nn.Embedding(tiny.VOCABULARY, 4)
        self.register_buffer("seen", torch.zeros(tiny.VOCABULARY))

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        counts = torch.bincount(tokens.flatten(), minlength=tiny.VOCABULARY)
        self.seen += self.trainer.strategy.reduce(counts, reduce_op="sum")  # not a rank's own, which would be refused
        return self.embed(tokens).square().mean()

    def configure_optimizers(self) -> Any:
        return self.answer


def run(door: str, answer: Any, seed: int, path: str, resume: bool) -> dict[str, Tensor]:
    """Train an epoch of two batches, and save; or resume after it."""
    warnings.filterwarnings("ignore", ".*returned `None`, this fit will run with no optimizer")
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    pl.seed_everything(seed, verbose=False)
    module, world = Counting(answer), torch.distributed.get_world_size()
    strategy: Any = {} if door == "sharded" else "ddp" if world > 1 else "auto"
    trainer = tiny.trainer(strategy, max_epochs=1, limit_train_batches=2, **DOORS[door])
    trainer.fit(module, tiny.loader(), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    assert trainer.current_epoch == 1
    return {name: tiny.whole(tensor) for name, tensor in module.state_dict().items()}


def save_by_each(folder: str, answer: Any) -> dict[str, dict[str, Tensor]]:
    return {door: run(door, answer, 1, f"{folder}/{door}.ckpt", resume=False) for door in DOORS}


def resume_by(doors: list[tuple[str, str]], answer: Any) -> list[dict[str, Tensor]]:
    return [run(door, answer, 2, path, resume=True) for door, path in doors]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "world"), [pytest.param(None, 1, id="none, one rank"), pytest.param([], 2, id="empty list, two ranks")]
)
def test_a_module_without_optimizers_is_saved_and_resumed_through_every_door(
    answer: Any, world: int, tmp_path: Path
) -> None:
    saved = run_ranks(3 - world, save_by_each, str(tmp_path), answer)[0]
    expected = [{}] if answer is None else []
    plain = torch.load(tmp_path / "plain.ckpt")
    assert plain["optimizer_states"] == expected
    ways = [("plain", "plain"), *((by, door) for door in ("own", "sharded") for by in DOORS)]
    paths = [(door, str(tmp_path / f"{by}.ckpt")) for by, door in ways if door != "plain" or by == "plain"]
    for by in ("own", "sharded"):
        whole = ShardCkptIO().load_checkpoint(tmp_path / f"{by}.ckpt")
        assert whole.keys() >= plain.keys() and whole["optimizer_states"] == expected
        assert main(["consolidate", str(tmp_path / f"{by}.ckpt"), "--output_file", str(tmp_path / f"{by}.pt")]) == 0
        assert torch.load(tmp_path / f"{by}.pt")["optimizer_states"] == expected
        paths.append(("plain", str(tmp_path / f"{by}.pt")))
    for (door, path), found in zip(paths, run_ranks(world, resume_by, paths, answer)[0], strict=True):
        by = Path(path).stem
        assert tiny.differences(found, saved[by]) == [], f"{path} resumed by {door}"
