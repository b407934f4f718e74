"""The size of the package and the reach of its calls, as one table: ``python -m tests.sweeps.figures``.

Two ranks of FSDP on this machine's CPUs. A file or a function counts if Python entered it in a call, in any thread.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from lightning_shardckpt import load, save
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.system.text import table
from tests.support import tiny
from tests.support.pool import ROOT, run_ranks

PACKAGE = ROOT / "lightning_shardckpt"


def sizes() -> list[tuple[str, str, str]]:
    """Return lines and files of each folder, the largest first, and of all."""
    lines, files = Counter[str](), Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        for name in (path.relative_to(PACKAGE).parent.as_posix(), "all"):
            lines[name] += len(path.read_text().splitlines())
            files[name] += 1
    return [(name, f"{count:,}", f"{files[name]}") for name, count in lines.most_common()]


class Reach:
    """The functions of the package that are entered while it is a context, in all threads, and the steps of ranks."""

    def __init__(self) -> None:
        self.functions, self.steps = set[tuple[str, str, int]](), 0

    def __enter__(self) -> Reach:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))
            self.steps += code is Ranks.step.__code__

    def figures(self) -> tuple[int, int, int]:
        """Return the numbers of files, functions and steps of ranks."""
        return len({file for file, _, _ in self.functions}), len(self.functions), self.steps


def reaches(folder: str) -> dict[str, tuple[int, int, int]]:
    """Collective: every rank must call it. The first call of each kind warms caches, and isn't counted."""

    def measured(call: Callable[[], Any]) -> Reach:
        with Reach() as reach:
            call()
        return reach

    def fit(path: str | None) -> Reach:
        trainer = tiny.trainer({}, max_steps=4)
        return measured(lambda: trainer.fit(tiny.TinyLM(), tiny.loader(shuffle=False), ckpt_path=path))

    saver = tiny.trainer({}, max_steps=2)
    saver.fit(tiny.TinyLM(), tiny.loader(shuffle=False))
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    calls: dict[str, Callable[[], Any]] = {
        "Trainer.save_checkpoint": lambda: saver.save_checkpoint(f"{folder}/a.ckpt"),
        "save": lambda: save(f"{folder}/b", {"model": net}, overwrite=True),
        "load": lambda: load(f"{folder}/b", {"model": net}),
    }
    found = {name: [measured(call) for _ in range(2)][-1].figures() for name, call in calls.items()}
    straight, resumed = fit(None), fit(f"{folder}/a.ckpt")
    resumed.functions -= straight.functions
    resumed.steps -= straight.steps
    return {**found, "fit(ckpt_path=…), beyond fit()": resumed.figures()}


def main() -> None:
    """Print the tables."""
    print(table(("room", "lines", "files"), sizes(), ("lines", "files")))
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(2, reaches, folder, timeout_s=300)[1]
    rows = [(name, *map(str, figures)) for name, figures in found.items()]
    right = ("files", "functions", "exchanges")
    print("\n" + table(("call on rank 1", *right), rows, right))


if __name__ == "__main__":
    from tests.sweeps import figures  # ranks import what they run by the name of its module

    figures.main()
