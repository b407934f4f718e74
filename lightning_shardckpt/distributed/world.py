"""The ranks of a process group, and whether they live: a dead or failed rank ends what waits for it.

NCCL does not notice that a peer is gone: the others would wait in a collective until the timeout of the process group.
So each rank looks every few seconds, in a daemon thread from its first run or ``fabric.launch`` to its end, whether the
processes of its host live, and which reports there are in the store: of a dead process, of a rank that ends with an
uncaught exception, also between two runs, and of one that leaves a run with an error, for the ranks in the same run.
The others read the report, wait ``exception_agreement_s`` in case they fail with an error of their own, log it, and
abort the communicators of their accelerator. Gloo's can't be aborted: collectives there wait until the timeout of the
process group, but waits of this package end. A rank that is slow, stopped or in a debugger is waited for, and so is a
machine whose processes no other rank sees: the launcher ends the job then.

A rank whose epoch is over waits for the others, and says so in the store; one that has begun another batch of this
epoch, which can't end without it, reports that. Processes are looked up in Linux's /proc; without it, all count as
alive.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
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
from lightning_shardckpt.system.host import TUNING, Tuning, host_id, start_time
from lightning_shardckpt.system.text import one_line
from lightning_shardckpt.system.threads import NoThreadError, Worker

_LEAVING_S = 1.0
_STORE_FAILURES = 2  # in a row, after which the store is gone
_CHECKED = 64  # processes that a rank checks; with more on a host, each checks the next ones, and together all
_COLLECTIVE_MESSAGES = re.compile(r"gloo|nccl|connection closed|connection reset|broken pipe|timed out", re.IGNORECASE)
_log = logging.getLogger(__name__)


def is_collective_failure(error: BaseException) -> bool:
    """Return True if a training collective raised ``error``, perhaps because a rank is gone.

    Also matches messages, since gloo has no exception class of its own.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, ShardCkptError) and (
        isinstance(error, dist.DistError) or _COLLECTIVE_MESSAGES.search(str(error)) is not None
    )


class World:
    """The ranks of one process group, in which each one has an object of this class.

    Args:
        store: shared by the ranks, through a connection of its own. All of this package use it: more connections would
            cost a file descriptor each on this rank, and one on the rank that keeps the store. Requests of several
            threads take turns, and none of them waits for another rank.
        rank: of this process, which is registered.
        size: the number of ranks.

    Attributes:
        is_usable: False once this rank has left a collective that may never end.
        gone: the ranks whose processes have ended, with a sentence for each, as of the last ``look``.
        batch: the epoch of this rank's run, and the number of its batches that have begun.
        tuning: the times.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size, self.tuning = store, rank, size, TUNING
        self.is_usable, self.gone, self.batch = True, dict[int, str](), (0, 0)
        self._looking = threading.RLock()  # reentrant: a signal handler may save
        self._processes, self._left = list[tuple[int, int, str]](), list[int]()  # rank, process and its start time
        self._host = f"host/{host_id()}"
        self._number = store.add(self._host, 1)
        process = json.dumps([rank, os.getpid(), start_time(os.getpid())])
        put_bytes(store, f"{self._host}/{self._number}", process.encode())
        self._run = self._run_count = 0  # 0 between runs
        self._epochs_over = 0  # in this run; a trial run and the run after it have epochs of the same number
        self._lost: str | None = None  # for all time
        self._failed: str | None = None  # in this run
        self._reports = dict[str, float]()  # the time since which a report is there
        self._is_logged = self._has_left = False
        self._running = threading.Lock()  # held until `end`; taken and released in one step each
        self._thread = Worker(lambda: None, name="shardckpt-watch", daemon=True)

    @property
    def lost(self) -> str | None:
        """A sentence with the lost rank and the reason; None if no rank is lost."""
        return self._failed or self._lost

    # --- the life of a rank ---

    def watch(self, tuning: Tuning, has_group: Callable[[], bool] = lambda: True) -> None:
        """Watch the other ranks until the end; does nothing if the system can start no more threads.

        Args:
            tuning: the times; a later call changes them.
            has_group: returns False once this rank has destroyed the process group, which ends the watch.
        """
        self.tuning = tuning
        if not self._running.locked() and not self._has_left:
            self._running.acquire()
            self._thread = Worker(partial(self._watch, has_group), name="shardckpt-watch", daemon=True)
            with suppress(NoThreadError):
                self._thread.start()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Report an error that leaves the context to the ranks inside it; a run inside another one is a part of it.

        Every rank must enter the same runs.

        Raises:
            RankError: naming the lost rank, in place of the collective's own error.
        """
        if self._run:
            yield
            return
        self._run_count += 1
        self._begin(self._run_count)
        try:
            yield
        except BaseException as error:
            is_collective = is_collective_failure(error)
            lost = self.find_lost() if is_collective else self.lost
            if lost is None:
                with suppress(RuntimeError):  # the store's: it is gone
                    self._report(f"failed/{self._run}", self.rank, _failure_text(error))
            if lost is not None or is_collective:
                self.is_usable = False
            if lost is not None and isinstance(error, Exception) and not isinstance(error, ShardCkptError):
                raise RankError(lost) from error
            raise
        else:
            if self.lost is not None:  # the outputs of an aborted collective are invalid
                raise RankError(self.lost)
        finally:
            self._begin(0)

    def _begin(self, run: int) -> None:
        with self._looking:
            self._run, self._epochs_over, self._failed, self.batch = run, 0, None, (0, 0)
            self._is_logged = self._is_logged and self._lost is not None

    @contextmanager
    def epoch_over(self) -> Iterator[None]:
        """Inside, this rank waits for the others after its last batch of the epoch; every rank must enter it."""
        key = f"over/{self._run}/{self._epochs_over}"
        put_bytes(self.store, key, json.dumps([*self.batch, self.rank]).encode())
        yield
        self._epochs_over += 1
        if self.rank == 0:
            self.store.delete_key(key)

    def end(self, error: BaseException | None = None) -> None:
        """Stop, and tell the other ranks that this one ends, perhaps with an error.

        Rank 0, whose process may keep the store, waits for a while until the others have ended, too.
        """
        if self._running.locked():
            self._running.release()
        self._thread.has_ended(_LEAVING_S)
        if error is not None and is_collective_failure(error):
            self._lost = self.find_lost()
        deadline = time.monotonic() + self.tuning.watch_s + self.tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: its server is in another process, and gone
            self._leave(error)
            while self.rank == 0 and len(self.gone) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(self.tuning.look_again_s)
                self.look()

    def end_with_process(self, pid: int) -> None:
        """End at the exit of process ``pid``, with the uncaught exception that Python has printed, if there is one."""
        if os.getpid() == pid:  # else a fork
            self.end(getattr(sys, "last_value", None))
            self._log_lost()

    def _leave(self, error: BaseException | None = None) -> None:
        if error is not None and self.lost is None:
            self._report("lost", self.rank, _failure_text(error))
        if not self._has_left:
            self._has_left = True
            put_bytes(self.store, f"left/{self.store.add('left', 1)}", b"%d" % self.rank)

    # --- other ranks ---

    def look(self, *, at_once: bool = False) -> None:
        """Look for ended processes and for reports. Not collective; any thread may call it.

        Args:
            at_once: believe a report that is new.

        Raises:
            RuntimeError: if the store can't be reached.
        """
        with self._looking:
            ended = self._ended_processes()
            while (left := get_if_set(self.store, f"left/{len(self._left) + 1}")) is not None:
                self._left.append(int(left))
                if int(left) != self.rank:
                    self.gone[int(left)] = "it has left: its process, or its process group, has ended"
            for rank, pid in ended.items():
                text = f"its process, pid {pid} on {os.uname().nodename}, is gone: it was killed, or it left"
                self.gone.setdefault(rank, text)
                if self._running.locked() and rank not in self._left:
                    self._report("lost", rank, f"is lost: {text}")
            self._compare_batches()
            self._lost = self._read_report("lost", at_once) or self._lost
            self._failed = self._failed or (self._read_report(f"failed/{self._run}", at_once) if self._run else None)

    def _ended_processes(self) -> dict[int, int]:
        """Return the ids of ended processes by rank, of those that this rank checks."""
        while (entry := get_if_set(self.store, f"{self._host}/{len(self._processes) + 1}")) is not None:
            self._processes.append(tuple(json.loads(entry)))
        count = len(self._processes)
        checked = [self._processes[(self._number + i) % count] for i in range(min(count, _CHECKED))]
        return {rank: pid for rank, pid, started in checked if started and start_time(pid) != started}

    def _read_report(self, key: str, at_once: bool) -> str | None:
        report = get_if_set(self.store, key)
        if report is None:
            return None
        rank, text = json.loads(report)
        waited_s = time.monotonic() - self._reports.setdefault(key, time.monotonic())
        at_once = at_once or rank is None or rank in self.gone
        # this rank may yet end with an error of its own
        if rank == self.rank or (not at_once and waited_s < self.tuning.exception_agreement_s):
            return None
        return str(text) if rank is None else f"rank {rank} {text}"

    def _compare_batches(self) -> None:
        """Report if this rank has begun a batch of an epoch that is over on another one."""
        over = get_if_set(self.store, f"over/{self._run}/{self._epochs_over}") if self._run else None
        if over is not None:
            (epoch, batches, rank), (own_epoch, begun) = json.loads(over), self.batch
            if epoch == own_epoch and begun > batches:
                text = unequal_batches_text(epoch, rank, batches, self.rank, begun)
                self._report(f"failed/{self._run}", None, text)

    def _report(self, key: str, rank: int | None, text: str) -> None:
        """Report a lost rank, or None for an error of all, to all ranks; only the first report is kept."""
        self.store.compare_set(key, "", json.dumps([rank, text]))

    def find_lost(self) -> str | None:
        """Return the sentence of ``lost``, or that of a rank whose report is there, or whose process has ended.

        Looks for as long as ``error_delivery_s``, since the connections of a process end before the process.
        """
        deadline = time.monotonic() + self.tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: it is gone
            self.look(at_once=True)
            while self.lost is None and not self.gone and time.monotonic() < deadline:
                time.sleep(self.tuning.look_again_s)
                self.look(at_once=True)
        return self.lost or next((f"rank {rank} is lost: {text}" for rank, text in self.gone.items()), None)

    # --- the thread ---

    def _watch(self, has_group: Callable[[], bool]) -> None:
        failures = 0
        while not self._running.acquire(timeout=self.tuning.watch_s):
            try:
                if not has_group():
                    self._leave()
                    return
                self.look()
                failures = 0
            except RuntimeError as error:
                failures += 1
                if failures == _STORE_FAILURES:
                    keeper = "the process that keeps the store of the process group, perhaps rank 0, is gone"
                    self._lost = self.gone.get(0) or f"{keeper}: {one_line(str(error))}"
            if 0 in self._left and self.rank != 0 and not self._reports:
                return  # the store may go with rank 0
            if self.lost is not None and not self._is_logged:
                self._log_lost()  # the main thread may wait in gloo, which can't be aborted
                abort_accelerators()
            if self._lost is not None:
                return

    def _log_lost(self) -> None:
        if self.lost is not None and not self._is_logged:
            self._is_logged = True
            _log.error("%s", self.lost)


def _failure_text(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {one_line(str(error))}"


def unequal_batches_text(epoch: int, rank: int, batches: int, other: int, begun: int) -> str:
    """Return the message for ranks that train on different numbers of batches in an epoch."""
    return (
        f"epoch {epoch} of the training ended after {batches} batches on rank {rank}, but rank {other} has begun "
        f"{begun}: all ranks must train on the same number. Give every rank as many batches (an IterableDataset must "
        "end after the same number on all data-parallel ranks), limit them to the smallest number "
        "(limit_train_batches), and set trainer.should_stop on all ranks or on none."
    )


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_python(pid: int) -> bool:
    try:
        return b"python" in os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
    except OSError:
        return False


_PARENT = os.getppid() if _is_python(os.getppid()) else None  # Lightning's launcher, which is rank 0 or one of the host


def wait_for_launcher(address: str, port: int, rank: int, timeout_s: float) -> None:
    """Wait until rank 0 listens, in a process that its launcher has started; for ``timeout_s``, and in vain if need be.

    torch's own wait does not notice that rank 0 has ended before it listened.

    Raises:
        RankError: if the process that started this one has ended.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.2
    while _PARENT is not None and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((address, port), timeout=pause_s).close()
            return
        if os.getppid() != _PARENT:
            raise RankError(
                f"rank {rank} can't join the process group: the process that started it, pid {_PARENT}, which "
                f"is rank 0 or the first rank of this host, is gone, and nobody listens at {address}:{port}"
            )
        time.sleep(pause_s)


# ── the world of the default process group ────────────────────────────────────────────────────────────────────────────


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


def _known_world() -> World | None:
    """Return the world of the default process group if this package has used it."""
    group = dist.group.WORLD
    return _worlds[group][0] if group is not None and group in _worlds else None


def watch_world(tuning: Tuning = TUNING) -> None:
    """Watch the other ranks of the default process group until this process ends, or the group is destroyed.

    Every rank must call it; later calls only change the times. `raise_if_lost` and the log report a lost rank. An
    uncaught exception is reported to the other ranks.
    """
    group = dist.group.WORLD
    if group is not None and dist.get_world_size() > 1:
        current_world().watch(tuning, partial(_is_default_group, ref(group)))


def _is_default_group(group: ref[dist.ProcessGroup]) -> bool:
    return group() is not None and group() is dist.group.WORLD


@contextmanager
def watch_run(tuning: Tuning = TUNING) -> Iterator[None]:
    """Report an error that leaves the context to the ranks inside it; every rank must enter it.

    Raises:
        RankError: naming the lost rank, in place of the collective's own error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watch_world(tuning)
    with current_world().run():
        yield


def note_batch(epoch: int, batches: int) -> None:
    """Note how many batches of an epoch this rank has begun; without communication."""
    if (world := _known_world()) is not None:
        world.batch = epoch, batches


def raise_if_lost() -> None:
    """Raise a RankError if a rank is lost; called by loops that wait for other ranks."""
    if (world := _known_world()) is not None and world.lost is not None:
        raise RankError(world.lost)


def find_lost() -> str | None:
    """Return a sentence that names a rank that has failed or left, for a collective that failed here; None if unknown.

    Not collective. Waits for a moment, since the connections of a process end before the process.
    """
    world = _known_world()
    return None if world is None else world.find_lost()


def abort_unfinished(device: torch.device, tuning: Tuning) -> None:
    """Abort the accelerator's communicators if its work does not end soon; call it when this rank fails.

    The device may be in a collective that another rank never enters. An operation that waits for the device, such as
    freeing its memory, would then hang.
    """
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    waits = Worker(partial(torch.get_device_module(device).synchronize, device), name="shardckpt-device", daemon=True)
    with suppress(NoThreadError):
        waits.start()
    if not waits.has_ended(tuning.exception_agreement_s):
        abort_accelerators()
