"""What Fabric saves and loads under ShardedStrategy. Oracles: whole state before the save, and Lightning's rules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt import load, metadata, save
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy
from tests.support import tiny
from tests.support.fabrics import Language, fabric_of
from tests.support.nets import GLOBAL_BATCH, dataset, optimizer_of
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
    another = fabric_of("32-true", **options)  # as a script of its own
    its = script(another, 3, 1)
    another.load_raw(path + "/optimizer", its["optimizer"])
    assert differing(whole_of(its)["optimizer"], full["optimizer"]) == []


def test_what_two_ranks_saved_loads_on_another_topology(tmp_path: Path) -> None:
    folder, expected = str(tmp_path), str(tmp_path / "expected.pt")
    run_ranks(2, save_everything, folder, expected)
    run_ranks(2, load_everything, folder, expected, TENSOR)


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
    fabric.save(path + "/b", again)
    fabric.strategy.wait()
    assert metadata(path + "/b").step == 2


@pytest.mark.slow
def test_asynchronous_saves_have_the_values_of_the_call(tmp_path: Path) -> None:
    run_ranks(2, save_in_the_background, str(tmp_path))


# ── pipelines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def language(fabric: Fabric) -> tuple[Any, Any]:
    module = Language("tied net")
    return fabric.setup(module, optimizer_of(module))  # type: ignore[no-any-return]


def save_stages(path: str) -> None:
    fabric = fabric_of("64-true", pipeline_parallel_size=2)
    torch.manual_seed(3)
    module, optimizer = language(fabric)
    (batch, *_) = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=GLOBAL_BATCH))
    fabric.backward(fabric.strategy.run_step(module, batch))
    optimizer.step()
    names = ("net.blocks.0.up.weight", "net.blocks.2.up.weight")  # of the first stage, and of the last
    state = {"model": module, "optimizer": optimizer, "step": 1, "average": {name: torch.ones(300) for name in names}}
    fabric.save(path, state)
    again, its = language(fabric)
    average = {name: torch.zeros(300) for name in names}
    loaded = {"model": again, "optimizer": its, "step": 0, "average": average}
    assert fabric.load(path, loaded) == {} and loaded["step"] == 1
    assert all(tensor.sum() == 300 for tensor in average.values())
    assert differing(whole(again), whole(module)) == []
    assert differing(whole(its.optimizer), whole(optimizer.optimizer)) == []
    if fabric.global_rank == 1:
        again.module.net.norm.register_buffer("more", torch.zeros(2))
    with pytest.raises(MismatchError, match="more  in model only"):
        fabric.load(path, {"model": again})


def load_whole(path: str, file: str) -> None:
    fabric = fabric_of("64-true")
    module, optimizer = language(fabric)
    fabric.load(path, {"model": module, "optimizer": optimizer, "step": 0})
    found = [whole(module), whole(optimizer.optimizer)]
    if fabric.is_global_zero:
        torch.save(found, file)


def test_what_a_pipeline_saved_loads_without_one(tmp_path: Path) -> None:
    path, file = str(tmp_path / "piped"), str(tmp_path / "whole.pt")
    run_ranks(2, save_stages, path)
    run_ranks(2, load_whole, path, file)
    plain = Language("tied net").double()
    optimizer = optimizer_of(plain)
    load(path, {"model": plain, "optimizer": optimizer})
    model, its = torch.load(file)
    assert differing(whole(plain), model) == []
    assert differing(whole(optimizer)["state"], its["state"]) == []


# ── every door ───────────────────────────────────────────────────────────────────────────────────────────────────────


DOORS = ("plain", "own", "sharded")


def fabric_by(door: str) -> Fabric:
    world = dist.get_world_size()
    plugins = None if door == "plain" else [ShardCkptIO(sync_files=False)]
    strategy = ShardedStrategy() if door == "sharded" else "ddp" if world > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


def everything(fabric: Fabric, seed: int) -> dict[str, Any]:
    """The state of a script, a second network, and state dicts that are values."""
    state, best = script(fabric, seed, 3 - seed), nn.Linear(2, 3)
    tried = torch.optim.SGD(best.parameters(), lr=0.1 * seed, momentum=0.9)
    best(torch.ones(1, 2)).sum().backward()
    tried.step()
    two = fabric.setup(nn.Linear(2, 4))
    return {**state, "two": two, "best": best.state_dict(), "tried": tried.state_dict()}


def save_by_each_door(folder: str) -> None:
    for door in DOORS:
        fabric = fabric_by(door)
        fabric.save(f"{folder}/{door}", state := everything(fabric, 1))
        full = whole_of(state)
        if fabric.is_global_zero:
            torch.save(full, f"{folder}/{door}.expected")


def load_by_each_door(paths: dict[str, tuple[str, ...]], expected: str) -> None:
    """Everything that was asked for comes back, and nothing is left."""
    full = torch.load(expected)
    for path, doors in paths.items():
        for door in doors:
            fabric = fabric_by(door)
            state = everything(fabric, 2)
            assert differing(whole_of(state), full)
            assert fabric.load(path, state) == {}, f"{path} read by {door}"
            assert differing(whole_of(state), full) == [], f"{path} read by {door}"
            assert fabric.load(path).keys() == state.keys()


@pytest.mark.slow
def test_what_any_door_saved_loads_through_every_door_and_by_functions(tmp_path: Path) -> None:
    """A directory is nothing for plain Fabric, which reads the file that ``consolidate`` makes of it."""
    run_ranks(2, save_by_each_door, str(tmp_path))
    for saved_by in DOORS:
        path, expected = f"{tmp_path}/{saved_by}", f"{tmp_path}/{saved_by}.expected"
        paths = {path: DOORS if saved_by == "plain" else DOORS[1:]}
        if saved_by != "plain":
            assert main(["consolidate", path, "--output_file", f"{path}.file"]) == 0
            paths[f"{path}.file"] = DOORS if saved_by == "sharded" else DOORS[:1]  # a file is a file, whoever saved
        run_ranks(1, load_by_each_door, paths, expected)
        state = everything(Fabric(accelerator="cpu", devices=1), 2)
        assert load(path, state) == {}
        assert differing(whole_of(state), torch.load(expected)) == []
