"""Run files of tests side by side, the longest first, in forked workers, and record what each takes.

Most tests with several ranks wait more than they compute, so there is one worker more than cores. A file stays in one
worker, as its fixtures do. ``python -m pytest --record-durations`` writes tests/durations.json, which says where the
time goes, and in which order to begin.

Workers, each with its fork server, are forked from one process that has imported torch and Lightning: each would import
them for itself, at twelve seconds of processor time a worker and server. xdist starts a worker as a command that reads
code from its stdin: here the command hands its stdin, stdout and stderr to the process that forks, and stays as long as
the worker does. A worker is as fresh as one that xdist starts, but for what is imported.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

RECORD = Path(__file__).parents[1] / "durations.json"
_NAMED = 100  # so many tests are in the record by name
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def worker_count(arguments: Sequence[str]) -> int:
    """Return how many processes run what is asked for on the command line; 0 stands for the one of pytest alone.

    A single file stays in the process of pytest: it would go to one worker anyway, which first has to start.
    """
    if len(arguments) == 1 and ".py" in arguments[0]:
        return 0
    return len(os.sched_getaffinity(0)) + 1


def longest_first(files: Iterable[str]) -> dict[str, int]:
    """Return the rank of each path in the order in which to begin; what has no record comes first."""
    known = json.loads(RECORD.read_text())["files"] if RECORD.exists() else {}

    def seconds(file: str) -> float:
        return known[file]["seconds"] if file in known else float("inf")

    return {file: number for number, file in enumerate(sorted(dict.fromkeys(files), key=seconds, reverse=True))}


class Durations:
    """What each test took, from the reports of its phases, which come from all workers."""

    def __init__(self) -> None:
        self._tests: dict[str, tuple[float, float]] = {}

    def add(self, test: str, seconds: float, cpu_s: float) -> None:
        """Count a phase of a test, a node id of pytest."""
        so_far = self._tests.get(test, (0.0, 0.0))
        self._tests[test] = so_far[0] + seconds, so_far[1] + cpu_s

    def write(self) -> None:
        """Replace the record: totals, files and the longest tests, each list by processor time."""
        files: dict[str, list[tuple[float, float]]] = {}
        for test, took in self._tests.items():
            files.setdefault(test.partition("::")[0], []).append(took)
        tests = _by_cpu({test: _sums([took]) for test, took in self._tests.items()})
        record = {
            "total": {"the suite": _sums(list(self._tests.values()))},
            "files": _by_cpu({file: _sums(took) for file, took in files.items()}),
            "tests": {test: tests[test] for test in list(tests)[:_NAMED]},
        }
        sections = (f' "{name}": {{\n{_lines(entries)}\n }}' for name, entries in record.items())
        RECORD.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def _lines(entries: dict[str, dict[str, float]]) -> str:
    return ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())


def _by_cpu(entries: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return dict(sorted(entries.items(), key=lambda item: -item[1]["cpu_s"]))


def _sums(took: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "tests": len(took),
        "seconds": round(sum(seconds for seconds, _ in took), 1),
        "cpu_s": round(sum(cpu for _, cpu in took), 1),
    }


def cpu_s() -> float:
    """Return the processor time that this process and its descendants have used so far, in seconds.

    What a process used that has ended counts with the one that waited for it.
    """
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it ended since
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
                used[int(folder.name)] = sum(map(int, fields[11:15]))
    return sum(used.get(pid, 0) for pid in _tree(os.getpid(), children)) / _TICKS_PER_S


def _tree(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, ()):
        yield from _tree(child, children)


ROOT = Path(__file__).parents[2]
LEAVING_S = 120  # workers have ended by then, or never will


@contextmanager
def forking() -> Iterator[str]:
    """Run the process that forks; the value is the command of a worker, which xdist's `popen` takes for a Python."""
    with tempfile.TemporaryDirectory(prefix="workers-") as folder, socket.socket(socket.AF_UNIX) as listening:
        address = os.path.join(folder, "socket")
        listening.bind(address)
        listening.listen()  # who comes before the imports are done waits
        command = [sys.executable, "-m", "tests.support.workers", "fork", str(listening.fileno())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # A session of its own: Ctrl-C must reach pytest alone, which then ends the workers.
        with subprocess.Popen(
            command, cwd=ROOT, env=env, pass_fds=[listening.fileno()], stdin=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                yield shlex.join([sys.executable, "-P", __file__, "be", address])
                process.communicate(timeout=LEAVING_S)
            finally:
                process.kill()


def _be_worker(address: str, code: str) -> None:
    """Have a worker run `code` with what this process was given, and wait until it ends."""
    given = json.dumps({"code": code, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(address)
        socket.send_fds(worker, [len(given).to_bytes(4, "big")], [0, 1, 2])
        worker.sendall(given)
        for end in (0, 1, 2):
            os.close(end)
        worker.recv(1)


def _fork_workers(listening: socket.socket) -> None:
    """Fork a worker for whoever connects, until stdin ends, as it does with pytest; then wait for all of them."""
    from tests.support import pool

    pool.preload()
    pool.be_ready_to_fork()
    pool.use_huge_pages()
    this = os.getpid()
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            pool.die_with(this)
            listening.close()
            length, ends, *_ = socket.recv_fds(connection, 4, 3)
            given = json.loads(_received(connection, int.from_bytes(length, "big")))
            for number, end in enumerate(ends):
                os.dup2(end, number)
                os.close(end)
            os.environ.clear()
            os.environ.update(given["env"])
            os.chdir(given["cwd"])
            pool.fork_server()
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv, sys.path[0] = ["-c"], ""
            exec(given["code"], main.__dict__)
            sys.exit()  # the connection closes
        connection.close()
    with suppress(ChildProcessError):  # none is left
        while True:
            os.wait()


def _received(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        assert more, "the worker's command ended"
        got += more
    return got


if __name__ == "__main__":
    if sys.argv[1] == "be":
        _be_worker(sys.argv[2], sys.argv[-1])
    else:
        _fork_workers(socket.socket(fileno=int(sys.argv[2])))
