"""Incremental saves: what is the same is linked, and nothing else. Oracle: the same save that writes everything."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt import ShardCkptIO, api
from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.incremental import SaveHistory
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.local.posix import FileSystem, link_file
from lightning_shardckpt.system.text import size_text
from lightning_shardckpt.tools.inspect import inspect, render
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.memory_storage import MemoryStorage
from tests.support.pool import run_ranks


def shards(path: str | Path) -> dict[str, int]:
    """The number of names of each shard file."""
    return {file.name: file.stat().st_nlink for file in sorted(Path(path).glob("*.safetensors"))}


def linked(path: str | Path) -> set[str]:
    """The tensors in files that other saves wrote, as the indexes say."""
    found = set()
    for file in Path(path).glob("*-meta-*.index.json"):
        index = json.loads(file.read_text())
        found |= {key for key, entry in index["metadata"].items() if len(index["files"][entry["file"]]) == 3}
        assert index["version"] == (3 if any(len(info) == 3 for info in index["files"].values()) else 1)
    return found


class Run:
    """Saves of one process, each into a directory of its own."""

    def __init__(self, folder: Path, file_system: FileSystem | None = None, **options: Any) -> None:
        self.folder, self.count, self.history = folder, 0, SaveHistory()
        own = {} if file_system is None else {"file_system": file_system}
        self.storage = LocalStorage(**own)
        self.options = SaveOptions(incremental=True, **options)
        self.notes: list[str] = []

    def save(self, tensors: dict[str, torch.Tensor], **rest: Any) -> Path:
        self.count += 1
        path, state = self.folder / f"{self.count}.ckpt", {"state_dict": tensors, **rest}
        self.notes += checkpoint.save(
            str(path), lambda: snapshot(state), ranks=Ranks.alone(), run=RunInfo(self.count), options=self.options,
            storage=self.storage, history=self.history,
        )  # fmt: skip
        assert verify(path).findings == ()
        found = checkpoint.load_full(str(path))["state_dict"]
        assert found.keys() == tensors.keys()
        assert all(found[key].numpy().tobytes() == tensors[key].numpy().tobytes() for key in found)
        return path


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_frozen_part_is_linked_and_every_directory_is_whole_by_itself(tmp_path: Path) -> None:
    net = nn.ModuleDict({"base": nn.Linear(60, 60), "head": nn.Linear(8, 8)})
    net["base"].requires_grad_(False)
    paths = [tmp_path / f"{step}.ckpt" for step in range(3)]
    for step, path in enumerate(paths):
        with torch.no_grad():
            net["head"].weight.fill_(step)
        api.save(path, {"net": net}, incremental=True)
    assert [linked(path) for path in paths] == [set(), *[{"base.weight", "base.bias"}] * 2]
    assert max(shards(paths[2]).values()) == 3
    told = inspect(paths[2])
    ((earlier, nbytes),) = ((file["save_id"], file["bytes"]) for file in told["files"] if "save_id" in file)
    assert earlier == inspect(paths[0])["save_id"] != told["save_id"]
    assert nbytes == max(file.stat().st_size for file in paths[2].iterdir())
    assert f"{size_text(nbytes)} in 1 file of earlier saves" in render(told)
    assert "earlier saves" not in render(inspect(paths[0]))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    shutil.copytree(paths[2], tmp_path / "elsewhere" / "copied")
    for path in paths[:2]:
        assert ShardCkptIO().remove_checkpoint(path) is None
    for path in (paths[2], tmp_path / "elsewhere" / "copied"):
        assert verify(path).findings == ()
        for parameter in net.parameters():
            parameter.detach().zero_()
        api.load(path, {"net": net})
        assert all(torch.equal(net.state_dict()[key], value) for key, value in expected.items())


@pytest.mark.parametrize("at", [0, 777_777, 1_999_999])
def test_a_tensor_that_changed_anywhere_is_written(tmp_path: Path, at: int) -> None:
    """Also where torch's own counting of versions sees nothing."""
    run, tensors = Run(tmp_path), {"a": drawn(2_000_000)}
    run.save(tensors)
    assert linked(run.save(tensors)) == {"a"}
    tensors["a"].numpy()[at] += 1
    assert linked(run.save(tensors)) == set()
    assert linked(run.save(tensors)) == {"a"}


def test_files_are_linked_as_a_whole(tmp_path: Path) -> None:
    tensors = {"a": drawn(1000), "b": drawn(900), "c": torch.zeros(1000)}
    for size, expected in ((1.0, set()), (2048 / 2**20, {"a", "b"})):  # in one file with what changes, and in their own
        run = Run(tmp_path / str(size), size_per_shard=size)
        run.save(tensors)
        tensors["c"] += 1
        assert linked(run.save(tensors)) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {**t, "a": t["a"].view(50, 40)},
        lambda t: {**t, "a": t["a"].view(torch.int32)},
        lambda t: {"other": t["a"]},
        lambda t: {**t, "a": t["a"][:1999]},
    ],
)
def test_the_same_bytes_of_another_tensor_are_written(tmp_path: Path, change: Callable[..., Any]) -> None:
    run, tensors = Run(tmp_path), {"a": drawn(2000)}
    run.save(tensors)
    assert linked(run.save(change(tensors))) == set()


def with_fewer_rows(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for rows in (8, 7):  # rank 0 has rows 0 to 4 of both
        model, values = nn.Module(), torch.arange(8 * 400.0).view(8, 400)[:rows]
        model.register_parameter("w", nn.Parameter(distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)))
        api.save(f"{folder}/{rows}.ckpt", {"model": model}, incremental=True)


def test_a_box_that_is_linked_has_another_part_in_a_tensor_of_another_shape(tmp_path: Path) -> None:
    run_ranks(2, with_fewer_rows, str(tmp_path))
    assert linked(tmp_path / "7.ckpt") == {"w"}
    assert verify(tmp_path / "7.ckpt").findings == ()


def test_a_tensor_that_is_added_does_not_prevent_links(tmp_path: Path) -> None:
    run, tensors = Run(tmp_path), {"a": drawn(2000)}
    run.save(tensors)
    assert linked(run.save({**tensors, "b": drawn(10)})) == {"a"}
    assert linked(run.save({"b": drawn(10)})) == {"b"}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: shutil.rmtree(path),
        lambda path: (path / ROOT_NAME).unlink(),
        lambda path: next(path.glob("*.safetensors")).unlink(),
        lambda path: cut(next(path.glob("*.safetensors"))),
        lambda path: flip(next(path.glob("*.safetensors")), 20),
    ],
    ids=["gone", "not complete", "file gone", "file cut", "header damaged"],
)
def test_a_base_that_is_gone_or_damaged_is_not_linked(tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    run, tensors = Run(tmp_path), {"a": drawn(2000)}
    harm(run.save(tensors))
    assert linked(run.save(tensors)) == set()
    assert linked(run.save(tensors)) == {"a"}
    assert [note.startswith("no file of ") for note in run.notes] in ([], [True])  # of damage, not where it is gone


def test_damage_of_shared_bytes_is_found_in_each_checkpoint(tmp_path: Path) -> None:
    run, tensors = Run(tmp_path), {"a": drawn(2000)}
    paths = [run.save(tensors), run.save(tensors)]
    flip(next(paths[0].glob("*.safetensors")), -1)
    for path in paths:
        assert ["corrupted data" in finding.problem for finding in verify(path).findings] == [True]


def test_the_first_save_after_a_load_links_files_of_what_was_loaded(tmp_path: Path) -> None:
    first, tensors = Run(tmp_path), {"a": drawn(2000)}
    old = first.save(tensors)
    again = Run(tmp_path)
    again.count = 7
    again.history.add(str(old))
    assert linked(again.save(tensors)) == {"a"}
    elsewhere = Run(tmp_path / "elsewhere")
    elsewhere.history.add(str(old))
    assert linked(elsewhere.save(tensors)) == set()


def test_a_save_over_a_checkpoint_links_files_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    tensors = {"a": drawn(2000)}
    for _ in range(3):
        run = Run(tmp_path)
        path = run.save(tensors)
    assert linked(path) == {"a"} and shards(path) == dict.fromkeys(shards(path), 1)
    assert os.listdir(tmp_path) == ["1.ckpt"]


def refusing(code: int, times: int) -> FileSystem:
    left = [code] * times

    def link(name: str, directory: int, path: str) -> None:
        if left:
            raise OSError(left.pop(), "no links here", path)
        link_file(name, directory, path)

    return FileSystem(link=link)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
def test_where_files_cannot_be_linked_all_is_written_and_the_user_told_once(tmp_path: Path, code: int) -> None:
    run, tensors = Run(tmp_path, refusing(code, 9)), {"a": drawn(2000), "b": drawn(1000)}
    assert [linked(run.save(tensors)) for _ in range(4)] == [set()] * 4
    (note,) = run.notes
    assert "files can't be linked in" in note and str(tmp_path) in note and "no links here" in note


def test_a_file_with_too_many_links_is_written_and_linked_again(tmp_path: Path) -> None:
    run, tensors = Run(tmp_path, refusing(errno.EMLINK, 1)), {"a": drawn(2000)}
    assert [linked(run.save(tensors)) for _ in range(3)] == [set(), set(), {"a"}]
    assert run.notes == []


def test_a_storage_without_files_of_a_file_system_links_in_its_own_way() -> None:
    storage, history, state = MemoryStorage(), SaveHistory(), {"state_dict": {"a": drawn(100)}}
    for path in ("/m/1", "/m/2"):
        checkpoint.save(
            path, lambda: snapshot(state), ranks=Ranks.alone(), run=RunInfo(), options=SaveOptions(incremental=True),
            storage=storage, history=history,
        )  # fmt: skip
    assert b'"version":3' in storage.checkpoints["/m/2"]["model-meta-dist-00000.index.json"]


def test_without_the_option_nothing_is_linked(tmp_path: Path) -> None:
    net = nn.Linear(20, 20)
    for step in range(2):
        api.save(tmp_path / f"{step}.ckpt", {"net": net})
    assert linked(tmp_path / "1.ckpt") == set() and shards(tmp_path / "1.ckpt") == dict.fromkeys(
        shards(tmp_path / "1.ckpt"), 1
    )


def asynchronously(folder: str) -> list[set[str]]:
    """Three saves of a part that stays and one that changes, right after each other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base, head = (distribute_tensor(drawn(n, 4), mesh, [Shard(0)]) for n in (300, 20))
    paths = [f"{folder}/{step}.ckpt" for step in range(5)]
    for step, path in enumerate(paths):
        head.to_local().fill_(step)
        api.save_async(path, {"base": base, "head": head}, incremental=True, overwrite=True, size_per_shard=1 / 2**20)
    api.wait()
    dist.barrier()
    taken = torch.zeros(300, 4), torch.zeros(20, 4)
    api.load(paths[-1], {"base": taken[0], "head": taken[1]})
    assert torch.equal(taken[0], drawn(300, 4)) and torch.equal(taken[1], torch.full((20, 4), 4.0))
    return [linked(path) for path in paths]


def test_asynchronous_saves_of_ranks_link_what_each_of_them_wrote(tmp_path: Path) -> None:
    for found in run_ranks(2, asynchronously, str(tmp_path)):
        assert found[0] == set() and found[1] == found[4] != set()
    assert {verify(path).findings for path in tmp_path.glob("*.ckpt")} == {()}


def train(folder: str, steps: int, ckpt_path: str | None) -> tuple[dict[str, Any], list[float]]:
    """Train with the options of a user; the state at the end, and the share of each save that was linked."""
    plugin = ShardCkptIO(incremental=True, use_async=True, max_pending=5)
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tiny.fit(
            {}, steps, resume=ckpt_path, plugins=[plugin], callbacks=[callback], enable_checkpointing=True,
            model={"optimizer": "sgd"},
        )  # fmt: skip
    return found["state"], [save.linked_nbytes / save.nbytes for save in plugin.finished_saves]


def straight_run(steps: int) -> dict[str, Any]:
    state: dict[str, Any] = tiny.fit({}, steps, model={"optimizer": "sgd"})["state"]
    return state


@pytest.mark.slow
def test_a_training_run_links_what_is_frozen_and_goes_on_from_such_a_checkpoint(tmp_path: Path) -> None:
    """TinyLM has a frozen part. The checkpoint before is deleted each time."""
    folder = str(tmp_path)
    expected = run_ranks(2, straight_run, 5)[0]
    (_, first), _ = run_ranks(2, train, folder, 3, None)
    (state, second), _ = run_ranks(2, train, folder, 5, f"{folder}/step=3.ckpt")
    assert tiny.differences(expected, state) == []
    assert first[0] == 0 and all(share > 0 for share in [*first[1:], *second])
    assert sorted(os.listdir(folder)) == ["step=3.ckpt", "step=5.ckpt"]  # Lightning keeps what was resumed from
    assert [verify(f"{folder}/step={step}.ckpt").findings for step in (3, 5)] == [(), ()]
