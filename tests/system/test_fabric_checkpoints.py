"""What Fabric saves and loads under ShardedStrategy. Oracles: whole state before the save, and Lightning's rules."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_shardckpt import load, metadata, save
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.fabric import ShardCkptIO
from tests.support import tiny
from tests.support.fabrics import fabric_of
from tests.support.pool import run_ranks
from tests.support.whole_state import differing, whole


class Mlp(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.down = nn.Linear(6, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.up(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.down(x)


PLAN = {"up": "colwise_gather_output", "blocks.*": "colwise_gather_output"}
TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}


def script(fabric: Fabric, seed: int, steps: int = 2) -> dict[str, Any]:
    """Everything that a training script saves, after some steps."""
    torch.manual_seed(seed)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    for _ in range(steps):
        fabric.backward(model(torch.ones(4, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": steps, "note": {"a": [1, 2]}}


def whole_of(state: dict[str, Any]) -> dict[str, Any]:
    return {key: whole(getattr(value, "optimizer", value)) for key, value in state.items()}


def save_everything(path: str, expected: str) -> None:
    fabric = fabric_of("32-true")
    state = script(fabric, 1)
    fabric.save(path + "/all", state)
    full = whole_of(state)
    fabric.save(path + "/all", {**state, "step": 7})  # replaces the one that is there
    filters = {"model": lambda name, _: "bias" not in name, "note": lambda name, _: False}
    fabric.save(path + "/filtered", state, filter=filters)
    fabric.save(path + "/optimizer", {"optimizer": state["optimizer"]})
    fabric.save(path + "/model", {"model": state["model"]})
    again = script(fabric, 2, 0)
    assert fabric.load(path + "/all", again) == {}
    assert differing(whole_of(again), full | {"step": 7}) == []
    # the next steps are the same
    for one in (state, again):
        fabric.backward(one["model"](torch.ones(4, 3)).square().mean())
        one["optimizer"].step()
    assert differing(whole_of(again), whole_of(state) | {"step": 7}) == []
    if fabric.is_global_zero:
        torch.save(full, expected)


def load_everything(path: str, expected: str, options: dict[str, Any]) -> None:
    fabric = fabric_of("32-true", **options)
    full = torch.load(expected)
    state = script(fabric, 3, 1)
    rest = fabric.load(path + "/all", {"model": state["model"]})
    assert rest.keys() == {"scheduler", "step", "note"} and rest["step"] == 7
    assert differing(whole(state["model"]), full["model"]) == []
    with pytest.raises(MismatchError, match="'coconut' of the state"):
        fabric.load(path + "/all", {"model": state["model"], "coconut": 1})
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert fabric.load(path + "/all", {"coconut": 1, "step": 0}, strict=False).keys() == {"scheduler", "note"}
    with pytest.raises(MismatchError, match=r"up.bias  in model only"):
        fabric.load(path + "/filtered", {"model": state["model"]})
    assert metadata(path + "/filtered").tensors.keys() & {"up.bias", "up.weight"} == {"up.weight"}

    alone = script(fabric, 4, 1)
    fabric.load(path + "/model", {"anything": alone["model"]})
    fabric.load_raw(path + "/model", state["model"])
    assert differing(whole(state["model"]), full["model"]) == []
    found = fabric.load(path + "/all")
    assert differing(dict(found["model"]), full["model"]) == [] and found["step"] == 7
    assert found["optimizer"]["param_groups"][0]["lr"] == full["optimizer"]["param_groups"][0]["lr"]


def lone_optimizer(path: str, expected: str, options: dict[str, Any]) -> None:
    fabric = fabric_of("32-true", **options)  # as a script of its own
    state = script(fabric, 3, 1)
    fabric.load_raw(path + "/optimizer", state["optimizer"])
    assert differing(whole_of(state)["optimizer"], torch.load(expected)["optimizer"]) == []


def every_load(path: str, expected: str, options: dict[str, Any]) -> None:
    load_everything(path, expected, options)
    lone_optimizer(path, expected, options)


def test_what_two_ranks_saved_loads_on_another_topology(tmp_path: Path) -> None:
    folder, expected = str(tmp_path), str(tmp_path / "expected.pt")
    run_ranks(2, save_everything, folder, expected)
    run_ranks(2, every_load, folder, expected, TENSOR)


# ── the Trainer ───────────────────────────────────────────────────────────────────────────────────────────────────


def from_trainer_to_fabric_and_back(folder: str) -> None:
    path, back = folder + "/trainer.ckpt", folder + "/fabric.ckpt"
    got = tiny.fit({}, 3, save=path)
    fabric = fabric_of("32-true")
    torch.manual_seed(9)
    module = tiny.TinyLM()
    module.configure_model()
    optimizer = module.configure_optimizers()["optimizer"]
    module, optimizer = fabric.setup(module, optimizer)
    state = {"model": module, "optimizer": optimizer, "global_step": 0}
    assert "callbacks" in fabric.load(path, state)
    assert state["global_step"] == 3
    assert tiny.differences(tiny.full_state(module.module, [optimizer.optimizer]), got["state"]) == []
    fabric.save(back, state)

    plain = tiny.TinyLM()
    plain.configure_model()
    own = plain.configure_optimizers()["optimizer"]
    load(path, {"state_dict": plain, "optimizer_states": [own]})
    assert tiny.differences(tiny.full_state(plain, [own]), got["state"]) == []
    save(folder + "/plain.ckpt", {"net": plain, "optimizer": own}, overwrite=True)

    file = folder + "/file.pt"  # as plain Fabric has it
    if fabric.is_global_zero:
        consolidate(back, file)
    fabric.barrier()
    ways: list[tuple[str, Any]] = [(name, {"tensor_parallel_size": 1}) for name in (back, folder + "/plain.ckpt", file)]
    for name, strategy in [*ways, (back, "ddp"), (file, "ddp")]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = tiny.fit(strategy, 0, resume=name, seed=7)
        assert any("is not of Lightning's Trainer" in str(one.message) for one in told) == (dist.get_rank() == 0)
        assert tiny.differences(found["state"], got["state"]) == []


def test_a_trainer_fabric_and_functions_load_each_others_model_and_optimizer(tmp_path: Path) -> None:
    run_ranks(2, from_trainer_to_fabric_and_back, str(tmp_path))


# ── asynchronous ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_in_the_background(path: str) -> None:
    fabric = fabric_of("32-true", io=ShardCkptIO(use_async=True))
    state = script(fabric, 1)
    full = whole_of(state)
    fabric.save(path + "/a", state)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    again = script(fabric, 2, 0)
    fabric.load(path + "/a", again)  # waits for it
    assert differing(whole_of(again), full) == []
    fsync = os.fsync
    if fabric.global_rank == 1:

        def full_disk(file: int) -> None:
            raise OSError(28, "No space left on device")

        os.fsync = full_disk
    fabric.save(path + "/b", state)
    with pytest.raises(OSError, match="No space left"):
        fabric.strategy.wait()
    os.fsync = fsync
    fabric.save(path + "/b", again)
    fabric.strategy.wait()
    assert metadata(path + "/b").step == 2


@pytest.mark.slow
def test_asynchronous_saves_have_the_values_of_the_call_and_tell_all_ranks_of_errors(tmp_path: Path) -> None:
    run_ranks(2, save_in_the_background, str(tmp_path))


# ── loaders ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted(DataLoader[Any]):
    """Has a state of its own: how many batches it gave."""

    given = 0

    def __iter__(self) -> Any:
        for batch in list(super().__iter__())[self.given :]:
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def with_loaders(directory: str) -> dict[str, Any]:
    """Save a state with loaders, as litgpt does, and load it: by Fabric, and by functions."""
    fabric, found = fabric_of("32-true"), dict[str, Any]()

    def state_of(seed: int) -> dict[str, Any]:
        loaders: Any = DataLoader(range(8), 2), Counted(range(8), 2, shuffle=False)  # type: ignore[arg-type]
        plain, counted = fabric.setup_dataloaders(*loaders, use_distributed_sampler=False)
        model = script(fabric, seed, 0)["model"]
        return {"model": model, "train_dataloader": plain, "more": [counted], "step": seed}

    for name, keep, take in (("fabric", fabric.save, fabric.load), ("functions", save, load)):
        state, fresh = state_of(2), state_of(1)
        for _ in range(3):
            given = iter(state["more"][0])
            next(given)
        loader = fresh["train_dataloader"]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            keep(f"{directory}/{name}", state)
        rest = take(f"{directory}/{name}", fresh)
        said = len([one for one in told if "'train_dataloader': a DataLoader has no state dict" in str(one.message)])
        found[name] = (
            said,
            rest,
            fresh["step"],
            fresh["train_dataloader"] is loader,
            list(loader),
            [batch.tolist() for batch in fresh["more"][0]],
        )
    return found


@pytest.mark.slow
def test_loaders_in_a_state_keep_their_place_and_go_on_if_they_can(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, with_loaders, str(tmp_path))):
        for said, rest, step, same, batches, left in found.values():
            assert (said, rest, step, same, len(batches), left) == (int(rank == 0), {}, 2, True, 4, [[6, 7]])


class WithMetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(2, 2), SumMetric()
        self.seen.persistent(mode=True)


def count(path: str, resume: bool) -> float:
    fabric = fabric_of()
    module: Any = fabric.setup(WithMetric())
    if resume:
        fabric.load(path, {"model": module})
    module.seen.update(8 / fabric.world_size)
    if not resume:
        fabric.save(path, {"model": module})
    return float(module.seen.compute())


def test_a_metric_that_is_saved_counts_once_on_several_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "counted")
    assert run_ranks(1, count, path, False) == [8]
    assert run_ranks(2, count, path, True) == [16, 16]
    path = str(tmp_path / "counted by two")
    assert run_ranks(2, count, path, False) == [8, 8]
    assert run_ranks(2, count, path, True) == [16, 16]
