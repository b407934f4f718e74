"""What ColossalAI's Booster wrote is read. Oracles: the live objects, and torch's own loading of state dicts."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_shardckpt import load, metadata
from lightning_shardckpt import open as open_checkpoint
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    ShardCkptError,
)
from tests.support import booster_dirs as booster
from tests.support.pool import run_ranks

SMALL = 100 / 1024 / 1024  # MB: several files
State = dict[str, Any]


class Net(nn.Module):
    """Rows cut over ranks, columns cut over ranks, a whole one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        self.count += 1
        return self.norm(x)


def trained(seed: int, steps: int = 2, kind: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer with two param groups."""
    torch.manual_seed(seed)
    net = Net()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in net.parameters() if p.ndim < 2]}]
    optimizer = optimizer_of(kind, groups, 0.1 * seed)
    for _ in range(steps):
        (net(torch.arange(6)) * torch.randn(6, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def optimizer_of(kind: str, groups: Any, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":  # without momentum it has no state
        return torch.optim.SGD(groups, lr=lr)
    return torch.optim.AdamW(groups, lr=lr)


def differing(a: Any, b: Any) -> bool:
    """Whether two state dicts differ in a bit, a type or a key."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype != b.dtype or not torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() != b.keys() or any(differing(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) != len(b) or any(map(differing, a, b))
    return type(a) is not type(b) or bool(a != b)


# ── weights by an index ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("prefix", [None, "ema", "a.b"])
def test_weights_are_read_with_any_prefix_of_file_names(tmp_path: Path, safe: bool, prefix: str | None) -> None:
    saved, live = trained(1)[0], trained(2, 0)[0]
    booster.write_model(tmp_path / "a", saved.state_dict(), limit=SMALL, prefix=prefix, safe=safe)
    assert len(list((tmp_path / "a").iterdir())) > 3
    load(tmp_path / "a", {"model": live})
    assert not differing(dict(live.state_dict()), dict(saved.state_dict()))
    with open_checkpoint(tmp_path / "a") as checkpoint:
        assert torch.equal(checkpoint["embed.weight"][2:4], saved.embed.weight[2:4])


@pytest.mark.parametrize("safe", [False, True])
def test_of_several_prefixes_the_index_file_tells_which_is_meant(tmp_path: Path, safe: bool) -> None:
    nets = {name: trained(seed)[0] for seed, name in enumerate(("ema", "last"), 1)}
    for name, net in nets.items():
        booster.write_model(tmp_path, net.state_dict(), limit=SMALL, prefix=name, safe=safe)
    base = "model.safetensors" if safe else "pytorch_model.bin"
    with pytest.raises(FormatError, match=rf"{base}\.index\.ema\.json and {base}\.index\.last\.json\. Give the path"):
        load(tmp_path)
    for name, net in nets.items():
        found = load(tmp_path / f"{base}.index.{name}.json")
        assert not differing(found["state_dict"], dict(net.state_dict()))
    booster.write_model(tmp_path, nets["ema"].state_dict(), prefix=None, safe=safe)  # as Hugging Face: the one without
    assert not differing(load(tmp_path)["state_dict"], dict(nets["ema"].state_dict()))


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "several files": {"limit": SMALL},
    "prefix": {"limit": SMALL, "prefix": "ema"},
    "pipeline": {"limit": SMALL, "stages": [[0, 3], [1, 2, 4, 5, 6]]},
    "asynchronous": {"limit": SMALL, "use_async": True},
    "asynchronous, pipeline": {"use_async": True, "stages": [[0, 3], [1, 2, 4, 5, 6]]},
    "asynchronous, prefix": {"use_async": True, "prefix": "ema"},
    "asynchronous, before 2025": {"use_async": True, "mark": "."},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_optimizers_directory_is_read(tmp_path: Path, name: str, kind: str) -> None:
    _, saved = trained(1, kind=kind)
    _, live = trained(2, 0, kind)
    booster.write_optimizer(tmp_path / "a", saved.state_dict(), **OPTIMIZERS[name])
    one = consolidate(tmp_path / "a", tmp_path / "one.pt")
    assert not differing(torch.load(one)["optimizer_states"], [saved.state_dict()])
    assert load(tmp_path / "a", {"optimizer": live}) == {}
    assert not differing(live.state_dict(), saved.state_dict())
    (found,) = load(tmp_path / "a")["optimizer_states"]
    twin = optimizer_of(kind, [{"params": group["params"]} for group in live.param_groups], 9.0)
    twin.load_state_dict(found)  # torch's own
    assert not differing(twin.state_dict(), saved.state_dict())
    if kind == "adamw":
        with open_checkpoint(tmp_path / "a") as checkpoint:
            average = saved.state_dict()["state"][0]["exp_avg"]
            assert torch.equal(checkpoint["optimizer/0/#0/exp_avg"][1:3], average[1:3])


@pytest.mark.parametrize("use_async", [False, True])
def test_what_is_not_sharded_is_one_file(tmp_path: Path, use_async: bool) -> None:
    _, saved = trained(1)
    _, live = trained(2, 0)
    path = tmp_path / ("optimizer.safetensors" if use_async else "optimizer.bin")
    state = saved.state_dict()
    state["state"][0]["note"] = {"skipped": 3, "betas": (0.5, None)}
    booster.write_flat(state, path) if use_async else torch.save(state, path)
    load(path, {"optimizer": live})
    assert not differing(live.state_dict(), state)


@pytest.mark.parametrize("use_async", [False, True])
def test_state_by_name_as_fsdp_has_it_belongs_to_the_models_names(tmp_path: Path, use_async: bool) -> None:
    saved_net, saved = trained(1)
    net, live = trained(2, 0)
    names = {id(p): name for name, p in saved_net.named_parameters()}
    order = [names[id(p)] for group in saved.param_groups for p in group["params"]]
    state = saved.state_dict()
    state["state"] = {order[number]: entry for number, entry in state["state"].items()}
    state["param_groups"] = [{**g, "params": [order[number] for number in g["params"]]} for g in state["param_groups"]]
    booster.write_optimizer(tmp_path / "a", state, limit=SMALL, use_async=use_async)
    load(tmp_path / "a", {"optimizer": live}, named_by=net)
    assert not differing(live.state_dict(), saved.state_dict())


def test_model_and_optimizer_in_one_directory_are_told_apart_by_their_index_files(tmp_path: Path) -> None:
    saved_net, saved = trained(1)
    net, live = trained(2, 0)
    booster.write_model(tmp_path, saved_net.state_dict(), safe=False)
    booster.write_optimizer(tmp_path, saved.state_dict())
    with pytest.raises(FormatError, match="Hugging Face directory and an optimizer of ColossalAI's Booster at once"):
        load(tmp_path, {"model": net, "optimizer": live})
    with pytest.raises(FormatError, match="give the path of its index file"):
        metadata(tmp_path)
    load(tmp_path / "pytorch_model.bin.index.json", {"model": net})
    load(tmp_path / "pytorch_optim.bin.index.json", {"optimizer": live})
    assert not differing(dict(net.state_dict()), dict(saved_net.state_dict()))
    assert not differing(live.state_dict(), saved.state_dict())


def test_the_scheduler_beside_it_is_a_file_of_torch(tmp_path: Path) -> None:
    """Booster writes ``torch.save(scheduler.state_dict())``: no tensors, nothing to cut."""
    torch.save({"last_epoch": 3}, tmp_path / "lr_scheduler")
    with pytest.raises(CheckpointNotFoundError, match="is a file, but no checkpoint"):
        load(tmp_path / "lr_scheduler")
    assert torch.load(tmp_path / "lr_scheduler") == {"last_epoch": 3}


def edited(path: Path, key: str, value: Any) -> None:
    found = json.loads(path.read_text())
    found["metadata" if key == "param_groups" else "weight_map"][key] = value
    path.write_text(json.dumps(found))


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("no groups", FormatError, "its metadata names no file with param_groups"),
        ("groups are missing", CorruptionError, r"pytorch_optim_group\.bin: the file is missing, as named in"),
        ("groups are none", FormatError, "its param groups are no list of dicts with params"),
        ("a file is missing", CorruptionError, r"-00001\.\w+: the file is missing, as named in"),
        ("a parameter is missing", CorruptionError, r"1 parameter of .* is not there\n  parameter '99' should be in"),
        ("a path", FormatError, "files must be in the same directory"),
        ("two", FormatError, "Give the path of the file that is meant"),
    ],
)
@pytest.mark.parametrize("use_async", [False, True])
def test_what_is_wrong_with_an_optimizer_is_said(
    tmp_path: Path, use_async: bool, damage: str, error: type[Exception], message: str
) -> None:
    booster.write_optimizer(tmp_path, trained(1)[1].state_dict(), limit=SMALL, use_async=use_async)
    (index,) = tmp_path.glob("*.index.json")
    (first,) = tmp_path.glob("*-00001.*")
    if damage == "no groups":
        edited(index, "param_groups", None)
    elif damage == "groups are missing":
        (tmp_path / "pytorch_optim_group.bin").unlink()
    elif damage == "groups are none":
        torch.save({"lr": 1}, tmp_path / "pytorch_optim_group.bin")
    elif damage == "a file is missing":
        first.unlink()
    elif damage == "a parameter is missing":
        edited(index, "99", first.name)
    elif damage == "a path":
        edited(index, "0", f"../{first.name}")
    else:
        shutil.copy(index, tmp_path / index.name.replace(".json", ".old.json"))
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_a_pickle_in_an_asynchronous_save_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = trained(1)[1].state_dict()
    state["state"][0]["note"] = Evil()
    pickle.dumps(state["state"][0]["note"])
    booster.write_flat(state, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match=r"it names '.*', which is not data"):
        load(tmp_path / "a.safetensors")
    assert not Path("executed").exists()


def test_flat_names_that_are_none_of_boosters_are_refused(tmp_path: Path) -> None:
    booster.write_flat(trained(1)[1].state_dict(), tmp_path / "a.safetensors", mark="_")
    with pytest.raises(FormatError, match="is not what Booster calls a state"):
        load(tmp_path / "a.safetensors")


# ── on several ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def load_sharded(folder: str) -> tuple[State, State]:
    """Into FSDP over all ranks: whole tensors of the model, and of the first parameter's optimizer state."""
    net = Net()
    fully_shard(net)
    decayed = [p for p in net.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in net.parameters() if p.ndim < 2]}], lr=9.0
    )
    load(f"{folder}/model", {"model": net})
    load(f"{folder}/optimizer", {"optimizer": optimizer}, named_by=net)
    states = (dict(optimizer.state[p]) for p in decayed)
    found = {"model": dict(net.state_dict()), "optimizer": dict(enumerate(states))}
    return whole(found["model"]), whole(found["optimizer"])


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


@pytest.mark.parametrize("use_async", [False, True])
def test_any_number_of_ranks_reads_its_slices(tmp_path: Path, use_async: bool) -> None:
    net, optimizer = trained(1)
    booster.write_model(tmp_path / "model", net.state_dict(), safe=use_async, limit=SMALL)
    booster.write_optimizer(tmp_path / "optimizer", optimizer.state_dict(), limit=SMALL, use_async=use_async)
    expected = dict(list(optimizer.state_dict()["state"].items())[:3])
    for model, states in run_ranks(3, load_sharded, str(tmp_path)):
        assert not differing(model, dict(net.state_dict()))
        assert not differing(states, expected)


def test_what_ranks_wrote_by_a_branch_that_was_never_released_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-meta-dist-00000.index.json").write_text("{}")
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model-dist-00000-shard-00000.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"gather_dtensor=False.*Booster\.save_model\(shard=True\)"):
        load(tmp_path)


def changed(value: Any, choose: random.Random) -> Any:
    """JSON with one value replaced."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or choose.random() < 0.15:
        return choose.choice([None, 5, -1, "x", "../x", [], {}, [1], True, 1e99, [10**9] * 2, "a\u0000b"])
    key = choose.choice(keys)
    value[key] = changed(value[key], choose)
    return value


@pytest.mark.parametrize("use_async", [False, True])
def test_random_damage_ends_in_a_documented_error_or_in_none(tmp_path: Path, use_async: bool) -> None:
    _, optimizer = trained(1)
    booster.write_optimizer(tmp_path / "a", optimizer.state_dict(), limit=SMALL, use_async=use_async)
    choose, ended = random.Random(3), 0
    for _ in range(80):
        copy = Path(shutil.copytree(tmp_path / "a", tmp_path / "copy"))
        file = choose.choice(sorted(copy.iterdir()))
        content = bytearray(file.read_bytes())
        if file.suffix == ".json":
            content = bytearray(json.dumps(changed(json.loads(content), choose)).encode())
        elif choose.random() < 0.3:
            del content[choose.randrange(len(content)) :]
        else:
            content[choose.randrange(min(len(content), 600))] = choose.randrange(256)
        file.write_bytes(content)
        with contextlib.suppress(ShardCkptError, pickle.UnpicklingError):  # the last is torch's of a file of its own
            load(copy)
            ended += 1
        shutil.rmtree(copy)
    assert 0 < ended < 60
