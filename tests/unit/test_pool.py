"""The pool that every multi-rank test stands on: clean processes, honest reports, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import pool
from tests.support.pool import RankFailure, run_ranks


def gathered(times: int) -> list[str]:
    """Many all-gathers under way at a time, of the kind that DTensor makes; names of this process's threads."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # torch 2.12

    for group in (dist.group.WORLD, dist.new_group()):
        for _ in range(times):
            under_way = [all_gather(torch.ones(4), 0, group) for _ in range(100)]
            assert all(bool((one == 1).all()) for one in under_way)
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_no_two_threads_work_for_one_group_of_gloo() -> None:
    for names in run_ranks(2, gathered, 3):
        assert names.count("pt_gloo_runloop") == 2  # of the world, and of the other group


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


@pytest.mark.slow
def test_ranks_and_server_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """A pytest that is killed can't clean up: the kernel must."""
    script = f"from tests.unit.test_pool import run_ranks, sleep_in; run_ranks(2, sleep_in, {str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", script], cwd=pool.ROOT) as parent:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        parent.kill()
    pids = {int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()}
    assert len(pids) == 3
    wait_until(lambda: not any(map(is_running, pids)))


def sleep_in(folder: str) -> None:
    temporary = Path(folder).with_suffix("." + os.environ["RANK"])
    temporary.write_text(f"{os.getpid()} {os.getppid()}")
    temporary.rename(Path(folder) / os.environ["RANK"])
    threading.Event().wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
