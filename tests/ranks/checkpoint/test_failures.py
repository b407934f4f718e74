"""Rank × phase × kind of failure: all ranks that live raise, naming the rank; what was saved before is untouched."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt.checkpoint.checkpoint import load, load_full, save
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.state.model import WholeNames, model_leaves
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.local_storage import LocalDraft, LocalReader, LocalStorage
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.tuning import Tuning
from tests.support.pool import run_ranks

WORLD = 3
TIMEOUT_S = 20.0
SAVING = {  # point → the phase as the message names it
    "describe": "preparing to save",
    "begin": "preparing to save",
    "write": "saving",
    "publish": "saving",
}
LOADING = {"open": "opening", "read": "reading"}
POINTS = [
    (point, rank)
    for point in {**SAVING, **LOADING}
    for rank in ([0] if point in ("begin", "publish") else range(WORLD))
]


class Faulty(LocalStorage):
    """The file system, on which something happens once, at one point."""

    def __init__(self, point: str, fault: Callable[[], None]) -> None:
        super().__init__()
        self._point, self._fault = point, fault

    def reach(self, point: str) -> None:
        if point == self._point:
            self._point = ""
            self._fault()

    def open(self, path: str) -> Any:
        self.reach("open")
        return FaultyReader(super().open(path), self)

    def draft(self, path: str, save_id: str) -> Any:
        return FaultyDraft(super().draft(path, save_id), self)


class FaultyReader:
    def __init__(self, reader: LocalReader, storage: Faulty) -> None:
        self._reader, self._storage = reader, storage

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        if name.endswith(".safetensors") and offset > 8:  # headers are read before, while ranks compare
            self._storage.reach("read")
        self._reader.read_into(name, offset, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class FaultyDraft:
    def __init__(self, draft: LocalDraft, storage: Faulty) -> None:
        self._draft, self._storage = draft, storage

    def begin(self) -> Any:
        self._storage.reach("begin")
        return self._draft.begin()

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        self._storage.reach("write")
        self._draft.write(name, parts, nbytes=nbytes)

    def publish(self) -> Any:
        self._storage.reach("publish")
        return self._draft.publish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


class Scene:
    """A sharded tensor on some ranks, saved at step 1; then step 2 is saved, or step 1 loaded, with a fault."""

    def __init__(self, folder: str) -> None:
        self.ranks = Ranks.of_default_group(TIMEOUT_S, tuning=Tuning(host_look_s=0.1))
        self.path = f"{folder}/a.ckpt"
        mesh = init_device_mesh("cpu", (WORLD,))
        self.tensor = distribute_tensor(torch.zeros(7, 300), mesh, [Shard(0)])
        self.act("", lambda: None, 1)

    def act(self, point: str, fault: Callable[[], None], step: int) -> None:
        storage = Faulty(point, fault)
        if point in LOADING:
            leaves, _ = model_leaves({"a": self.tensor})
            live = LoadTargets(leaves, frozenset(), None, {}, WholeNames())
            load(self.path, live, ranks=self.ranks, storage=storage)
            return

        def describe() -> Snapshot:
            storage.reach("describe")
            with torch.no_grad():
                self.tensor.fill_(float(step))
            return snapshot({"state_dict": {"a": self.tensor}, "global_step": step})

        save(self.path, describe, ranks=self.ranks, run=RunInfo(step), options=SaveOptions(1), storage=storage)

    def stored(self) -> list[float]:
        """Step and distinct values of what is at the path; nothing if it doesn't load."""
        with suppress(CheckpointNotFoundError):
            found = load_full(self.path)
            return [found["global_step"], *found["state_dict"]["a"].unique().tolist()]
        return []


def raised(work: Callable[[], None]) -> tuple[str, str]:
    try:
        work()
    except (Exception, SystemExit) as error:
        return type(error).__name__, str(error)
    return "", ""


def raise_disk_error() -> None:
    raise OSError(errno.EIO, "Input/output error", "/the/disk")


def leave() -> None:
    raise SystemExit(7)


def failing(folder: str, fault: Callable[[], None]) -> list[Any]:
    """Every point in turn, in the same processes: what each raised, what was stored then, whether the next works."""
    scene, found = Scene(folder), []
    for point, who in POINTS:
        mine = fault if dist.get_rank() == who else lambda: None
        kind, message = raised(lambda p=point, m=mine: scene.act(p, m, 2))
        stored = scene.stored()
        dist.barrier()
        found.append((kind, message, stored, raised(lambda: scene.act("", lambda: None, 1))))
    return found


@pytest.mark.parametrize(("fault", "kind"), [(raise_disk_error, "OSError"), (leave, "RankError")])
def test_what_one_rank_raises_reaches_all_and_nothing_is_lost(
    fault: Callable[[], None], kind: str, tmp_path: Path
) -> None:
    for rank, found in enumerate(run_ranks(WORLD, failing, str(tmp_path), fault, timeout_s=120)):
        for (point, who), (raises, message, stored, after) in zip(POINTS, found, strict=True):
            assert stored == [1, 1.0] and after == ("", "")
            if rank == who and fault is leave:
                assert raises == "SystemExit"
                continue
            assert raises == kind
            cause = "Input/output error" if fault is raise_disk_error else "SystemExit: 7"
            phase = {**SAVING, **LOADING}[point]
            assert f"rank {who} failed while {phase}" in message and cause in message and "a.ckpt" in message
    assert os.listdir(tmp_path) == ["a.ckpt"]


def killed(folder: str, point: str, who: int) -> tuple[str, str, list[float]]:
    scene = Scene(folder)
    die = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if dist.get_rank() == who else lambda: None
    return *raised(lambda: scene.act(point, die, 2)), scene.stored()


KILLED = (("publish", 0), ("read", 1))


@pytest.mark.parametrize(
    ("point", "who"), [("write", 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in KILLED)]
)
def test_a_killed_rank_is_named_on_all_others_and_nothing_is_lost(point: str, who: int, tmp_path: Path) -> None:
    outcomes = run_ranks(WORLD, killed, str(tmp_path), point, who, expect_errors=True, grace_s=30)
    assert outcomes.pop(who).killed
    for kind, message, stored in (outcome.value for outcome in outcomes):
        assert (kind, stored) == ("RankError", [1, 1.0])
        assert f"rank {who} failed while {({**SAVING, **LOADING})[point]}" in message and "is gone" in message
