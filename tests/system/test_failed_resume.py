"""A resume from a corrupted checkpoint ends the run on all ranks, and what it left half filled is never used."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.support import tiny
from tests.support.pool import run_ranks

STRATEGIES: list[dict[str, Any]] = [{}, {"pipeline_parallel_size": 2}]


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def corrupt_last_tensor(path: str) -> None:
    """On rank 0; in the largest shard file of the model, near its end, so that other tensors come before."""
    if dist.get_rank() == 0:
        file = max(Path(path).glob("model-dist-*.safetensors"), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    dist.barrier()


def resumes(strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    """What a user may try with a module whose resume failed; the good checkpoint is of step 2."""
    good, bad = f"{folder}/good.ckpt", f"{folder}/bad.ckpt"
    straight = tiny.fit(strategy, 4, callbacks=[tiny.SaveAt(2, good), tiny.SaveAt(3, bad)])
    corrupt_last_tensor(bad)
    pl.seed_everything(9)
    module = tiny.TinyLM()

    def run(steps: int = 4, **more: Any) -> pl.Trainer:
        return tiny.trainer(strategy, max_steps=steps, limit_val_batches=0, **more)

    first: list[dict[str, Any]] = []
    module.on_fit_start = lambda: first.append(tiny.full_state(module, []))  # type: ignore[method-assign]
    run(0).fit(module, tiny.loader())  # what the module had before
    failing = run(enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(folder, "ended")])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found: dict[str, Any] = {"resume": error_of(lambda: failing.fit(module, tiny.loader(), ckpt_path=bad))}
    found["told"] = [str(one.message) for one in told if "half filled" in str(one.message)]
    found["kept"] = tiny.differences(first[0], tiny.full_state(module, [])) == []
    found["train"] = error_of(lambda: run(5).fit(module, tiny.loader()))
    found["predict"] = error_of(lambda: run().predict(module, tiny.loader(count=4, shuffle=False)))
    module.train()  # which Lightning does not do after an error
    module.losses.clear()
    resumed = run()
    resumed.fit(module, tiny.loader(), ckpt_path=good)
    found["losses"] = module.losses == straight["losses"][2:]
    found["state"] = tiny.differences(tiny.full_state(module, resumed.optimizers), straight["state"]) == []
    found["saved"] = sorted(os.listdir(folder))
    return found


@pytest.mark.parametrize("strategy", [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.slow)], ids=str)
def test_a_module_that_is_half_filled_is_neither_trained_nor_saved_until_it_has_loaded_another_checkpoint(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(2, resumes, strategy, str(tmp_path))
    assert any("CorruptionError" in found["resume"] and "bad.ckpt" in found["resume"] for found in ranks)
    for found in ranks:
        assert found["resume"] and not found["kept"]
        assert ["was not saved" in one for one in found["told"]] == [True] * (found is ranks[0])
        for use in ("train", "predict"):
            assert found[use].startswith("StateError: loading") and "bad.ckpt" in found[use], found[use]
        assert found["losses"] and found["state"]
        assert found["saved"] == ["bad.ckpt", "good.ckpt"]
