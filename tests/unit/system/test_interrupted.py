"""What comes between a save and its end: Ctrl-C, a lack of threads, a fork. Oracle: what a load then brings back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_shardckpt import load, save, save_async, wait
from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.system.host import WRITERS
from lightning_shardckpt.tools.verify import verify
from tests.support.pool import ROOT

_START = threading.Thread.start


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])


def step_at(path: Path) -> int:
    assert verify(str(path)).findings == ()
    state = {"m": model(), "step": -1}
    load(path, state)
    step: int = state["step"]
    return step


@pytest.mark.parametrize("later_ms", [0, 1, 3, 10, 30])
def test_an_interrupt_after_the_hand_over_to_the_writer_does_not_touch_what_it_writes(
    later_ms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save(path, {"m": model(), "step": 1})

    def interrupted(thread: threading.Thread) -> None:
        _START(thread)
        if thread.name == "shardckpt-writer":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(later_ms / 1e3)  # the writer may be anywhere when this thread goes on

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_async(path, {"m": model(), "step": 2}, overwrite=True, size_per_shard=1e-3)
    wait()
    assert step_at(path) == 2
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupt_before_it_leaves_the_old_checkpoint_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save(path, {"m": model(), "step": 1})

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_async(path, {"m": model(), "step": 2}, overwrite=True)
    wait()
    assert step_at(path) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_without_another_thread_a_save_is_written_before_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()

    def one_is_refused(thread: threading.Thread) -> None:
        if thread.name == "shardckpt-writer" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        _START(thread)

    monkeypatch.setattr(threading.Thread, "start", one_is_refused)
    with pytest.warns(UserWarning, match=r"training waited for '.*/1' to be written: can't start new thread"):
        first = save_async(tmp_path / "1", {"m": model(), "step": 1})
    assert first.done() and step_at(tmp_path / "1") == 1
    second = save_async(tmp_path / "2", {"m": model(), "step": 2})
    wait()
    assert second.done() and step_at(tmp_path / "2") == 2


def saves_after_a_fork(folder: str) -> None:
    """A process without ranks is forked while its parent writes; both save."""
    gate, fsync = threading.Event(), os.fsync

    def waiting(file: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.wait()
        fsync(file)

    os.fsync = waiting
    save_async(f"{folder}/parent", {"m": model(), "step": 1})
    (background,) = WRITERS
    assert isinstance(background, Background)
    lock, held, forked = background.lock, threading.Event(), threading.Event()

    def hold() -> None:  # as the writer may at that moment
        with lock:
            held.set()
            forked.wait()

    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    forked.set()
    if child == 0:
        gate.set()
        save_async(f"{folder}/child", {"m": model(), "step": 2})
        wait()
        os._exit(0 if step_at(Path(folder, "child")) == 2 else 1)
    status = os.waitpid(child, 0)[1]
    gate.set()
    wait()
    assert (status, step_at(Path(folder, "parent")), step_at(Path(folder, "child"))) == (0, 1, 2)


def test_a_forked_process_saves_what_is_its_own_and_leaves_the_rest_to_its_parent(tmp_path: Path) -> None:
    code = f"from tests.unit.system.test_interrupted import saves_after_a_fork; saves_after_a_fork({str(tmp_path)!r})"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
