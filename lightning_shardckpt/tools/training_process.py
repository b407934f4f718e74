"""Run somebody's training command with something added to every process of it, and nothing of it left at the end.

What is added is an entry point of Lightning, found by ``PYTHONPATH``, which reaches the ranks however they are started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_shardckpt.errors import RankError
from lightning_shardckpt.tools.run_records import RunPlan, last_step, read_records

_PACKAGE = Path(__file__).parents[1]
_ENTRY_POINTS = """[lightning.pytorch.callbacks_factory]
prove_resume = shardckpt_prove_resume:callbacks
[lightning.fabric.callbacks_factory]
prove_resume = shardckpt_prove_resume:callbacks_of_fabric
"""
_HOOK = '''"""Made by prove-resume: every Trainer of this run is given a recorder."""


def callbacks():
    from lightning_shardckpt.recording.run_recorder import recorder_of

    return [recorder_of({plan!r})]


def callbacks_of_fabric():
    from lightning_shardckpt.recording.run_recorder import end_if_fabric_trains

    end_if_fabric_trains()
    return []
'''
_SHOWN_LINES = 20


def run_recorded(command: Sequence[str], plan: RunPlan, folder: Path, timeout_s: float) -> str:
    """Run a training command under a plan, and wait until it has ended. Returns what it was and printed at the end.

    Args:
        command: a program and its arguments; one that is a Python script is run by this Python.
        plan: what every rank records and does.
        folder: for what the run prints, and what is added to it.
        timeout_s: after which all of its processes are killed.

    Raises:
        RankError: if it fails or takes too long; with the end of what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _runnable(command),
            env=os.environ | {"PYTHONPATH": _python_path(folder, plan)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that its first process has left
            process.wait()
    shown = f"{' '.join(command)}\n{_tail(log)}"
    if status is None:
        reached = max(map(last_step, read_records(plan.records)), default=None)
        so_far = "before a Trainer began a fit" if reached is None else f"after step {reached} of {plan.last_step}"
        raise RankError(f"the {folder.name} run did not end in {timeout_s:g} s and was killed {so_far}: {shown}")
    if status:
        raise RankError(f"the {folder.name} run ended with status {status}: {shown}")
    return shown


def _runnable(command: Sequence[str]) -> list[str]:
    return [sys.executable, *command] if command[0].endswith(".py") else list(command)


def _python_path(folder: Path, plan: RunPlan) -> str:
    """Return a search path on which an entry point, and this very package, are found first."""
    added = folder / "added"
    about = added / "shardckpt_prove_resume-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-prove-resume\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "plan.json").write_text(plan.to_json())
    (added / "shardckpt_prove_resume.py").write_text(_HOOK.format(plan=str(folder / "plan.json")))
    with suppress(FileExistsError):
        (added / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    return os.pathsep.join(filter(None, [str(added), os.environ.get("PYTHONPATH")]))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"The last lines of {log}:", *(f"  {line}" for line in lines[-_SHOWN_LINES:])])
