"""Run a command for each complete checkpoint of a training, ``shardckpt follow RUN_DIR -- python eval.py {}``.

A checkpoint is known by the id of its save, so a copy of it is not evaluated again. Training and follower communicate
by ``storage.run_folder`` alone: they may run on different machines, and end at any time.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, RankError
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.storage.run_folder import EVALUATIONS, RunFolder, Saved

_GRACE_S = 10.0  # for an interrupted command to end
_SETTLE_S = 1.0  # a deletion that did not see this follower is over by then
_RENEW_S = 10.0  # between two signs of life
# Starts a command that gets SIGTERM when this process ends, however it ends (1 is PR_SET_PDEATHSIG).
_START = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


def follow(
    run_dir: str | os.PathLike[str],
    command: Sequence[str],
    *,
    newest: bool = False,
    once: bool = False,
    interval_s: float = 10.0,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Run a command for each complete checkpoint of a run, in the order of steps, until the training has ended.

    Each save is evaluated once, also if this process is started again; an evaluation that was interrupted is repeated.
    A checkpoint under evaluation is not deleted by ``ShardCkptIO`` before the command has ended. The result is added to
    ``evaluations.jsonl`` in the folder: path, step, save_id, start, seconds, exit status (negative for a signal), and
    as metrics the last line of the output that is a JSON object.

    Args:
        run_dir: the folder of the checkpoints, which may not exist yet, or its URL.
        command: ``{}`` in its arguments becomes the path of the checkpoint. A script ``*.py`` runs in this Python.
        newest: evaluate only the newest of several checkpoints that wait; record the others as skipped.
        once: evaluate the checkpoints that are there, and don't wait for more.
        interval_s: seconds between two looks for checkpoints.
        storage_options: for URLs, by fsspec's names.

    Returns:
        How many commands failed. Ctrl-C ends the command, and returns.

    Raises:
        ValueError: if no argument has ``{}``, or nothing can be written to ``run_dir``.
        FileNotFoundError: if there is no such program, or with ``once`` no folder.
        RankError: if another process has begun to follow the run.
    """
    if not any("{}" in argument for argument in command):
        raise ValueError(f"the command {shlex.join(command)!r} needs {{}} in the place of the checkpoint's path")
    command = [sys.executable, *command] if command[0].endswith(".py") else command
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} to run")
    folder, failures = RunFolder(run_dir, StorageRouter(storage_options=storage_options)), 0
    process = f"process {os.getpid()} of {os.uname().nodename!r}, begun {datetime.now(UTC):%Y-%m-%d %H:%M:%S}"

    def hold(checkpoint: str | None = None) -> None:
        """Say that this process is alive, and evaluates a checkpoint."""
        if (other := folder.follower().get("process", process)) != process:
            raise RankError(f"{other} has begun to follow {folder.path!r}")
        folder.set_follower(process, checkpoint)

    with suppress(KeyboardInterrupt):
        if not folder.exists():
            missing = f"no run to follow: the folder {folder.path!r} does not exist yet"
            if once:
                raise CheckpointNotFoundError(missing)
            _say(missing)
        while not folder.exists():
            time.sleep(interval_s)
        try:
            folder.set_follower(process)  # an earlier one ends when it sees that
            time.sleep(_SETTLE_S)
            evaluations = [one for one in folder.evaluations() if newest or "status" in one]
            while True:
                is_over, pending = False, list[Saved]()
                try:
                    hold()
                    notes = folder.remove_requested()
                    is_over = once or folder.has_ended()  # before the look, so that nothing is saved after it
                    pending = folder.pending(evaluations)
                except OSError as error:
                    if once:
                        raise
                    notes = [f"looking again: {error}"]
                _say(*notes)
                if not pending and is_over:
                    break
                if not pending:
                    time.sleep(interval_s)
                    continue
                saved = pending[-1 if newest else 0]
                results = [{**one, "skipped": True} for one in pending[:-1] if newest]
                hold(name := os.path.basename(saved["path"]))
                if not folder.is_requested(saved["path"]) and saved in folder.pending(evaluations):
                    results.append(_evaluate(command, saved, partial(hold, name)))
                    failures += results[-1]["status"] != 0
                    hold(name)
                if results:
                    folder.add_lines(EVALUATIONS, results)
                    evaluations += results
        finally:
            with suppress(OSError, RankError):
                hold()
                folder.set_follower(None)
                _say(*folder.remove_requested())
    return failures


def _evaluate(command: Sequence[str], saved: Saved, renew: Callable[[], None]) -> dict[str, Any]:
    """Run the command for a checkpoint, and print its output; return what is recorded."""
    command = [argument.replace("{}", saved["path"]) for argument in command]
    _say(f"step {saved['step']}: {shlex.join(command)}")
    start, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _START, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,  # so that it gets one signal, and ends with all that it has started
        )
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_RENEW_S)
                try:
                    renew()
                except OSError as error:  # the next attempt is in time, too
                    _say(f"not renewed: {error}")
        except BaseException:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(_GRACE_S)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    metrics = None
    for line in lines:
        with suppress(OSError, ValueError):  # whoever reads it may be gone
            sys.stdout.write(f"{line}\n")
        if line.lstrip().startswith("{"):
            with suppress(ValueError):
                metrics = json.loads(line)
    status, seconds = process.returncode, round(time.monotonic() - began, 3)
    result = "done" if status == 0 else f"failed with status {status}"
    _say(f"step {saved['step']}: {result} in {seconds:.0f} s")
    return {**saved, "start": start, "seconds": seconds, "status": status, "metrics": metrics}


def _say(*texts: str) -> None:
    for text in texts:
        sys.stderr.write(f"{text}\n")
