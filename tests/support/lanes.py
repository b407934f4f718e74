"""Run the files of tests side by side, the longest first, and record what each takes.

Most tests with several ranks wait more than they compute, so there is one worker more than cores. A file stays in one
worker, as its fixtures do. ``python -m pytest --record-durations`` writes tests/durations.json, which says where the
time goes, and in which order to begin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
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
