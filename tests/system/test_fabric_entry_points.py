"""One format through every door of Fabric: its own files, ShardCkptIO under its own strategies, and ShardedStrategy.

Oracles: whole state before the save, and for what is written, plain Fabric and the functions that read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_shardckpt
from lightning_shardckpt.cli import main
from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy
from tests.support.pool import run_ranks
from tests.support.whole_state import differing, whole

DOORS = ("plain", "own", "sharded")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def fabric_by(door: str, io: ShardCkptIO | None = None) -> Fabric:
    world = dist.get_world_size()
    own = "ddp" if world > 1 else "auto"
    plugins = None if door == "plain" else [io or ShardCkptIO(sync_files=False)]
    strategy = ShardedStrategy() if door == "sharded" else own
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


def script(fabric: Fabric, seed: int, steps: int) -> dict[str, Any]:
    """What a training script saves: objects, tensors, and values, nested, too."""
    torch.manual_seed(seed)
    model = Net()
    groups = [{"params": [model.up.weight, model.down.weight], "weight_decay": 0.1}, {"params": [model.norm.weight]}]
    model, optimizer = fabric.setup(model, torch.optim.AdamW(groups, lr=0.01 * seed))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(steps):
        fabric.backward(model(torch.arange(12.0).reshape(4, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    note = {"a": [seed, {"b": 1.5, 3: "c"}], "none": None, "mean": torch.full((3,), float(seed))}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": steps, "note": note}


def whole_of(state: dict[str, Any]) -> dict[str, Any]:
    return {key: whole(getattr(value, "optimizer", value)) for key, value in state.items()}


def two_networks(fabric: Fabric, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    one, two = (fabric.setup(nn.Linear(2, size)) for size in (3, 4))
    return {"one": one, "two": two, "stats": {"mean": torch.full((2,), float(seed))}}


class Average:
    """Has the state of a module, and is none."""

    def __init__(self, value: float) -> None:
        self.net = nn.Linear(2, 3)
        nn.init.constant_(self.net.weight, value)
        nn.init.constant_(self.net.bias, value)

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict({name: whole(tensor) for name, tensor in state.items()})


def with_state_dicts(fabric: Fabric, seed: int) -> dict[str, Any]:
    """State dicts that are values, beside a module, and one that is another object's."""
    torch.manual_seed(seed)
    model, best = fabric.setup(nn.Linear(2, 3)), nn.Linear(2, 3)
    tried = torch.optim.SGD(best.parameters(), lr=0.1 * seed, momentum=0.9)
    best(torch.ones(1, 2)).sum().backward()
    tried.step()
    return {"model": model, "best": best.state_dict(), "tried": tried.state_dict(), "average": Average(float(seed))}


def without_values(name: str, value: Any) -> bool:
    return "bias" not in name


def save_by_each_door(folder: str) -> None:
    for door in DOORS:
        fabric = fabric_by(door)
        state = script(fabric, 1, 2)
        full = whole_of(state)
        fabric.save(f"{folder}/{door}", state)
        fabric.save(f"{folder}/{door}-filtered", state, filter={"model": without_values})
        fabric.save(f"{folder}/{door}-optimizer", {"optimizer": state["optimizer"], "step": 2})
        two = two_networks(fabric, 1)
        fabric.save(f"{folder}/{door}-two", two)
        full_two = whole_of(two)
        kept = with_state_dicts(fabric_by(door), 1)
        fabric.save(f"{folder}/{door}-kept", kept)
        full_kept = whole_of(kept)
        if fabric.is_global_zero:
            torch.save({"state": full, "two": full_two, "kept": full_kept}, f"{folder}/{door}.expected")


def load_by_each_door(folders: dict[str, tuple[str, ...]], saved_by: str) -> None:
    for folder, doors in folders.items():
        load_from(folder, saved_by, doors)


def load_from(folder: str, saved_by: str, doors: tuple[str, ...]) -> None:
    """Everything that was asked for comes back, and nothing is left."""
    expected = torch.load(f"{folder}/{saved_by}.expected")
    path = f"{folder}/{saved_by}"
    for door in doors:
        fabric = fabric_by(door)
        state = script(fabric, 2, 1)
        assert differing(whole_of(state), expected["state"])
        assert fabric.load(path, state) == {}, f"{saved_by} read by {door}"
        assert differing(whole_of(state), expected["state"]) == [], f"{saved_by} read by {door}"
        rest = fabric.load(path, {"model": state["model"], "optimizer": state["optimizer"]})
        assert rest.keys() == {"scheduler", "step", "note"}
        everything = fabric.load(path)
        assert everything.keys() == state.keys()
        assert differing(whole(dict(everything["model"])), expected["state"]["model"]) == []

        fabric = fabric_by(door)  # as a script of its own
        alone = script(fabric, 3, 1)
        assert fabric.load(f"{path}-optimizer", wanted := {"optimizer": alone["optimizer"], "step": 0}) == {}
        assert wanted["step"] == 2
        assert differing(whole_of(alone)["optimizer"], expected["state"]["optimizer"]) == []

        two = two_networks(fabric, 3)
        assert fabric.load(f"{path}-two", two) == {}
        assert differing(whole_of(two), expected["two"]) == [], f"two networks, {saved_by} read by {door}"

        kept = with_state_dicts(fabric_by(door), 3)
        assert fabric.load(f"{path}-kept", kept) == {}
        assert differing(whole_of(kept), expected["kept"]) == [], f"state dicts, {saved_by} read by {door}"
        wanted = {"model": kept["model"], "best": None, "tried": None, "average": None}
        assert fabric.load(f"{path}-kept", wanted) == {}
        assert differing(whole_of(wanted), expected["kept"]) == []

        filtered = fabric.load(f"{path}-filtered")
        assert filtered["model"].keys() == {n for n in expected["state"]["model"] if "bias" not in n}
        assert differing(filtered["step"], 2) == []


@pytest.fixture(scope="module", params=[1, 2], ids=["saved-on-1", "saved-on-2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doors")
    run_ranks(request.param, save_by_each_door, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "world"), [pytest.param(1, 2, marks=pytest.mark.sweep), (2, 1)], indirect=["saved"]
)
@pytest.mark.parametrize("saved_by", DOORS)
def test_what_any_door_saved_loads_through_every_door(saved: Path, saved_by: str, world: int, tmp_path: Path) -> None:
    """A directory is nothing for plain Fabric, which reads the file that ``consolidate`` makes of it."""
    folders = {str(saved): DOORS if saved_by == "plain" else DOORS[1:]}
    if saved_by != "plain":
        (tmp_path / f"{saved_by}.expected").symlink_to(saved / f"{saved_by}.expected")
        for name in (saved_by, f"{saved_by}-two", f"{saved_by}-filtered", f"{saved_by}-optimizer", f"{saved_by}-kept"):
            assert main(["consolidate", str(saved / name), "--output_file", str(tmp_path / name)]) == 0
        folders[str(tmp_path)] = DOORS if saved_by == "sharded" else DOORS[:1]  # a file is a file, whoever saved
    run_ranks(world, load_by_each_door, folders, saved_by)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [2], indirect=True)
@pytest.mark.parametrize("saved_by", DOORS)
def test_functions_read_what_any_door_saved(saved: Path, saved_by: str) -> None:
    path, expected = saved / saved_by, torch.load(saved / f"{saved_by}.expected")
    fabric = Fabric(accelerator="cpu", devices=1)
    state = script(fabric, 2, 1)
    assert lightning_shardckpt.load(path, state) == {}
    assert differing(whole_of(state), expected["state"]) == []
    found = lightning_shardckpt.load(path)
    assert found.keys() == expected["state"].keys()
    assert differing(whole(dict(found["model"])), expected["state"]["model"]) == []
    two = two_networks(fabric, 2)
    assert lightning_shardckpt.load(saved / f"{saved_by}-two", two) == {}
    assert differing(whole_of(two), expected["two"]) == []
    with lightning_shardckpt.open(path) as opened:
        assert torch.equal(opened["up.weight"][:], expected["state"]["model"]["up.weight"])
