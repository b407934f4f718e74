"""The ranks of the default process group, and whether they live: a dead or failed rank ends what waits for it.

NCCL does not notice that a peer is gone: the others would wait in a collective until the timeout of the process group.
So each rank looks every few seconds, in a daemon thread from its first run or ``fabric.launch`` to its end, whether the
processes of its host live, and which reports there are in the store: of a dead process, of a rank that ends with an
uncaught exception, also between two runs, and of one that leaves a run with an error, for the ranks in the same run.
The others read the report, wait ``exception_agreement_s`` in case they fail with an error of their own, log it, and
abort the communicators of their accelerator. Gloo's can't be aborted: collectives there wait until the timeout of the
process group, but waits of this package end. A rank that is slow, stopped or in a debugger is waited for, and so is a
machine whose processes no other rank sees: the launcher ends the job then.

A rank whose epoch is over waits for the others, and says so in the store; one that has begun another batch of this
epoch, which can't end without it, reports that.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
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
from lightning_shardckpt.distributed.error_report import is_collective_failure
from lightning_shardckpt.distributed.liveness import Process, host
from lightning_shardckpt.errors import RankError, ShardCkptError
from lightning_shardckpt.system.text import one_line
from lightning_shardckpt.system.threads import NoThreadError, Worker
from lightning_shardckpt.system.tuning import TUNING, Tuning

_LEAVING_S = 1.0
_STORE_FAILURES = 2  # in a row, after which the store is gone
_CHECKED = 64  # processes per call; with more ranks on a host, each checks some of them, and together they check all
_log = logging.getLogger(__name__)


class HostProcesses:
    """The processes of the ranks on this host, which register in a store.

    Args:
        store: shared by all ranks.
        rank: of this process, which is registered.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._host = store, f"host/{host()}"
        self._processes: list[tuple[int, Process]] = []  # in the order of registration
        self._gone: dict[int, Process] = {}
        this = Process.this()
        number = self._next = store.add(self._host, 1)
        put_bytes(store, f"{self._host}/{number}", json.dumps([rank, this.pid, this.started]).encode())

    def gone(self) -> dict[int, Process]:
        """Return the processes that have ended, by rank, as found by this call and earlier ones.

        Checks at most 64 processes. Not for concurrent use.
        """
        while (entry := get_if_set(self._store, f"{self._host}/{len(self._processes) + 1}")) is not None:
            rank, pid, started = json.loads(entry)
            self._processes.append((rank, Process(pid, started)))
        count = len(self._processes)
        for number in range(self._next, self._next + min(count, _CHECKED)):
            rank, process = self._processes[number % count]
            if process.is_gone():
                self._gone[rank] = process
        self._next += _CHECKED
        return dict(self._gone)


class World:
    """The ranks of one process group, in which each one has an object of this class.

    Args:
        store: shared by the ranks, through a connection of its own. All of this package use it: more connections would
            cost a file descriptor each on this rank, and one on the rank that keeps the store. Requests of several
            threads take turns, and none of them waits for another rank.
        rank: of this process.
        size: the number of ranks.

    Attributes:
        is_usable: False once this rank has left a collective that may never end.
        waits_at_exit: of the process, for the last steps of the ranks.
        gone: the ranks whose processes have ended, with a sentence for each, as of the last ``look``.
        batch: the epoch of this rank's run, and the number of its batches that have begun.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.is_usable, self.waits_at_exit = True, list[Callable[[], None]]()
        self.gone, self.batch = dict[int, str](), (0, 0)
        self._processes, self._left = HostProcesses(store, rank), list[int]()
        self._looking = threading.RLock()  # reentrant: a signal handler may save
        self._runs, self._run_count = list[tuple[int, int, tuple[int, int]]](), 0  # with what was true before
        self._epochs_over = 0  # in this run; a trial run and the run after it have epochs of the same number
        self._lost: str | None = None  # for all time
        self._failed: tuple[int, str] | None = None  # in a run
        self._reports = dict[str, float]()  # the time since which a report is there
        self._is_logged = self._has_left = False
        self._tuning = TUNING
        self._running = threading.Lock()  # held until `end`; taken and released in one step each
        self._thread = Worker(lambda: None, name="shardckpt-watch", daemon=True)

    @property
    def lost(self) -> str | None:
        """A sentence with the lost rank and the reason; None if no rank is lost."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] == self._run else self._lost

    @property
    def _run(self) -> int:
        """The number of the innermost run; 0 between runs."""
        return self._runs[-1][0] if self._runs else 0

    # --- the life of a rank ---

    def watch(self, tuning: Tuning, has_group: Callable[[], bool] = lambda: True) -> None:
        """Watch the other ranks until the end; does nothing if the system can start no more threads.

        Args:
            tuning: the times; a later call changes them.
            has_group: returns False once this rank has destroyed the process group, which ends the watch.
        """
        self._tuning = tuning
        if not self._running.locked() and not self._has_left:
            self._running.acquire()
            self._thread = Worker(partial(self._watch, has_group), name="shardckpt-watch", daemon=True)
            with suppress(NoThreadError):
                self._thread.start()
            atexit.register(self._end_with_process, os.getpid())

    def begin_run(self) -> None:
        """Begin a run, perhaps inside another one. Every rank must begin the same runs."""
        self._run_count += 1
        self._runs.append((self._run_count, self._epochs_over, self.batch))
        self._epochs_over, self.batch = 0, (0, 0)
        self._is_logged = self._is_logged and self._lost is not None

    def end_run(self, error: BaseException | None = None) -> str | None:
        """End the innermost run, and report the error with which this rank leaves it to the ranks that are in it.

        Returns:
            The sentence of ``lost``, perhaps found just now.
        """
        lost = self.find_lost() if error is not None and is_collective_failure(error) else self.lost
        if error is not None and lost is None:
            with suppress(RuntimeError):  # the store's: it is gone
                self._report(f"failed/{self._run}", self.rank, _failure_text(error))
        _, self._epochs_over, self.batch = self._runs.pop()
        return lost

    @contextmanager
    def epoch_over(self) -> Iterator[None]:
        """Inside, this rank waits for the others after its last batch of the epoch; every rank must enter it."""
        key, mine = f"over/{self._run}/{self._epochs_over}", json.dumps([*self.batch, self.rank])
        known = self.store.compare_set(key, "", mine).decode()
        while json.loads(known)[1] > self.batch[1]:  # the least counts
            known = self.store.compare_set(key, known, mine).decode()
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
        deadline = time.monotonic() + self._tuning.watch_s + self._tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: its server is in another process, and gone
            self._leave(error)
            while self.rank == 0 and len(self.gone) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(self._tuning.look_again_s)
                self.look()

    def _end_with_process(self, pid: int) -> None:
        if os.getpid() == pid:  # else a fork
            self.end(getattr(sys, "last_value", None))  # the uncaught exception that Python has printed
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
            ended = self._processes.gone()
            while (left := get_if_set(self.store, f"left/{len(self._left) + 1}")) is not None:
                self._left.append(int(left))
                text = "it has left: its process, or its process group, has ended"
                self.gone |= {int(left): text} if int(left) != self.rank else {}
            for rank, process in ended.items():
                text = f"its process, pid {process.pid} on {os.uname().nodename}, is gone: it was killed, or it left"
                self.gone.setdefault(rank, text)
                if self._running.locked() and rank not in self._left:
                    self._report("lost", rank, f"is lost: {text}")
            self._compare_batches()
            for key in ("lost", f"failed/{self._run}"):
                self._read_report(key, at_once)

    def _read_report(self, key: str, at_once: bool) -> None:
        report = get_if_set(self.store, key) if key != "failed/0" else None
        if report is None:
            return
        rank, text = json.loads(report)
        waited_s = time.monotonic() - self._reports.setdefault(key, time.monotonic())
        # this rank may yet end with an error of its own
        if rank == self.rank or (rank is not None and not at_once and waited_s < self._tuning.exception_agreement_s):
            return
        sentence = text if rank is None else f"rank {rank} {text}"
        if key == "lost":
            self._lost = sentence
        else:
            self._failed = self._run, sentence

    def _compare_batches(self) -> None:
        """Report if this rank has begun a batch of an epoch that is over on another one."""
        over = get_if_set(self.store, f"over/{self._run}/{self._epochs_over}") if self._runs else None
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
        deadline = time.monotonic() + self._tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: it is gone
            self.look(at_once=True)
            while self.lost is None and not self.gone and time.monotonic() < deadline:
                time.sleep(self._tuning.look_again_s)
                self.look(at_once=True)
        return self.lost or next((f"rank {rank} is lost: {text}" for rank, text in self.gone.items()), None)

    # --- the thread ---

    def _watch(self, has_group: Callable[[], bool]) -> None:
        failures = 0
        while not self._running.acquire(timeout=self._tuning.watch_s):
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
    world = current_world()
    world.begin_run()
    try:
        yield
    except BaseException as error:
        lost = world.end_run(error)
        if lost is not None or is_collective_failure(error):
            world.is_usable = False
        if lost is not None and isinstance(error, Exception) and not isinstance(error, ShardCkptError):
            raise RankError(lost) from error
        raise
    else:
        if (lost := world.end_run()) is not None:  # the outputs of an aborted collective are invalid
            raise RankError(lost)


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
    waits.start_or_run()
    if not waits.has_ended(tuning.exception_agreement_s):
        abort_accelerators()
