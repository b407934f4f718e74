"""The ranks of a process group, and whether they live: a dead or failed rank ends what waits for it.

NCCL does not notice that a peer is gone. So each rank looks every few seconds, in a daemon thread from its first run or
``fabric.launch`` to its end, whether the processes of its host still live, by Linux's /proc, and which reports there
are in the store: of a dead process, of a rank that ends with an uncaught exception, also between two runs, and of one
that leaves a run with an error, for the ranks in the same run. The others read the report, wait
``exception_agreement_s`` in case they fail with an error of their own, log it, and abort the communicators of their
accelerator. Gloo's can't be aborted, but waits of this package end. A rank that is slow, stopped or in a debugger is
waited for, and so is a machine whose processes no other rank sees: the launcher ends the job then.

A rank whose epoch is over waits for the others, and says so in the store; one that has begun another batch of it
reports that.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

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
from lightning_shardckpt.errors import RankError, ShardCkptError
from lightning_shardckpt.system.host import TUNING, NoThreadError, Tuning, host_id, start_thread, start_time
from lightning_shardckpt.system.text import one_line

_LEAVING_S, _STORE_FAILURES = 1.0, 2  # failures in a row, after which the store is gone
_LEFT = "it has left: its process, or its process group, has ended"
# gloo has no exception class of its own
_COLLECTIVE_MESSAGES = re.compile(r"gloo|nccl|connection closed|connection reset|broken pipe|timed out", re.IGNORECASE)
_log = logging.getLogger(__name__)


def is_collective_failure(error: BaseException) -> bool:
    """Return True if a training collective raised ``error``, perhaps because a rank is gone."""
    if isinstance(error, ShardCkptError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or _COLLECTIVE_MESSAGES.search(str(error)) is not None


class _Report(NamedTuple):
    """``rank`` failed, or all did (None), in a run or for all time (0). Without a ``text``, it has only left."""

    rank: int | None
    run: int
    text: str | None
    read_s: float


class World:
    """The ranks of one process group, in which each one has an object of this class, and registers its process.

    All of this package use one connection to the ``store``, since each costs two file descriptors. Requests of several
    threads take turns, and none of them waits for another rank.

    Attributes:
        is_usable: False once this rank has left a collective that may never end.
        gone: the ranks whose processes are known to have ended, with a sentence for each, as of the last ``look``.
        batch: the epoch of this rank's run, and the number of its batches that have begun.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size, self.tuning = store, rank, size, TUNING
        self.is_usable, self.gone, self.batch = True, dict[int, str](), (0, 0)
        self._looking = threading.RLock()  # reentrant: a signal handler may save
        self._processes = list[tuple[int, int, str]]()  # of this host: rank, process and its start time
        self._reports = dict[int, _Report]()  # by number in the store; 0 is this rank's own
        self._host = f"host/{host_id()}"
        process = json.dumps([rank, os.getpid(), start_time(os.getpid())])
        put_bytes(store, f"{self._host}/{store.add(self._host, 1)}", process.encode())
        self._run = self._run_count = 0  # 0 between runs
        self._epochs_over = 0  # in this run; a trial run and the run after it have epochs of the same number
        self._logged, self._has_left = "", False
        self._running = threading.Lock()  # held until the end; taken and released in one step each
        self._thread = threading.Thread()

    @property
    def lost(self) -> str | None:
        """A sentence with the lost rank and the reason; None if no rank is lost."""
        return self._first_report(0, self._run)

    def _first_report(self, *runs: int, at_once: bool = False) -> str | None:
        """Return the sentence of the first report of other ranks; one that is new counts only with ``at_once``."""
        known_since = time.monotonic() - self.tuning.exception_agreement_s  # this rank may yet fail by itself
        for rank, run, text, read_s in list(self._reports.values()):
            is_believed = at_once or rank is None or rank in self.gone or read_s <= known_since
            if text is not None and rank != self.rank and run in runs and is_believed:
                return text if rank is None else f"rank {rank} {text}"
        return None

    def watch(self, tuning: Tuning) -> None:
        """Watch the other ranks until this process ends, or the default process group is destroyed.

        Every rank must call it; later calls change the times. Does nothing if the system can start no more threads.
        """
        self.tuning = tuning
        if not self._running.locked() and not self._has_left:
            assert dist.group.WORLD is not None
            self._running.acquire()
            watch = partial(self._watch, ref(dist.group.WORLD))
            self._thread = threading.Thread(target=watch, name="shardckpt-watch", daemon=True)
            with suppress(NoThreadError):
                start_thread(self._thread)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Report an error that leaves the context to the ranks inside it; a run inside another one is a part of it.

        Every rank must enter the same runs. Raises a RankError for a lost rank, in place of the collective's own error.
        """
        if self._run:
            yield
            return
        self._run_count += 1
        self._run, self._epochs_over, self.batch = self._run_count, 0, (0, 0)
        try:
            yield
        except BaseException as error:
            lost = self._report_failure(error, self._run)
            self.is_usable &= lost is None and not is_collective_failure(error)
            if lost is not None and isinstance(error, Exception) and not isinstance(error, ShardCkptError):
                raise RankError(lost) from error
            raise
        else:
            if self.lost is not None:  # the outputs of an aborted collective are invalid
                raise RankError(self.lost)
        finally:
            self._run = 0

    @contextmanager
    def epoch_over(self) -> Iterator[None]:
        """Inside, this rank waits for the others after its last batch of the epoch; every rank must enter it."""
        key = f"over/{self._run}/{self._epochs_over}"
        put_bytes(self.store, key, json.dumps([*self.batch, self.rank]).encode())
        yield
        self._epochs_over += 1
        if self.rank == 0:
            self.store.delete_key(key)

    def end_with_process(self, pid: int) -> None:
        """Tell the other ranks at the exit of process ``pid``, with the uncaught exception that Python has printed.

        Rank 0, whose process may keep the store, waits for a while until the others have ended, too.
        """
        if os.getpid() != pid:  # a fork
            return
        if self._running.locked():
            self._running.release()
        if self._thread.ident is not None:
            self._thread.join(_LEAVING_S)
        deadline = time.monotonic() + self.tuning.watch_s + self.tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: its server is in another process, and gone
            if (error := getattr(sys, "last_value", None)) is not None:
                self._report_failure(error, 0)
            self._leave()
            while self.rank == 0 and len(self.gone) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(self.tuning.look_again_s)
                self.look()
        self._log_lost()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._report(self.rank, 0, None)

    def _report(self, rank: int | None, run: int, text: str | None) -> None:
        put_bytes(self.store, f"report/{self.store.add('reports', 1)}", json.dumps([rank, run, text]).encode())

    def _report_failure(self, error: BaseException, run: int) -> str | None:
        """Return the sentence of the lost rank that may have caused an error; without one, report the error."""
        lost = self.find_lost() if is_collective_failure(error) else self.lost
        if lost is None:
            with suppress(RuntimeError):  # the store's: it is gone
                self._report(self.rank, run, f"failed: {type(error).__name__}: {one_line(str(error))}")
        return lost

    def look(self) -> None:
        """Look for ended processes and for reports. Any thread may call it. Raises RuntimeError without the store."""
        with self._looking:
            while (entry := get_if_set(self.store, f"{self._host}/{len(self._processes) + 1}")) is not None:
                self._processes.append(tuple(json.loads(entry)))
            # first: one that leaves says so before it ends
            ended = {rank: pid for rank, pid, started in self._processes if started and start_time(pid) != started}
            for number in range(1, self.store.add("reports", 0) + 1):
                if number not in self._reports and (entry := get_if_set(self.store, f"report/{number}")) is not None:
                    rank, run, text = json.loads(entry)
                    self._reports[number] = _Report(rank, run, text, time.monotonic())
                    if text is None and rank != self.rank:
                        self.gone[rank] = _LEFT
            for rank, pid in ended.items():
                if rank not in self.gone:
                    text = f"its process, pid {pid} on {os.uname().nodename}, is gone: it was killed, or it left"
                    self.gone[rank] = text
                    if self._running.locked():
                        self._report(rank, 0, f"is lost: {text}")
            over = get_if_set(self.store, f"over/{self._run}/{self._epochs_over}") if self._run else None
            if over is not None and self.lost is None:
                (epoch, batches, rank), (own_epoch, begun) = json.loads(over), self.batch
                if epoch == own_epoch and begun > batches:  # its epoch is over, and this rank goes on in it
                    self._report(None, self._run, unequal_batches_text(epoch, rank, batches, self.rank, begun))

    def find_lost(self) -> str | None:
        """Return the sentence of ``lost``, or of a rank with a new report, or whose process has ended."""
        deadline, found = time.monotonic() + self.tuning.error_delivery_s, None  # connections end before a process
        with suppress(RuntimeError):  # the store's: it is gone
            while found is None:
                self.look()
                found = self._first_report(0, self._run, at_once=True)
                if self.gone or time.monotonic() >= deadline:
                    break
                time.sleep(self.tuning.look_again_s)
        return found or self.lost or next((f"rank {r} is lost: {text}" for r, text in self.gone.items()), None)

    def _watch(self, group: ref[dist.ProcessGroup]) -> None:
        failures = 0
        while not self._running.acquire(timeout=self.tuning.watch_s):
            try:
                if group() is None or group() is not dist.group.WORLD:
                    self._leave()
                    return
                self.look()
                failures = 0
            except RuntimeError as error:
                failures += 1
                if failures == _STORE_FAILURES:
                    keeper = "the process that keeps the store of the process group, perhaps rank 0, is gone"
                    self._reports[0] = _Report(None, 0, self.gone.get(0) or f"{keeper}: {one_line(str(error))}", 0.0)
            if self.gone.get(0) == _LEFT and all(report.text is None for report in self._reports.values()):
                return  # the store may go with rank 0
            if self._log_lost():  # the main thread may wait in gloo, which can't be aborted
                abort_accelerators()
            if self._first_report(0) is not None:
                return

    def _log_lost(self) -> bool:
        """Log the lost rank; return False if there is none, or it was logged before."""
        if (lost := self.lost) is None or lost == self._logged:
            return False
        self._logged = lost
        _log.error("%s", lost)
        return True


def unequal_batches_text(epoch: int, rank: int, batches: int, other: int, begun: int) -> str:
    """Return the message for ranks that train on different numbers of batches in an epoch."""
    return (
        f"epoch {epoch} of the training ended after {batches} batches on rank {rank}, but rank {other} has begun "
        f"{begun}: give every rank as many batches (an IterableDataset must end after the same number on all "
        "data-parallel ranks; or set limit_train_batches), and set trainer.should_stop on all ranks or on none"
    )


# The default store keeps a server in this process alive while other ranks may use it.
_worlds: WeakKeyDictionary[dist.ProcessGroup, tuple[World, Store]] = WeakKeyDictionary()


def current_world() -> World:
    """Return the world of the default process group, which must be initialized. Not collective."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _worlds:
        store = default_store()
        world = World(clone_store(store, "shardckpt"), dist.get_rank(), dist.get_world_size())
        _worlds[group] = world, store
        atexit.register(world.end_with_process, os.getpid())
    return _worlds[group][0]


def watch_run(tuning: Tuning = TUNING) -> AbstractContextManager[None]:
    """Return the context of a run of all ranks, as `World.run`, in which they are watched; every rank must enter it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return nullcontext()
    current_world().watch(tuning)
    return current_world().run()


def raise_if_lost() -> None:
    """Raise a RankError if a rank is lost; called by loops that wait for other ranks."""
    group = dist.group.WORLD
    if group is not None and group in _worlds and (lost := _worlds[group][0].lost) is not None:
        raise RankError(lost)


def abort_unfinished(device: torch.device, tuning: Tuning) -> None:
    """When this rank fails, abort the accelerator's communicators if its work does not end soon."""
    # it may be in a collective that another rank never enters, and freeing its memory would wait for that
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    wait = partial(torch.get_device_module(device).synchronize, device)
    waits = threading.Thread(target=wait, name="shardckpt-device", daemon=True)
    with suppress(NoThreadError):
        start_thread(waits)
        waits.join(tuning.exception_agreement_s)
    if waits.is_alive():
        abort_accelerators()
