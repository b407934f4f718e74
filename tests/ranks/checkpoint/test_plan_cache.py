"""What is planned once for many saves is right the moment anything changes. Oracle: a save that plans by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.checkpoint import load_full, save
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.tools.verify import verify
from tests.support.pool import run_ranks


def content(path: str) -> dict[str, bytes]:
    """The files of a checkpoint, without what is new in every save: its id, and checksums of what holds it."""
    save_id = json.loads(Path(path, ROOT_NAME).read_bytes())["save_id"].encode()
    files = {file.name: file.read_bytes().replace(save_id, b"") for file in Path(path).iterdir()}
    return {name: data for name, data in files.items() if name.endswith("safetensors") or "state" in name}


class Counting(SaveGroup):
    """Counts the plans that were made."""

    made, last = 0, None

    def planned(self, make: Callable[..., Any], *arguments: Any) -> Any:
        found = super().planned(make, *arguments)
        if isinstance(found, dict) and found is not self.last:  # of files; the other result is a digest
            self.made, self.last = self.made + 1, found
        return found


def saves(folder: str) -> list[Any]:
    """One change after the other; returns how often was planned, and what differs from a save that plans anew."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group, found = Counting(Ranks.of_group()), []
    cut = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    state: dict[str, Any] = {"a": cut, "b": torch.arange(5.0), "c": torch.arange(3)}
    rest: dict[str, Any] = {"global_step": 1}
    size = 1.0

    def fill() -> None:
        with torch.no_grad():
            cut.add_(1)

    def number() -> None:
        rest["callbacks"] = {"count": len(found)}

    def kept_tensor(shape: tuple[int, ...]) -> Callable[[], None]:
        return lambda: rest.update(callbacks={"kept": torch.rand(shape)})

    def smaller_files() -> None:
        nonlocal size
        size = 1e-5

    changes: list[Callable[[], Any]] = [
        lambda: None,
        fill,
        number,
        lambda: state.update(b=torch.arange(5.0) + 1),
        lambda: state.update(b=torch.arange(5.0, dtype=torch.float64)),
        lambda: state.update(b=torch.arange(6.0, dtype=torch.float64)),
        lambda: state.update(a=distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(1)])),
        lambda: state.update(a=distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Replicate()])),
        lambda: state.update(d=state["b"]),  # another name of the same memory
        lambda: state.update(d=torch.arange(6.0, dtype=torch.float64)),
        lambda: state.pop("c"),
        lambda: state.update(dict(reversed(state.items()))),
        kept_tensor((300, 2)),
        kept_tensor((2, 300)),
        smaller_files,
        lambda: None,
    ]
    for number_of, change in enumerate(changes):
        change()
        path, oracle = f"{folder}/{number_of}.ckpt", f"{folder}/{number_of}-oracle.ckpt"
        planned = []
        for to, of in ((path, group), (oracle, SaveGroup(group.ranks))):
            known, options = group.made, SaveOptions(size)
            save(to, lambda: snapshot({**rest, "state_dict": state}), of, run=RunInfo(1), options=options)
            planned.append(group.made > known)
        dist.barrier()
        intact = not verify(path).findings
        full = {key: value.full_tensor() if key == "a" else value for key, value in state.items()}
        loaded = load_full(path)["state_dict"]
        equal = loaded.keys() == full.keys() and all(torch.equal(loaded[key], full[key]) for key in full)
        found.append((planned[0], content(path) == content(oracle), intact, equal))
        dist.barrier()
    return found


def test_a_save_plans_anew_only_if_something_changed_and_is_always_the_one_it_should_be(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, saves, str(tmp_path))):
        assert [one[1:] for one in found] == [(True, True, True)] * len(found)
        unchanged = [number for number, one in enumerate(found) if not one[0]]
        of_trainer = [] if rank == 0 else [12, 13]  # tensors of the trainer are rank 0's
        assert unchanged == sorted([1, 2, 3, 11, 15, *of_trainer])
