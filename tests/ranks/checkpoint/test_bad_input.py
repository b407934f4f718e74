"""Wrong paths and other models: one clear error on every rank, before anything changes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, MismatchError
from tests.support import tiny
from tests.support.pool import run_ranks

STRATEGIES: dict[str, dict[str, Any]] = {"fsdp2": {}, "pp2": {"pipeline_parallel_size": 2}}


class Wider(tiny.TinyLM):
    """A layer, and so a stage of a pipeline, has more parameters, others have other shapes and dtypes."""

    def _build(self) -> None:
        super()._build()
        self.blocks[0].more = torch.nn.Parameter(torch.ones(2))
        self.blocks[1].more = torch.nn.Parameter(torch.ones(2))
        self.head = torch.nn.Linear(16, tiny.VOCABULARY + 1)
        self.mean = self.mean.long()

    def configure_optimizers(self) -> Any:
        self.before = tiny.full_state(self, [])
        return super().configure_optimizers()


def load_other_model(strategy: dict[str, Any], path: str, strict: bool) -> tuple[str, dict[str, Any]]:
    """What the error, or on one rank the warning, says, and what the model has then."""
    pl.seed_everything(3)
    module, said = Wider(), ""
    module.strict_loading = strict
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0)
    if strict:
        with pytest.raises(MismatchError) as error:
            run.fit(module, tiny.loader(), ckpt_path=path)
        assert tiny.differences(module.before, tiny.full_state(module, [])) == []
        return str(error.value), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.validate(module, tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
    said = "".join(str(w.message) for w in caught if "differences" in str(w.message))
    return said, tiny.full_state(module, [])


def save(path: str) -> dict[str, Any]:
    return tiny.fit({}, 2, save=path)["state"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("saved") / "a.ckpt")
    return path, run_ranks(2, save, path)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_differences_between_model_and_checkpoint_are_listed_at_once(strategy: str, saved: Any) -> None:
    first, second = run_ranks(2, load_other_model, STRATEGIES[strategy], saved[0], True)
    assert first == second
    for line in (
        "head.weight  shape (37, 16) in checkpoint, (38, 16) in model",
        "mean  dtype F64 in checkpoint, I64 in model",
        "blocks.0.more  in model only",
        "blocks.1.more  in model only",
        "optimizer 0: blocks.1.more  in model only",
    ):
        assert sum(line == found.strip().partition(";")[0] for found in first[0].splitlines()) == 1, first[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_strict_loading_the_intersection_is_loaded_and_the_rest_told_once(strategy: str, saved: Any) -> None:
    path, expected = saved
    found = run_ranks(2, load_other_model, STRATEGIES[strategy], path, False)
    assert [said.count("blocks.1.more  in model only") for said, _ in found] == [1, 0]
    for _, state in found:
        different = tiny.differences({k: expected[k] for k in state if k in expected}, state)
        odd = {"model/head.bias", "model/head.weight", "model/mean", "model/blocks.0.more", "model/blocks.1.more"}
        assert set(different) == odd & state.keys()


def try_each(paths: list[str]) -> list[tuple[str, str]]:
    found = []
    for path in paths:
        with pytest.raises((CheckpointNotFoundError, FormatError)) as error:
            tiny.fit({}, 2, resume=path)
        found.append((type(error.value).__name__, str(error.value)))
    return found


def test_a_path_that_is_no_checkpoint_is_explained_on_every_rank(tmp_path: Path, saved: Any) -> None:
    (tmp_path / "empty.ckpt").mkdir()
    (tmp_path / "dcp.ckpt").mkdir()
    (tmp_path / "dcp.ckpt" / ".metadata").touch()
    expected = {
        str(tmp_path / "nothing.ckpt"): ("CheckpointNotFoundError", "nothing.ckpt"),
        str(tmp_path / "empty.ckpt"): ("CheckpointNotFoundError", "not a complete checkpoint"),
        str(Path(saved[0]).parent): ("CheckpointNotFoundError", f"did you mean {saved[0]!r}"),
        str(tmp_path / "dcp.ckpt"): ("FormatError", ".metadata"),
    }
    for rank in run_ranks(2, try_each, list(expected)):
        for (kind, said), (expected_kind, words) in zip(rank, expected.values(), strict=True):
            assert kind == expected_kind and words in said
