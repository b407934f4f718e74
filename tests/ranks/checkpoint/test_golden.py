"""A checkpoint of every version of the format, read by this package. Oracle: files made beside, from the live objects.

``tests/golden/v<version>`` was made once, by 4 ranks (FSDP2 over tensor parallelism), and is NEVER made again: neither
when a test here fails nor when the writer changes. A failure means that users' checkpoints have become unreadable.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import hashlib
import json
import pathlib
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_shardckpt.checkpoint.checkpoint import load, load_full
from lightning_shardckpt.checkpoint.load_job import LoadTargets
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.index import VERSION
from lightning_shardckpt.state.model import Leaves, WholeNames
from lightning_shardckpt.tools.verify import verify
from tests.support.pool import run_ranks

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
MADE = {"v1.0": "3f2880dbf1dce18489e45368e79f0dd9622db945618eccfd109524c148edd48d"}
"""Digest of all files of each directory, so that none is made again unnoticed."""
BUFFERS = ("mean", "table")


class Mode(enum.StrEnum):
    FAST = "fast"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)
        self.register_buffer("mean", torch.arange(3, dtype=torch.float64))
        self.register_buffer("table", torch.linspace(-1, 1, 15).bfloat16().view(5, 3))


def trainer_state() -> dict[str, Any]:
    return {
        "epoch": 4,
        "global_step": 2,
        "callbacks": {
            "Best{'mode': 'min'}": {"best": float("inf"), "seen": (1, (2,)), 5: None, "mode": Mode.FAST},
            "Average": {"mean": torch.linspace(0, 1, 400), "count": torch.tensor(3)},
        },
        "lr_schedulers": [{"milestones": collections.Counter([3, 3, 5]), "_last_lr": [0.01]}],
        "hyper_parameters": {
            "folder": pathlib.PurePosixPath("runs/x"),
            "when": datetime.datetime(2024, 2, 29, 1, 2, 3),
            "big": 2**70,
            "set": {1, 2},
            "raw": bytes(range(4)),
            "names": argparse.Namespace(width=9),
            "dtype": torch.bfloat16,
        },
    }


def expected_trainer_state() -> dict[str, Any]:
    """What comes back: of an enum its value."""
    state = trainer_state()
    state["callbacks"]["Best{'mode': 'min'}"]["mode"] = "fast"
    return state


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def digest(folder: pathlib.Path) -> str:
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


@pytest.fixture(params=MADE)
def golden(request: pytest.FixtureRequest) -> pathlib.Path:
    return GOLDEN / str(request.param)


def expected(golden: pathlib.Path, kind: str) -> dict[str, Tensor]:
    tensors = safetensors.torch.load_file(golden / "expected.safetensors")
    return {name.removeprefix(kind + "/"): t for name, t in tensors.items() if name.startswith(kind + "/")}


def test_each_version_has_a_golden_checkpoint_that_nobody_has_touched() -> None:
    assert MADE.keys() == {p.name for p in GOLDEN.glob("v*")} == {f"v{VERSION}"}
    assert {name: digest(GOLDEN / name) for name in MADE} == MADE


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b) and not (isinstance(a, pathlib.PurePath) and isinstance(b, pathlib.PurePath)):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, b[k]) for k, x in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_it_is_read_whole(golden: pathlib.Path) -> None:
    assert verify(golden / "golden.ckpt").findings == ()
    found = load_full(str(golden / "golden.ckpt"))
    assert same(dict(sorted(found.pop("state_dict").items())), dict(sorted(expected(golden, "model").items())))
    (optimizer,) = found.pop("optimizer_states")
    values = {f"{name}/{key}": v for name, entry in optimizer["state"].items() for key, v in entry.items()}
    assert same(dict(sorted(values.items())), dict(sorted(expected(golden, "optimizer").items())))
    (group,) = optimizer["param_groups"]
    assert json.loads(json.dumps(group)) == json.loads((golden / "expected.json").read_text())
    assert isinstance(group["betas"], tuple)
    assert same(found, expected_trainer_state())


def load_sharded(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any, Any]:
    """Into an FSDP-like cut along dim 0 of all parameters, over as many ranks as there are."""
    ranks = Ranks.of_group(timeout_s=60)
    mesh = init_device_mesh("cpu", (ranks.world,), mesh_dim_names=("shard",))
    live = {
        name: t if name in BUFFERS else distribute_tensor(torch.zeros_like(t), mesh, [Shard(0)])
        for name, t in Net().state_dict().items()
    }
    params = {name: nn.Parameter(t) for name, t in live.items() if name not in BUFFERS}
    optimizer = torch.optim.AdamW(params.values(), lr=7.0)
    names = {id(p): n for n, p in params.items()}
    tensors = {n: params[n].detach() if n in params else t for n, t in live.items()}
    loaded = load(
        path,
        LoadTargets(Leaves(tensors), frozenset(), [optimizer], names, WholeNames()),
        ranks=ranks,
        pick_rank=lambda _: 3,
    )
    state = {f"{names[id(p)]}/{k}": full(v) for p, entry in optimizer.state.items() for k, v in entry.items()}
    assert optimizer.param_groups[0]["lr"] == 0.01
    rank_state = loaded.trainer.pop("rank_state")
    return {n: full(t) for n, t in tensors.items()}, state, loaded.trainer, rank_state


def test_it_is_read_on_another_topology(golden: pathlib.Path) -> None:
    for model, optimizer, trainer, rank_state in run_ranks(3, load_sharded, str(golden / "golden.ckpt")):
        assert same(dict(sorted(model.items())), dict(sorted(expected(golden, "model").items())))
        assert same(dict(sorted(optimizer.items())), dict(sorted(expected(golden, "optimizer").items())))
        assert same(trainer, expected_trainer_state())
        assert rank_state["rng"] == [3, 2**70] and torch.equal(rank_state["drawn"], torch.full((3,), 3.0))
