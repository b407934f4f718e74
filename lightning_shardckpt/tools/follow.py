"""Run a command for each complete checkpoint of a training, ``shardckpt follow RUN_DIR -- python eval.py {}``.

A checkpoint is complete if it has a root index, and is known by the id of its save, so a copy of it is not evaluated
again. ``evaluations.jsonl`` beside the checkpoints says what was evaluated, to the next follower, too. Training and
follower communicate by ``storage.run_folder`` alone: they may run on different machines, and end at any time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, BinaryIO, TypeAlias

from lightning_shardckpt.errors import CheckpointNotFoundError, RankError, ShardCkptError
from lightning_shardckpt.storage.router import StorageRouter, is_url
from lightning_shardckpt.storage.run_folder import HOLD_S, RENEW_S, Follower, RunFolder
from lightning_shardckpt.transfer.reader import Checkpoint

LOOK_S, LOOK_AT_STORE_S = 5.0, 30.0  # a store lists all objects of all checkpoints
GRACE_S = 10.0  # for an interrupted command to end
_SETTLE_S = 1.0  # a deletion that did not see this follower is over by then
_OUTPUT_S = 5.0  # for the rest of a command's output, and between two looks at it
# Starts a command that gets SIGTERM when this process ends, however it ends (1 is PR_SET_PDEATHSIG).
_START = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


Saved: TypeAlias = dict[str, Any]
"""A complete checkpoint as ``evaluations.jsonl`` names it: its ``path``, ``step`` and ``save_id``."""


class Run:
    """The complete checkpoints of a run, and which of them are to be evaluated. A root index is read once per save.

    Args:
        path: the folder of the checkpoints, which may not exist yet, or its URL.
        storage: with the options for URLs.
    """

    def __init__(self, path: str | os.PathLike[str], storage: StorageRouter) -> None:
        self.folder, self._storage = RunFolder(path, storage), storage
        self._known = dict[str, tuple[str, Saved | None]]()

    def pending(self, evaluations: Sequence[Mapping[str, Any]]) -> list[Saved]:
        """Return the checkpoints without an evaluation, by step; each save once.

        A ``last*`` is left out if its step was also saved under another name.
        """
        tags = self.folder.list_complete()
        for path, tag in tags.items():
            if self._known.get(path, ("", None))[0] != tag:
                self._known[path] = tag, self._read(path)
        found = [saved for path in tags if (saved := self._known[path][1]) is not None]
        found.sort(key=lambda one: (one["step"] or 0, one["path"]))
        others = {one["step"] for one in (*found, *evaluations) if not _is_copy(one)}
        pending = {one["save_id"]: one for one in reversed(found) if not (_is_copy(one) and one["step"] in others)}
        done = {one["save_id"] for one in evaluations}
        return [one for one in found if pending.get(one["save_id"]) is one and one["save_id"] not in done]

    def _read(self, path: str) -> Saved | None:
        try:
            with Checkpoint(self._storage, path) as checkpoint:
                return {"path": path, "step": checkpoint.root.step, "save_id": checkpoint.root.save_id}
        except CheckpointNotFoundError:  # deleted meanwhile
            return None
        except ShardCkptError as error:
            _say(f"not evaluated: {error}")
            return None


def _name(saved: Mapping[str, Any]) -> str:
    return os.path.basename(str(saved["path"]))


def _is_copy(saved: Mapping[str, Any]) -> bool:
    """Return True for a ``last*``: ModelCheckpoint(save_last=True) saves a second checkpoint of the same step."""
    return re.match(r"last\b", _name(saved)) is not None


def follow(
    run_dir: str | os.PathLike[str],
    command: Sequence[str],
    *,
    newest: bool = False,
    once: bool = False,
    interval_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Run a command for each complete checkpoint of a run, in the order of steps, until the training has ended.

    Each save is evaluated once, also if this process is started again; an evaluation that was interrupted is repeated.
    A checkpoint under evaluation is not deleted by ``ShardCkptIO`` before the command has ended. The result is added to
    ``evaluations.jsonl`` in the folder: path, step, save_id, start, seconds, exit status (negative for a signal), and
    as metrics the last line of the output that is a JSON object.

    Args:
        run_dir: the folder of the checkpoints, such as ``dirpath`` of a ModelCheckpoint, or its URL. It may not exist
            yet.
        command: ``{}`` in its arguments becomes the path of the checkpoint. A script ``*.py`` runs in this Python.
        newest: evaluate only the newest of several checkpoints that wait; record the others as skipped.
        once: evaluate the checkpoints that are there, and don't wait for more.
        interval_s: seconds between two looks for checkpoints: 5 by default, 30 for URLs.
        storage_options: for URLs, by fsspec's names.

    Returns:
        How many commands failed. Ctrl-C ends the command, and returns.

    Raises:
        ValueError: if no argument has ``{}``, or nothing can be written to ``run_dir``.
        FileNotFoundError: if there is no such program.
        OSError: if an evaluation can't be recorded.
        RankError: if another process has begun to follow the run, since this one was stopped for minutes.
    """
    if not any("{}" in argument for argument in command):
        raise ValueError(f"the command {shlex.join(command)!r} needs {{}} in the place of the checkpoint's path")
    command = [sys.executable, *command] if command[0].endswith(".py") else command
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} to run")
    run = Run(run_dir, StorageRouter(storage_options=storage_options))
    look_s = interval_s or (LOOK_AT_STORE_S if is_url(run.folder.path) else LOOK_S)
    following = _Following(run, command)
    with suppress(KeyboardInterrupt):
        following.wait_for_turn(None if once else look_s)
        with following.held(skipped_count=newest):
            while (pending := following.look(once)) is not None:
                if pending:
                    following.evaluate(pending, newest)
                else:
                    time.sleep(look_s)
    return following.failures


class _Following:
    """The state of ``follow``: this process holds the run while it evaluates one checkpoint after the other."""

    def __init__(self, run: Run, command: Sequence[str]) -> None:
        self._folder, self._run, self._command = run.folder, run, command
        self._evaluations = list[dict[str, Any]]()
        self._self = Follower.this_process(None)
        self._first: str | None = None  # the checkpoint whose evaluation was interrupted
        self._renewed, self._has_looked = 0.0, False
        self.failures = 0

    def wait_for_turn(self, look_s: float | None) -> None:
        """Wait until the folder exists and no other process follows it; without ``look_s``, raise an error."""
        reason = None
        while True:
            other = self._folder.follower()
            if not self._folder.exists():
                now = f"no run to follow: the folder {self._folder.path!r} does not exist yet"
            elif other is not None and other.is_alive():
                now = (
                    f"process {other.pid} of {other.host_name!r} follows {self._folder.path!r} already. If it was "
                    f"killed on another machine, this is known after {HOLD_S / 60:.0f} minutes"
                )
            else:
                return
            if look_s is None:
                raise CheckpointNotFoundError(now)
            if reason != now:
                _say(now)
            reason = now
            time.sleep(look_s)

    @contextmanager
    def held(self, *, skipped_count: bool) -> Iterator[None]:
        """Be the follower of the run; skipped checkpoints may count as evaluated."""
        before = self._folder.follower()
        try:
            self._first = None if before is None else before.checkpoint
            self._hold(self._first)  # a deletion that was requested meanwhile still waits
            time.sleep(_SETTLE_S)
            self._evaluations = [one for one in self._folder.evaluations() if skipped_count or "status" in one]
            yield
        finally:
            with suppress(OSError):
                if self._self.is_same_process(self._folder.follower() or self._self):
                    self._release()
                    self._folder.set_follower(None)

    def _hold(self, checkpoint: str | None) -> None:
        self._self, self._renewed = Follower.this_process(checkpoint), time.monotonic()
        self._folder.set_follower(self._self)

    def _release(self) -> None:
        self._hold(None)
        for note in self._folder.remove_requested():
            _say(note)

    def _renew(self) -> None:
        """Tell the training that this process is alive, once a minute."""
        if time.monotonic() - self._renewed < RENEW_S:
            return
        other = self._folder.follower()
        if other is not None and not self._self.is_same_process(other):
            raise RankError(f"process {other.pid} of {other.host_name!r} has begun to follow {self._folder.path!r}")
        self._hold(self._self.checkpoint)

    def look(self, once: bool) -> list[Saved] | None:
        """Return the checkpoints that wait; None if there will be no more. After an error of a store, look again."""
        try:
            self._renew()
            is_over = once or self._folder.has_ended()  # before the look, so that nothing is saved after it
            pending = self._run.pending(self._evaluations)
        except OSError as error:
            if not self._has_looked:
                raise
            _say(f"looking again: {error}")
            return []
        self._has_looked = True
        return None if is_over and not pending else pending

    def evaluate(self, pending: list[Saved], newest: bool) -> None:
        """Evaluate the first checkpoint of several, or skip all but the newest."""
        if newest and len(pending) > 1:
            self._record(*({**one, "skipped": True} for one in pending[:-1]))
            pending = pending[-1:]
        saved, self._first = next((one for one in pending if _name(one) == self._first), pending[0]), None
        self._hold(_name(saved))
        if self._folder.is_requested(saved["path"]):
            time.sleep(_SETTLE_S)
        if saved in self._run.pending(self._evaluations):  # not deleted or replaced meanwhile
            command = [argument.replace("{}", saved["path"]) for argument in self._command]
            _say(f"step {saved['step']}: {shlex.join(command)}")
            start, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
            status, metrics = self._execute(command)
            seconds = round(time.monotonic() - began, 3)
            self._record({**saved, "start": start, "seconds": seconds, "status": status, "metrics": metrics})
            self.failures += status != 0
            result = "done" if status == 0 else f"failed with status {status}"
            _say(f"step {saved['step']}: {result} in {seconds:.0f} s")
        self._release()

    def _record(self, *evaluations: dict[str, Any]) -> None:
        self._folder.add_evaluations(*evaluations)
        self._evaluations += evaluations

    def _execute(self, command: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
        """Run a command, and print its output; return its exit status and the last JSON object that it printed."""
        metrics = list[dict[str, Any]]()
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _START, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that it gets one signal, and ends with all that it has started
        )
        output = threading.Thread(target=_copy_output, args=(process.stdout, metrics), daemon=True)
        output.start()
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_OUTPUT_S)
                try:
                    self._renew()
                except OSError as error:  # the next attempt is in time, too
                    _say(f"not renewed: {error}")
        except BaseException:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(GRACE_S)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.join(_OUTPUT_S)  # what left the session may keep the output open
        return process.returncode, metrics[-1] if metrics else None


def _copy_output(output: BinaryIO, metrics: list[dict[str, Any]]) -> None:
    """Print the output of a command as it comes, and put the last of its lines that is a JSON object in ``metrics``."""
    with TextIOWrapper(output, errors="replace", newline="") as lines:  # a progress bar ends lines by \r
        for line in lines:
            with suppress(OSError, ValueError):  # whoever reads it is gone: the command goes on
                sys.stdout.write(line)
                sys.stdout.flush()
            if line.lstrip().startswith("{"):
                with suppress(ValueError):
                    metrics[:] = [json.loads(line)]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
