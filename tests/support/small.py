"""A checkpoint of a few kilobytes with all there can be in one, live objects that take it, and edits that reseal it."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.load_job import LoadTargets
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.state.model import Leaves, WholeNames

SHAPES = {"w": (6, 4), "b": (5,), "norm": (3,)}
ROOT, DOCUMENT = ROOT_NAME, "trainer-state.json"
INDEX, OTHER_INDEX = "model-meta-dist-00000.index.json", "model-meta-dist-00001.index.json"
SHARD, OTHER_SHARD = "model-dist-00000-shard-00001.safetensors", "model-dist-00001-shard-00001.safetensors"


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(*paths: str) -> None:
    """On 2 ranks or alone; every path gets a save of its own with the same values."""
    ranks = Ranks.of_group(timeout_s=60)
    mesh = init_device_mesh("cpu", (ranks.world,), mesh_dim_names=("shard",))

    def placed(name: str, seed: int) -> Tensor:
        cut = Replicate() if name == "norm" else Shard(0)
        return distribute_tensor(drawn(SHAPES[name], seed), mesh, [cut], src_data_rank=None)

    state = {n: {"exp_avg": placed(n, i), "step": torch.tensor(7.0)} for i, n in enumerate(SHAPES, 10)}
    group = {"lr": 0.5, "betas": (0.9, 0.99), "params": list(SHAPES)}
    io = ShardCkptIO()
    io.attach(ranks, torch.nn.Module(), {"data_parallel_shard": ranks.world})
    for path in paths:
        io.save_checkpoint(
            {
                "epoch": 1,
                "global_step": 2,
                "callbacks": {
                    "Best": {"best": float("inf"), "seen": (1, 2), 5: None}, "EMA": {"mean": drawn((300,), 9)}
                },
                "lr_schedulers": [{"milestones": collections.Counter([3, 3, 5])}],
                "state_dict": {n: placed(n, i) for i, n in enumerate(SHAPES)},
                "optimizer_states": [{"state": state, "param_groups": [group]}],
                "rank_state": {"rng": [ranks.rank, 2**70]},
            },
            path,
        )


def live_objects() -> tuple[dict[str, Tensor], torch.optim.Optimizer, LoadTargets]:
    """Tensors of zeros and an optimizer for them, with state of the first one; and both as ``load`` wants them."""
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(t) for t in tensors.values()])
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first] = {"exp_avg": torch.zeros_like(first, requires_grad=False), "step": torch.tensor(0.0)}
    names = {id(p): n for p, n in zip(optimizer.param_groups[0]["params"], SHAPES, strict=True)}
    whole, objects = WholeNames(), [optimizer]
    return tensors, optimizer, LoadTargets(Leaves(tensors), frozenset(), objects, names, whole, objects=objects)


def load(path: str) -> dict[str, Tensor]:
    """Into live objects, as one process; after an error before anything is filled they must be as they were."""
    tensors, optimizer, live = live_objects()
    before = repr(optimizer.state_dict())
    try:
        checkpoint.load(path, live, ranks=Ranks.alone())
    except BaseException:
        with suppress(StateError):  # the load has begun to fill them
            checkpoint.check_loaded([optimizer])
            assert not any(t.any() for t in tensors.values()), "a refused load has changed live tensors"
            assert repr(optimizer.state_dict()) == before, "a refused load has changed the optimizer"
        raise
    return tensors


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of nested state, by its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(item, f"{path}/{key}")


# ── edits: of the JSON of one file, with all checksums above it made right ────────────────────────────────────────

Edit = Callable[[Any], None]


def sealed_text(rest: bytes) -> bytes:
    """A root index, of which the first brace is missing, with its checksum."""
    return b'{"checksum":"' + checksum(rest).encode() + b'",\n' + rest


def sealed(value: dict[str, Any]) -> bytes:
    return sealed_text(json.dumps({k: v for k, v in value.items() if k != "checksum"}).encode()[1:])


def named(root: dict[str, Any], name: str, content: bytes) -> bytes:
    """The root index with what it says of another content of a rank index or a document."""
    info = [len(content), checksum(content)]
    if name in root["documents"]:
        root["documents"][name] = info
    for component in root["components"].values():
        for rank, known in component["indexes"].items():
            if known[0] == name:
                component["indexes"][rank] = [name, *info]
    return sealed(root)


def put(folder: Path, name: str, content: bytes) -> None:
    """Replace a rank index, a document or a root index, and what the root index says of it."""
    (folder / name).write_bytes(content)
    if name != ROOT:
        (folder / ROOT).write_bytes(named(json.loads((folder / ROOT).read_bytes()), name, content))


def edit(folder: Path, name: str, change: Edit) -> None:
    value = json.loads((folder / name).read_bytes())
    change(value)
    put(folder, name, sealed(value) if name == ROOT else json.dumps(value).encode())
