"""A load from a corrupted checkpoint ends on all ranks, and its objects, a mix then, are neither used nor saved.

Of the Trainer and of the functions. A full load of another checkpoint makes them usable again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_shardckpt as ckpt
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
    found["told"] = [str(one.message) for one in told if "no checkpoint was saved" in str(one.message)]
    found["kept"] = tiny.differences(first[0], tiny.full_state(module, [])) == []
    found["train"] = error_of(lambda: run(5).fit(module, tiny.loader()))
    found["predict"] = error_of(lambda: run().predict(module, tiny.loader(count=4, shuffle=False)))
    part = next(part for part in module.modules() if not [*part.children()])
    found["call"] = error_of(lambda: part(torch.ones(1)))
    module.train()  # which Lightning does not do after an error
    module.losses.clear()
    resumed = run()
    resumed.fit(module, tiny.loader(), ckpt_path=good)
    found["losses"] = module.losses == straight["losses"][2:]
    found["state"] = tiny.differences(tiny.full_state(module, resumed.optimizers), straight["state"]) == []
    found["saved"] = sorted(os.listdir(folder))
    return found


@pytest.mark.parametrize("strategy", [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.slow)], ids=str)
def test_a_module_that_is_partly_loaded_is_neither_trained_nor_saved_until_it_has_loaded_another_checkpoint(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(2, resumes, strategy, str(tmp_path))
    assert any("CorruptionError" in found["resume"] and "bad.ckpt" in found["resume"] for found in ranks)
    for found in ranks:
        assert found["resume"] and not found["kept"]
        assert ["a mix of two states" in one for one in found["told"]] == [True]
        for use in ("train", "predict", *(() if strategy else ("call",))):  # stages refuse calls at any time
            assert found[use].startswith("StateError: loading") and "bad.ckpt" in found[use], found[use]
        assert found["losses"] and found["state"]
        assert found["saved"] == ["bad.ckpt", "good.ckpt"]


# ── functions ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(self.up(x).tanh()).tanh())
        return found


def sharded(seed: int) -> dict[str, Any]:
    """A sharded net, and an optimizer with state."""
    net = Net(seed)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=seed / 100)
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def refusals(state: dict[str, Any], folder: str) -> None:
    """Every use of the objects is refused, on every rank, whichever tensors it has filled."""
    net, optimizer = state["model"], state["optimizer"]
    uses: list[Callable[[], Any]] = [
        lambda: net(torch.ones(2, 64)),
        lambda: net.up(torch.ones(2, 64)),
        optimizer.step,
        lambda: ckpt.save(f"{folder}/mix", {"model": net}),
        lambda: ckpt.save(f"{folder}/mix", {"optimizer": optimizer}),
        lambda: ckpt.save_async(f"{folder}/mix", state),
    ]
    for use in uses:
        assert "a mix of two states" in (found := error_of(use)) and "bad" in found, found
    assert not os.path.exists(f"{folder}/mix")


def load_a_corrupt_one(folder: str) -> None:
    good, bad = f"{folder}/good", f"{folder}/bad"
    stored = sharded(1)
    ckpt.save(good, stored)
    ckpt.save(bad, stored)
    ckpt.save(f"{folder}/head", {"model": nn.ModuleDict({"head": stored["model"].head})})
    corrupt_last_tensor(bad)
    state = sharded(2)
    before = tiny.full_state(state["model"], [state["optimizer"]])
    assert "CorruptionError" in error_of(lambda: ckpt.load(bad, state))
    assert tiny.differences(before, tiny.full_state(state["model"], [state["optimizer"]])) != []
    refusals(state, folder)
    assert "CorruptionError" in error_of(lambda: ckpt.load(bad, state))
    refusals(state, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the differences
        ckpt.load(f"{folder}/head", {"model": state["model"]}, strict=False)
    refusals(state, folder)  # some tensors are still of the failed load
    ckpt.load(good, state)
    ckpt.save(f"{folder}/again", state)
    for one in (stored, state):
        one["model"](torch.ones(2, 64)).square().sum().backward()
        one["optimizer"].step()
    found, expected = (tiny.full_state(one["model"], [one["optimizer"]]) for one in (state, stored))
    assert tiny.differences(found, expected) == []


def test_objects_of_functions_are_refused_until_all_their_tensors_are_loaded(tmp_path: Path) -> None:
    run_ranks(2, load_a_corrupt_one, str(tmp_path))
