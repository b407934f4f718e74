"""Heartbeats of ranks in the store: a dead or silent rank is named on all others, and their collectives are aborted.

NCCL does not notice that a peer is gone: the others would wait in a collective until the timeout of the process group.
So each rank has a daemon thread that increments a key of its own in the store and checks that the next rank's key
changes. A rank whose key does not change for ``silent_s`` is lost, as is one whose process on this host is gone; a rank
that leaves with an error reports it. The others read the report, wait ``exception_meeting_s`` in case they fail with an
error of their own, log it, and abort the communicators of their accelerator. Gloo's can't be aborted: collectives there
wait until the timeout of the process group. A slow rank, or one stopped in a Python debugger, counts as alive: its
thread goes on writing.

In training, a heartbeat has the batch of its rank. A rank whose epoch is over waits for the others; one that sees that
the next rank has begun another batch of this epoch, which can't end without it, reports that.

Silence is counted in rounds of the watching thread, not in time, so suspending and continuing a whole job loses no
rank. Heartbeats end when rank 0 has left without an error, since its process may keep the store.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import (
    Store,
    abort_accelerators,
    clone_store,
    default_store,
    get_if_set,
    put_bytes,
)
from lightning_shardckpt.distributed.error_report import is_collective_failure
from lightning_shardckpt.distributed.host_ranks import HostRanks
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import one_line
from lightning_shardckpt.system.threads import NoThreadError
from lightning_shardckpt.system.tuning import Tuning
from lightning_shardckpt.system.workers import Worker

_LEFT = b"left"
_LEAVING_S = 1.0
_runs = itertools.count()
_running: list[Heartbeat] = []
_unusable = WeakSet[dist.ProcessGroup]()  # worlds in which a collective did not end on this rank
_log = logging.getLogger(__name__)


@contextmanager
def heartbeat(tuning: Tuning) -> Iterator[None]:
    """Watch the other ranks of the world inside the context; every rank must enter it.

    Raises:
        RankError: naming the lost rank, in place of the collective's own error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    beats = _start(tuning)
    try:
        yield
    except BaseException as error:
        beats.stop(error, check=is_collective_failure(error))
        if (beats.lost is not None or is_collective_failure(error)) and dist.group.WORLD is not None:
            _unusable.add(dist.group.WORLD)
        if beats.lost is not None and isinstance(error, Exception) and not isinstance(error, RankError):
            raise RankError(beats.lost) from error
        raise
    else:
        beats.stop()
        if beats.lost is not None:  # the outputs of an aborted collective are invalid
            raise RankError(beats.lost)
    finally:
        _running.remove(beats)


def watch_until_exit(tuning: Tuning) -> None:
    """Watch the other ranks of the world until this process ends; for scripts. Every rank must call it.

    `raise_if_lost` and the log report a lost rank. An uncaught exception is reported to the other ranks.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and not _running:
        atexit.register(_end_with_process, _start(tuning), os.getpid())


def _start(tuning: Tuning) -> Heartbeat:
    beats = Heartbeat(default_store(), f"heartbeat-{next(_runs)}", dist.get_rank(), dist.get_world_size(), tuning)
    beats.start()
    _running.append(beats)
    return beats


def _end_with_process(beats: Heartbeat, pid: int) -> None:
    if os.getpid() != pid:  # a fork
        return
    error: BaseException | None = getattr(sys, "last_value", None)  # the uncaught exception that Python has printed
    beats.stop(error, check=error is not None and is_collective_failure(error), wait_for_others=True)
    if beats.lost is not None and not beats.is_logged:
        _log.error("%s", beats.lost)


def is_world_unusable() -> bool:
    """Return True if this rank has left a collective of the current world that can't end any more."""
    return dist.is_initialized() and dist.group.WORLD in _unusable


def note_batch(epoch: int, batches: int) -> None:
    """Note how many batches of an epoch this rank has begun; without communication."""
    for beats in _running[-1:]:  # a run inside another one has its own
        beats.batch = (beats.batch[0], epoch, batches)


@contextmanager
def epoch_over() -> Iterator[None]:
    """Inside, this rank waits for the others after its last batch of the epoch; every rank must enter the context."""
    for beats in (running := _running[-1:]):
        beats.is_epoch_over = True
    yield
    for beats in running:
        ends, epoch, batches = beats.batch
        beats.batch, beats.is_epoch_over = (ends + 1, epoch, batches), False


def raise_if_lost() -> None:
    """Raise a RankError if a rank is lost; called by loops that wait for other ranks."""
    for beats in _running:
        if beats.lost is not None:
            raise RankError(beats.lost)


def abort_unfinished(device: torch.device, tuning: Tuning) -> None:
    """Abort the accelerator's communicators if its work does not end soon; call it when this rank fails.

    The device may be in a collective that another rank never enters. An operation that waits for the device, such as
    freeing its memory, would then hang.
    """
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    waits = Worker(partial(torch.get_device_module(device).synchronize, device), name="shardckpt-device", daemon=True)
    waits.start_or_run()
    if not waits.has_ended(tuning.roll_call_s):
        abort_accelerators()


def unequal_batches_text(epoch: int, rank: int, batches: int, other: int, begun: int) -> str:
    """Return the message for ranks that train on different numbers of batches in an epoch."""
    return (
        f"epoch {epoch} of the training ended after {batches} batches on rank {rank}, but rank {other} has begun "
        f"{begun}: all ranks must train on the same number. Give every rank as many batches (an IterableDataset must "
        "end after the same number on all data-parallel ranks), limit them to the smallest number "
        "(limit_train_batches), and set trainer.should_stop on all ranks or on none."
    )


class Heartbeat:
    """The heartbeats of the ranks in one run.

    Args:
        store: shared by the ranks.
        name: of the run; the same on all ranks.
        rank: of this process.
        world: the number of ranks.
        tuning: the interval of heartbeats, and the longest silence.

    Attributes:
        lost: a sentence with the lost rank and the reason; None if no rank is lost.
        is_logged: whether the log has that sentence.
        beats: the number of rounds of this rank.
        batch: how often `epoch_over` has ended on this rank, its epoch, and the number of its batches that have begun.
            A trial run, such as LearningRateFinder's, and the run after it have epochs of the same number.
        is_epoch_over: True if this rank has no more batches in the epoch.
    """

    def __init__(self, store: Store, name: str, rank: int, world: int, tuning: Tuning) -> None:
        self.lost: str | None = None
        self.is_logged = False
        self.batch, self.is_epoch_over = (0, 0, 0), False
        self._report: str | None = None  # of a lost rank, until it has been there for _report_wait_s
        self._server = store  # keeps a server in this process alive while other ranks use it
        self._store, self._rank, self._size, self._tuning = clone_store(store, name), rank, world, tuning
        self._silent_rounds = max(int(tuning.silent_s / tuning.heartbeat_s), 2)
        self._watched, self._last_beat, self._missed = (rank + 1) % world, b"", 0
        self.beats, self._report_rounds, self._is_over = 0, 0, False  # _is_over: rank 0 has left
        self._report_wait_s = tuning.exception_meeting_s
        self._host_ranks = HostRanks(self._store, rank)
        self._running = threading.Lock()  # held until `stop`; taken and released in one step each
        self._thread = Worker(self._run, name="shardckpt-heartbeat", daemon=True)

    def start(self) -> None:
        """Start to write and to watch; does nothing if the system can start no more threads."""
        put_bytes(self._store, f"{self._rank}", b"[0, 0, 0, 0]")
        self._running.acquire()
        with suppress(NoThreadError):
            self._thread.start()

    def stop(self, error: BaseException | None = None, *, check: bool = False, wait_for_others: bool = False) -> None:
        """Stop, and report to the other ranks that this one has left, or has failed with an error.

        Args:
            error: with which this rank leaves.
            check: look for a lost rank once more, and set `lost` without waiting.
            wait_for_others: let rank 0, whose process may keep the store, wait until the others have left too.
        """
        if self._running.locked():
            self._running.release()
        self._thread.has_ended(_LEAVING_S)
        leaving = Worker(lambda: self._leave(error, check=check), name="shardckpt-leave", daemon=True)
        leaving.start_or_run()
        leaving.has_ended(_LEAVING_S)  # the store may be gone
        deadline = time.monotonic() + self._tuning.heartbeat_s + self._tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: its server is in another process, and gone
            while wait_for_others and self._rank == 0 and leaving.has_ended(0) and time.monotonic() < deadline:
                if self._store.add("count of left", 0) >= self._size:
                    return
                time.sleep(self._tuning.look_again_s)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for up to ``timeout_s``; return True if this rank watches no more."""
        return self._thread.has_ended(timeout_s)

    def _leave(self, error: BaseException | None, *, check: bool) -> None:
        if check:
            self._report_wait_s = 0.0
            with suppress(RuntimeError):  # the store's: rank 0 may be the lost rank, after it has reported why
                self._round()
            self.lost = self.lost or self._report
        if error is not None and self.lost is None:
            self._report_lost(self._rank, f"failed: {type(error).__name__}: {one_line(str(error))}")
        put_bytes(self._store, f"{self._rank}", _LEFT)
        self._store.add("count of left", 1)

    def _run(self) -> None:
        requests, unanswered = Worker(self._round, name="shardckpt-beat", daemon=True), 0
        requests.start_or_run()
        while not self._running.acquire(timeout=self._tuning.heartbeat_s):
            answered = requests.has_ended(0) and requests.error is None
            unanswered = 0 if answered else unanswered + 1
            if self._is_over:
                return
            if unanswered >= self._silent_rounds:
                keeper = "the process that keeps the store of the process group, perhaps rank 0,"
                self.lost = f"{keeper} {self._silence_text}"
            if self.lost is not None:
                self.is_logged = True
                _log.error("%s", self.lost)  # the main thread may wait in gloo, which can't be aborted
                abort_accelerators()
                return
            if requests.has_ended(0):
                requests = Worker(self._round, name="shardckpt-beat", daemon=True)
                requests.start_or_run()

    @property
    def _silence_text(self) -> str:
        return f"gave no sign of life for {self._tuning.silent_s:g} s: it hangs, is stopped, or its machine is lost"

    def _round(self) -> None:
        """Write one heartbeat and check the other ranks, in a few requests."""
        self.beats += 1
        put_bytes(self._store, f"{self._rank}", json.dumps([self.beats, *self.batch]).encode())
        for rank, process in self._host_ranks.gone().items():
            if get_if_set(self._store, f"{rank}") != _LEFT:
                self._report_lost(rank, f"is lost: its process, pid {process.pid}, is gone")
        self._check_next_rank()
        self._is_over = get_if_set(self._store, "0") == _LEFT
        report = get_if_set(self._store, "lost")
        if report is None:
            return
        rank, text = json.loads(report)
        self._is_over = False
        self._report_rounds += 1  # during which this rank may end by itself, with an error of its own
        if rank is None:  # all ranks wait for each other
            self.lost = self._report = text
        elif rank != self._rank:
            self._report = f"rank {rank} {text}"
            if self._report_rounds * self._tuning.heartbeat_s >= self._report_wait_s:
                self.lost = self._report

    def _check_next_rank(self) -> None:
        beat = get_if_set(self._store, f"{self._watched}")
        if beat == _LEFT and (self._watched + 1) % self._size != self._rank:
            self._watched, self._last_beat, self._missed = (self._watched + 1) % self._size, b"", 0
        elif beat is None or beat != self._last_beat or beat == _LEFT:
            self._last_beat, self._missed = beat or b"", 0
            if beat and beat != _LEFT:
                self._compare_batches(beat)
        else:
            self._missed += 1
            if self._missed >= self._silent_rounds:
                self._report_lost(self._watched, self._silence_text)

    def _compare_batches(self, beat: bytes) -> None:
        """Report if the watched rank has begun a batch of an epoch that is over on this rank."""
        is_over, (ends, epoch, batches), (_, *its_epoch, begun) = self.is_epoch_over, self.batch, json.loads(beat)
        if is_over and its_epoch == [ends, epoch] and begun > batches:
            self._report_lost(None, unequal_batches_text(epoch, self._rank, batches, self._watched, begun))

    def _report_lost(self, rank: int | None, text: str) -> None:
        """Report a lost rank, or None for an error of all, to all ranks; only the first report is kept."""
        self._store.compare_set("lost", "", json.dumps([rank, text]))
