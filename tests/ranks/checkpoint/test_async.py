"""Saves that are written while training goes on: what they hold, who learns of their errors, and in which order.

Nothing here looks at a clock: the storage holds the writing thread at a gate until a test lets it through.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint import load_full, save_async
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, RankError
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.tensor_bytes import HostMemory, copy_all
from lightning_shardckpt.state.trainer import snapshot
from tests.support import tiny, warm_python
from tests.support.pool import ROOT, run_ranks
from tests.support.storages import TIMEOUT_S, Gated, complete, disk_error, gated_io


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
        self.ranks, of_thread = Ranks.of_default_group(TIMEOUT_S), Ranks.of_default_group(TIMEOUT_S)
        self.background = Background(of_thread)
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
        done = save_async(
            path, self.describe, ranks=self.ranks, background=self.background, storage=self.storage, **common
        )
        self.fill(-1)  # training goes on
        return done

    def wait(self) -> None:
        self.background.settle(self.ranks)

    def remove(self, name: str) -> None:
        path = f"{self.folder}/{name}.ckpt"
        if dist.get_rank() == 0:  # as Lightning does
            self.background.remove(path, lambda: self.storage.remove(path))

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


def failing(folder: str, fault: Callable[[], None]) -> list[Any]:
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
    results = run_ranks(2, failing, str(tmp_path), fault)
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


def host_memories() -> list[HostMemory]:
    """All of this process."""
    return [found for found in gc.get_objects() if type(found) is HostMemory]


def one_by_one(folder: str, second: str) -> list[Any]:
    """The second save begins while the first is held; it goes on once the first is complete."""
    scene = Scene(folder)
    with scene.storage.opened_by("drain"):
        first = scene.save("first", 1)
        assert not scene.storage.gate.is_set()
        scene.save(second, 2)
        assert first.done()
    scene.wait()
    return [scene.stored("first"), scene.stored(second), len(host_memories())]


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
        copy_all(tensors, copies := memory.empty_like(tensors))
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.is_contiguous() and copy.dtype == tensor.dtype and copy.tolist() == tensor.tolist()


def killed(folder: str) -> tuple[str, str, list[float]]:
    scene = Scene(folder)
    scene.save("a", 1)
    scene.wait()
    if dist.get_rank() == 1:
        scene.storage.faults["write", "a.ckpt"] = die
    scene.save("a", 2)
    return *raised(scene.wait), scene.stored("a")


def test_a_rank_that_is_killed_while_it_writes_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    outcomes = run_ranks(2, killed, str(tmp_path), expect_errors=True, grace_s=30)
    assert outcomes.pop(1).killed
    kind, message, stored = outcomes[0].value
    assert (kind, stored) == (RankError.__name__, [1, 1, 1.0])
    assert "rank 1 failed" in message and "is gone" in message


EXIT = """
import sys, torch, threading
from lightning_shardckpt import ShardCkptIO
from tests.support.storages import Gated, disk_error
io = ShardCkptIO(use_async=True)
io.storage = storage = Gated()
storage.gate.clear()
storage.faults["write", "a.ckpt"] = disk_error
io.save_checkpoint({"state_dict": {"a": torch.ones(3)}, "global_step": 5}, sys.argv[1])
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), storage.gate.set())).start()
"""


@pytest.mark.slow
def test_a_process_that_ends_without_a_teardown_waits_for_its_save_and_shows_its_error(
    tmp_path: Path, python: warm_python.Run
) -> None:
    done = python(["-c", EXIT, str(tmp_path / "a.ckpt")], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "Input/output error" in done.stderr and os.listdir(tmp_path) == []


# --- with a Trainer ---


class At(pl.Callback):
    """Does something at the end of a step; give it after a ModelCheckpoint's place."""

    def __init__(self, step: int, act: Callable[[pl.Trainer], None]) -> None:
        self._step, self._act = step, act

    def on_before_zero_grad(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._step:
            self._act(trainer)


def same(a: Any, b: Any) -> bool:
    """Whether two checkpoints hold the same, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return tiny.same(a, b)


def _finish(io: ShardCkptIO) -> Callable[[pl.Trainer], None]:
    """Complete the save before, and hold the next one."""

    def finish(trainer: pl.Trainer) -> None:
        io.storage.gate.set()  # type: ignore[attr-defined]
        if trainer.strategy.checkpoint_io is io:
            io.wait()
            io.storage.gate.clear()  # type: ignore[attr-defined]

    return finish


def twins(strategy: Any, directory: str) -> list[bool]:
    """Saves after each of three steps, of which the last is held until the next step; and the same at once."""
    io = gated_io()
    results = []
    for name, plugins in (("sync", [ShardCkptIO()]), ("async", [io])):
        saves: list[pl.Callback] = []
        for step in (1, 2, 3):
            saves += [At(step, _finish(io)), tiny.SaveAt(step, f"{directory}/{name}{step}.ckpt")]
        release = At(4, lambda trainer: io.storage.gate.set())
        results.append(tiny.fit(strategy, 5, callbacks=[*saves, release], plugins=plugins))
    resumed = results[0]
    if not isinstance(strategy, str):  # which go on with other batches
        resumed = tiny.fit(strategy, 5, resume=f"{directory}/async2.ckpt", seed=9, plugins=[gated_io()])
    pairs = [[load_full(f"{directory}/{name}{step}.ckpt") for name in ("sync", "async")] for step in (1, 2, 3)]
    found = [same(a, b) for a, b in pairs]
    return [*found, *(tiny.differences(results[0]["state"], r["state"]) == [] for r in (results[1], resumed))]


@pytest.mark.parametrize("strategy", [{}, "ddp"], ids=["fsdp2", "stock"])
def test_asynchronous_checkpoints_equal_synchronous_ones_and_resume_alike(strategy: Any, tmp_path: Path) -> None:
    assert run_ranks(2, twins, strategy, str(tmp_path)) == [[True] * 5] * 2


def keep_one(directory: str) -> dict[str, Any]:
    """The save after the second step is held until the third."""
    io, seen = gated_io(), dict[str, Any]()

    def shut(trainer: pl.Trainer) -> None:
        io.wait()
        io.storage.looks.clear()
        io.storage.gate.clear()

    def look(trainer: pl.Trainer) -> None:
        seen["held"] = complete(directory)
        seen["link is broken"] = not os.path.exists(f"{directory}/last.ckpt")
        io.storage.gate.set()

    pl.seed_everything(1)
    when = timedelta(microseconds=1)
    keep = ModelCheckpoint(directory, save_top_k=1, save_last="link", filename="{step}", train_time_interval=when)
    callbacks = [At(1, shut), At(2, look), keep]
    run = tiny.trainer({}, max_steps=3, plugins=[io], callbacks=callbacks, enable_checkpointing=True)
    held_out = tiny.loader(count=8, shuffle=False)
    run.fit(module := tiny.TinyLM(), tiny.loader(), held_out)
    seen["kept"], seen["always some"] = sorted(os.listdir(directory)), all(io.storage.looks)
    run.save_checkpoint(f"{directory}/after.ckpt")
    seen["after"] = complete(directory)
    for path in ("best", "last", f"{directory}/after.ckpt"):
        run.validate(module, held_out, ckpt_path=path, verbose=False)
    seen["last"] = os.path.basename(os.path.realpath(f"{directory}/last.ckpt"))
    return seen


def test_the_best_checkpoint_is_there_until_its_successor_is(tmp_path: Path) -> None:
    for found in run_ranks(2, keep_one, str(tmp_path / "run")):
        assert found["held"] == {"step=1.ckpt"} and found["link is broken"]
        assert found["kept"] == ["last.ckpt", "step=3.ckpt"] and found["last"] == "step=3.ckpt"
        assert found["always some"] and "after.ckpt" in found["after"]


def fails_at_the_end(directory: str) -> list[Any]:
    io = gated_io()
    if dist.get_rank() == 1:
        io.storage.faults["write", "step=3.ckpt"] = disk_error
    keep = ModelCheckpoint(directory, save_top_k=1, every_n_train_steps=1, filename="{step}")
    run = tiny.trainer({}, max_steps=3, plugins=[io], callbacks=[keep], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        error = raised(lambda: run.fit(tiny.TinyLM(), tiny.loader()))
    return [*error, [str(w.message) for w in told if "not removed" in str(w.message)], complete(directory)]


def test_an_error_of_the_last_save_is_raised_by_fit_and_the_one_before_is_kept(tmp_path: Path) -> None:
    for rank, (kind, message, said, names) in enumerate(run_ranks(2, fails_at_the_end, str(tmp_path))):
        assert kind == "OSError" and "rank 1 failed while saving" in message and "Input/output error" in message
        assert [("step=2.ckpt" in s) for s in said] == [True] * (rank == 0) and names == {"step=2.ckpt"}


class Fails(tiny.TinyLM):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.global_step == 2:
            raise ZeroDivisionError("as users do")


def all_fail_in_training(directory: str) -> dict[str, list[Any]]:
    return {case: fails_in_training(f"{directory}/{case}", case) for case in CASES}


def fails_in_training(directory: str, case: str) -> list[Any]:
    io = gated_io()
    saves: list[pl.Callback] = [tiny.SaveAt(2, f"{directory}/pending.ckpt")]
    told: Any = nullcontext()
    if case != "nobody saves":
        saves.append(OnExceptionCheckpoint(directory))
    if case == "the save before fails":
        io.storage.faults["write", "pending.ckpt"] = disk_error if dist.get_rank() == 1 else lambda: None
        told = pytest.warns(UserWarning, match="before the exception, a save had failed: .*Input")
    if case == "the last save fails":
        io.storage.faults["write", "on_exception.ckpt"] = disk_error if dist.get_rank() == 1 else lambda: None
        told = pytest.warns(UserWarning, match="no checkpoint was saved after the exception: .*Input")
    keeping = {"callbacks": saves, "enable_checkpointing": len(saves) > 1}
    run = tiny.trainer({}, max_steps=4, limit_val_batches=0, plugins=[io], **keeping)
    with told, io.storage.opened_by("on_exception"), pytest.raises(ZeroDivisionError):
        run.fit(Fails(), tiny.loader())
    found = complete(directory)
    dist.barrier()
    again = tiny.trainer({}, max_steps=4, limit_val_batches=0, plugins=[io])
    again.fit(module := tiny.TinyLM(), tiny.loader(), ckpt_path=f"{directory}/{min(found)}")
    again.save_checkpoint(f"{directory}/second.ckpt")
    return [found, len(module.losses), complete(directory) - found]


CASES = {
    "all is well": {"on_exception.ckpt", "pending.ckpt"},
    "nobody saves": {"pending.ckpt"},
    "the save before fails": {"on_exception.ckpt"},
    "the last save fails": {"pending.ckpt"},
}


def test_a_fit_that_fails_finishes_its_saves_and_a_second_one_is_clean(tmp_path: Path) -> None:
    for found in run_ranks(2, all_fail_in_training, str(tmp_path)):
        assert found == {case: [names, 2, {"second.ckpt"}] for case, names in CASES.items()}
