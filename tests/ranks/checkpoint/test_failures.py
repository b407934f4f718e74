"""Rank × phase × kind of failure, at once or in the background: all ranks that live raise, and what was saved stays.

Nothing here looks at a clock: the storage holds the writing thread at a gate until a test lets it through.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt.checkpoint.background import Background, SaveGroup
from lightning_shardckpt.checkpoint.checkpoint import load, load_full, save
from lightning_shardckpt.checkpoint.load_job import LoadTargets
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, RankError
from lightning_shardckpt.state.local_tensors import HostMemory
from lightning_shardckpt.state.model import WholeNames, model_leaves
from lightning_shardckpt.state.trainer import Snapshot, snapshot
from lightning_shardckpt.system.host import Tuning
from tests.support.pool import run_ranks
from tests.support.storages import TIMEOUT_S, Gated, complete, disk_error

WORLD = 3
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


def leave() -> None:
    raise SystemExit(7)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raised(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except (Exception, SystemExit) as error:
        return type(error).__name__, str(error)
    return "", ""


class Scene:
    """A sharded tensor and a list, saved under names, by ``checkpoint.py`` alone."""

    def __init__(self, folder: str) -> None:
        self.folder, self.storage = folder, Gated()
        self.ranks, of_thread = (Ranks.of_group(timeout_s=TIMEOUT_S, tuning=Tuning(host_look_s=0.1)) for _ in range(2))
        self.background = Background(of_thread)
        self.group = SaveGroup(self.ranks, self.background)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.tensor = distribute_tensor(torch.zeros(7, 300), mesh, [Shard(0)])
        self.list = [0]

    def describe(self) -> Snapshot:
        return snapshot({"state_dict": {"a": self.tensor}, "global_step": self.list[0], "list": self.list})

    def fill(self, step: int) -> None:
        with torch.no_grad():
            self.tensor.fill_(float(step))
        self.list[0] = step

    def save(self, name: str, step: int) -> Any:
        self.fill(step)
        path, common = f"{self.folder}/{name}.ckpt", {"run": RunInfo(step), "options": SaveOptions(1.0)}
        done = save(path, self.describe, self.group, storage=self.storage, in_background=True, **common)
        self.fill(-1)  # training goes on
        return done

    def save_now(self, name: str, step: int) -> None:
        def describe() -> Snapshot:
            self.storage.act("describe", path)
            self.fill(step)
            return self.describe()

        path, common = f"{self.folder}/{name}.ckpt", {"run": RunInfo(step), "options": SaveOptions(1.0)}
        save(path, describe, self.group, storage=self.storage, **common)

    def load(self, name: str) -> None:
        leaves, _ = model_leaves({"a": self.tensor})
        targets = LoadTargets(leaves, frozenset(), None, {}, WholeNames())
        load(f"{self.folder}/{name}.ckpt", targets, ranks=self.ranks, storage=self.storage)

    def act(self, point: str, fault: Callable[[], None]) -> None:
        """Save step 2 over step 1, or load, with a fault at one point."""
        self.storage.faults = {(point, "a.ckpt"): fault}
        self.load("a") if point in LOADING else self.save_now("a", 2)

    def wait(self) -> None:
        self.background.settle(self.ranks)

    def remove(self, name: str) -> None:
        path = f"{self.folder}/{name}.ckpt"
        if dist.get_rank() == 0:  # as Lightning does
            self.background.follow(path, lambda: self.storage.remove(path), "not removed", at_once=True)

    def stored(self, name: str) -> list[float]:
        try:
            found = load_full(f"{self.folder}/{name}.ckpt")
        except CheckpointNotFoundError:
            return []
        return [found["global_step"], *found["list"], *found["state_dict"]["a"].unique().tolist()]


def returns_at_once(folder: str) -> list[Any]:
    scene = Scene(folder)
    with scene.storage.shut():
        done = scene.save("a", 1)
        before = (done.done(), scene.stored("a"))
    scene.wait()
    return [before, done.result(0), scene.stored("a")]


def test_a_save_returns_before_anything_is_written_and_holds_the_values_of_the_call(tmp_path: Path) -> None:
    assert run_ranks(2, returns_at_once, str(tmp_path)) == [[(False, []), None, [1, 1, 1.0]]] * 2


FAULTS = [("write", 0), ("write", 1), ("publish", 0)]


def failing_later(folder: str, fault: Callable[[], None]) -> list[Any]:
    """Every point in turn, learnt of by the next save and by ``wait``: what was raised, and what is stored."""
    scene, found = Scene(folder), []
    scene.save("a", 1)
    scene.wait()
    for point, who in FAULTS:
        for ask in (lambda: scene.save("b", 3), scene.wait):
            if dist.get_rank() == who:
                scene.storage.faults[point, "a.ckpt"] = fault
            with scene.storage.shut():
                done = scene.save("a", 2)
                scene.remove("a")  # as if what failed had been meant to replace it
            assert done.exception(TIMEOUT_S) is not None
            first, again = raised(ask), raised(scene.wait)
            found.append((first, again, scene.stored("a"), scene.stored("b"), scene.background.notes()))
            dist.barrier()
    scene.save("a", 4)
    scene.wait()
    return [*found, scene.stored("a")]


@pytest.mark.parametrize(("fault", "kind"), [(disk_error, "OSError"), (leave, "RankError")])
def test_what_fails_in_the_background_is_raised_once_on_all_ranks_and_nothing_is_lost(
    fault: Callable[[], None], kind: str, tmp_path: Path
) -> None:
    results = run_ranks(2, failing_later, str(tmp_path), fault)
    for rank, (*found, after) in enumerate(results):
        assert after == [4, 4, 4.0]
        cases = [fault for fault in FAULTS for _ in range(2)]
        for (point, who), (first, again, old, other, notes) in zip(cases, found, strict=True):
            assert first[0] == kind and again == ("", "")
            cause = "Input/output error" if fault is disk_error else "SystemExit: 7"
            assert f"rank {who} failed while saving" in first[1] and cause in first[1], (point, who)
            assert (old, other) == ([1, 1, 1.0], [])
            assert [note.startswith("not removed") for note in notes] == [True] * (rank == 0)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def two_paths(folder: str) -> list[Any]:
    scene = Scene(folder)
    scene.save("old", 1)
    scene.wait()
    dist.barrier()
    scene.storage.looks.clear()
    with scene.storage.shut():
        scene.save("new", 2)
        scene.remove("old")
        held = complete(folder)
    scene.save("newer", 3)
    scene.remove("new")
    scene.wait()
    dist.barrier()
    return [held, complete(folder), all(scene.storage.looks), scene.background.notes()]


def test_a_removal_waits_for_the_save_before_it(tmp_path: Path) -> None:
    assert run_ranks(2, two_paths, str(tmp_path)) == [[{"old.ckpt"}, {"newer.ckpt"}, True, []]] * 2


def one_by_one(folder: str, second: str) -> list[Any]:
    """The second save begins while the first is held; it goes on once the first is complete."""
    scene = Scene(folder)
    with scene.storage.opened_by("drain"):
        first = scene.save("first", 1)
        assert not scene.storage.gate.is_set()
        scene.save(second, 2)
        assert first.done()
    scene.wait()
    memories = [found for found in gc.get_objects() if type(found) is HostMemory]
    return [scene.stored("first"), scene.stored(second), len(memories)]


@pytest.mark.parametrize("second", ["second", "first"])
def test_a_save_waits_until_the_one_before_is_complete_and_reuses_its_memory(second: str, tmp_path: Path) -> None:
    later = [2, 2, 2.0]
    expected = [[1, 1, 1.0] if second == "second" else later, later, 1]
    assert run_ranks(2, one_by_one, str(tmp_path), second) == [expected] * 2


def test_copies_are_exact_whatever_the_tensors_are() -> None:
    memory, base = HostMemory(), torch.arange(24.0).reshape(4, 6)
    conjugated, eighths = torch.tensor([1 + 2j, 3 - 1j]).conj(), base.to(torch.float8_e4m3fn)
    odd = [base.t(), base[:, 1::2], torch.tensor(3, dtype=torch.int16), torch.empty(0, 5), conjugated, eighths]
    for tensors in (odd, [base], odd):  # in the same memory
        for copy, tensor in zip(memory.copy(tensors), tensors, strict=True):
            assert copy.is_contiguous() and copy.dtype == tensor.dtype and copy.tolist() == tensor.tolist()


def killed_later(folder: str) -> tuple[str, str, list[float]]:
    scene = Scene(folder)
    scene.save("a", 1)
    scene.wait()
    if dist.get_rank() == 1:
        scene.storage.faults["write", "a.ckpt"] = die
    scene.save("a", 2)
    return *raised(scene.wait), scene.stored("a")


def test_a_rank_that_is_killed_while_it_writes_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    outcomes = run_ranks(2, killed_later, str(tmp_path), expect_errors=True, grace_s=30)
    assert outcomes.pop(1).killed
    kind, message, stored = outcomes[0].value
    assert (kind, stored) == (RankError.__name__, [1, 1, 1.0])
    assert "rank 1 failed" in message and "is gone" in message


# ── at once ───────────────────────────────────────────────────────────────────────────────────────────────────────


def failing(folder: str, fault: Callable[[], None]) -> list[Any]:
    """Every point in turn, in the same processes: what each raised, what was stored then, whether the next works."""
    scene, found = Scene(folder), []
    scene.save_now("a", 1)
    for point, who in POINTS:
        mine = fault if dist.get_rank() == who else lambda: None
        kind, message = raised(lambda p=point, m=mine: scene.act(p, m))
        stored = scene.stored("a")
        dist.barrier()
        scene.storage.faults = {}
        found.append((kind, message, stored, raised(lambda: scene.save_now("a", 1))))
    return found


@pytest.mark.parametrize(("fault", "kind"), [(disk_error, "OSError"), (leave, "RankError")])
def test_what_one_rank_raises_reaches_all_and_nothing_is_lost(
    fault: Callable[[], None], kind: str, tmp_path: Path
) -> None:
    for rank, found in enumerate(run_ranks(WORLD, failing, str(tmp_path), fault, timeout_s=120)):
        for (point, who), (raises, message, stored, after) in zip(POINTS, found, strict=True):
            assert stored == [1, 1, 1.0] and after == ("", "")
            if rank == who and fault is leave:
                assert raises == "SystemExit"
                continue
            assert raises == kind
            cause = "Input/output error" if fault is disk_error else "SystemExit: 7"
            phase = {**SAVING, **LOADING}[point]
            assert f"rank {who} failed while {phase}" in message and cause in message and "a.ckpt" in message
    assert os.listdir(tmp_path) == ["a.ckpt"]


def killed(folder: str, point: str, who: int) -> tuple[str, str, list[float]]:
    scene = Scene(folder)
    scene.save_now("a", 1)
    return *raised(lambda: scene.act(point, die if dist.get_rank() == who else lambda: None)), scene.stored("a")


KILLED = (("publish", 0), ("read", 1))


@pytest.mark.parametrize(
    ("point", "who"), [("write", 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in KILLED)]
)
def test_a_killed_rank_is_named_on_all_others_and_nothing_is_lost(point: str, who: int, tmp_path: Path) -> None:
    outcomes = run_ranks(WORLD, killed, str(tmp_path), point, who, expect_errors=True, grace_s=30)
    assert outcomes.pop(who).killed
    for kind, message, stored in (outcome.value for outcome in outcomes):
        assert (kind, stored) == ("RankError", [1, 1, 1.0])
        assert f"rank {who} failed while {({**SAVING, **LOADING})[point]}" in message and "is gone" in message
