"""The pool that every multi-rank test stands on: clean processes, honest reports, nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import pool, warm_python
from tests.support.pool import ROOT, RankFailure, run_ranks


def rank_1_raises() -> None:
    import torch.distributed as dist

    print("before the barrier")
    if dist.get_rank() == 1:
        raise ValueError("the real reason")
    dist.barrier()


def test_the_rank_that_failed_first_is_reported_first_with_its_traceback_and_output() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, rank_1_raises)
    lines = str(failure.value).splitlines()
    assert lines[0] == "rank_1_raises: ranks 0, 1, 2 of 3 failed"
    assert lines[1].startswith("[rank 1] Traceback")
    assert '[rank 1]     raise ValueError("the real reason")' in lines
    assert "[rank 1] before the barrier" in lines
    assert isinstance(failure.value, AssertionError)


def rank_0_hangs() -> None:
    if os.environ["RANK"] == "0":
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_waits_for_a_failed_one_is_killed_after_the_grace() -> None:
    started = time.monotonic()
    hung, left = run_ranks(2, rank_0_hangs, grace_s=1, init_process_group=False, expect_errors=True)
    assert time.monotonic() - started < 30
    assert left.error[:2] == ("Killed", "killed by a signal, SIGKILL")
    assert left.killed
    assert left.stacks == ""
    assert hung.killed
    assert "in rank_0_hangs" in hung.stacks


def leak(what: str) -> int:
    if what == "thread":
        threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
    if what == "exception in a thread":
        thread = threading.Thread(target=int, args=("seven",))
        thread.start()
        thread.join()
    if what == "process" and (child := os.fork()) == 0:
        signal.pause()
    return child if what == "process" else 0


@pytest.mark.parametrize(
    ("what", "message"),
    [("thread", r"left threads behind: .*forgotten"), ("exception in a thread", r"invalid literal for int.*'seven'")],
)
def test_a_rank_that_loses_a_thread_or_its_exception_fails(what: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        run_ranks(1, leak, what, init_process_group=False)


def warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=1)


def test_a_warning_is_an_error_in_the_ranks_unless_pyproject_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailure, match="UserWarning: something new"):
        run_ranks(1, warn, "something new", init_process_group=False)
    monkeypatch.setattr(pool, "warning_filters", [*pool.warning_filters, "ignore:something known:UserWarning"])
    run_ranks(1, warn, "something known", init_process_group=False)


# ── forks that stand for new interpreters do what these do ────────────────────────────────────────────────────────────


ENV = os.environ | {"PYTHONPATH": str(ROOT)}
ENDS = """
import atexit, sys, threading, warnings
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread ended"))).start()
warnings.warn("as filters say")
print(__name__, __spec__, sys.argv, sys.path[0], "lightning_shardckpt" in sys.modules)
raise {raised}
"""


def both(command: Sequence[str], folder: Path) -> list[tuple[int, str, str]]:
    ways = (warm_python.run_new, warm_python.run)
    ended = [run(command, env=ENV, folder=folder, timeout_s=60) for run in ways]
    return [(done.returncode, done.stdout.replace(done.args[0], "python"), done.stderr) for done in ended]


@pytest.mark.parametrize("raised", ["SystemExit", "SystemExit(4)", "SystemExit('a reason')"])
def test_a_command_ends_as_in_a_new_interpreter(raised: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(code := ENDS.format(raised=raised))
    for command in (["ends.py", "--a"], ["-c", code, "--a"]):
        expected, found = both(command, tmp_path)
        assert found == expected
