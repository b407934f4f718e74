"""Heartbeats of ranks in the store: a dead or silent rank is named on all others, and their collectives are aborted.

NCCL does not notice that a peer is gone: the others would wait in a collective until the timeout of the process group.
So each rank has a daemon thread, from its first run or ``fabric.launch`` to its end, that increments a key of its own
in the store and checks that the next rank's key changes. A rank whose key does not change for ``silent_s`` is lost, as
is one whose process on this host is gone; a rank that ends with an uncaught exception reports it, also between two
runs. A rank that leaves a run with an error reports that to the ranks in the same run. The others read the report, wait
``exception_meeting_s`` in case they fail with an error of their own, log it, and abort the communicators of their
accelerator. Gloo's can't be aborted: collectives there wait until the timeout of the process group, but waits of this
package end. A slow rank, or one stopped in a Python debugger, counts as alive: its thread goes on writing.

In training, a heartbeat has the batch of its rank. A rank whose epoch is over waits for the others; one that sees that
the next rank has begun another batch of this epoch, which can't end without it, reports that.

Silence is counted in rounds of the watching thread, not in time, so suspending and continuing a whole job loses no
rank. Heartbeats end when rank 0 has left without an error, since its process may keep the store.
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

from lightning_shardckpt.compat.torch_distributed import Store, abort_accelerators, get_if_set, prefix_store, put_bytes
from lightning_shardckpt.distributed.error_report import is_collective_failure
from lightning_shardckpt.distributed.host_ranks import HostRanks, get_present
from lightning_shardckpt.distributed.world import current_world
from lightning_shardckpt.errors import RankError, ShardCkptError
from lightning_shardckpt.system.text import one_line
from lightning_shardckpt.system.threads import NoThreadError
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import Worker

_LEFT = b"left"
_LEAVING_S = 1.0
_hearts: WeakKeyDictionary[dist.ProcessGroup, Heartbeat] = WeakKeyDictionary()
_log = logging.getLogger(__name__)


def watch_world(tuning: Tuning = TUNING) -> None:
    """Watch the other ranks of the default process group until this process ends, or the group is destroyed.

    Every rank must call it; later calls only change the times. `raise_if_lost` and the log report a lost rank. An
    uncaught exception is reported to the other ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if (heart := _heart()) is not None:
        heart.set_times(tuning)
        return
    world, group = current_world(), dist.group.WORLD
    assert group is not None
    heart = Heartbeat(world.store, "heartbeat", dist.get_rank(), dist.get_world_size(), tuning, world.host_ranks)
    heart.has_group = partial(_is_default_group, ref(group))
    _hearts[group] = heart
    heart.start()
    atexit.register(_end_with_process, heart, os.getpid())


@contextmanager
def watch_run(tuning: Tuning = TUNING) -> Iterator[None]:
    """Report an error that leaves the context to the ranks inside it; every rank must enter it.

    Raises:
        RankError: naming the lost rank, in place of the collective's own error.
    """
    watch_world(tuning)
    if (heart := _heart()) is None:
        yield
        return
    heart.begin_run()
    try:
        yield
    except BaseException as error:
        lost = heart.end_run(error)
        if (lost is not None or is_collective_failure(error)) and dist.is_initialized():
            current_world().is_usable = False
        if lost is not None and isinstance(error, Exception) and not isinstance(error, ShardCkptError):
            raise RankError(lost) from error
        raise
    else:
        if (lost := heart.end_run()) is not None:  # the outputs of an aborted collective are invalid
            raise RankError(lost)


def _heart() -> Heartbeat | None:
    group = dist.group.WORLD
    return None if group is None else _hearts.get(group)


def _is_default_group(group: ref[dist.ProcessGroup]) -> bool:
    return group() is not None and group() is dist.group.WORLD


def _end_with_process(heart: Heartbeat, pid: int) -> None:
    if os.getpid() != pid:  # a fork
        return
    error: BaseException | None = getattr(sys, "last_value", None)  # the uncaught exception that Python has printed
    heart.end(error, check=error is not None and is_collective_failure(error))
    if heart.lost is not None and not heart.is_logged:
        _log.error("%s", heart.lost)


def note_batch(epoch: int, batches: int) -> None:
    """Note how many batches of an epoch this rank has begun; without communication."""
    if (heart := _heart()) is not None:
        heart.batch = (heart.batch[0], epoch, batches)


@contextmanager
def epoch_over() -> Iterator[None]:
    """Inside, this rank waits for the others after its last batch of the epoch; every rank must enter the context."""
    if (heart := _heart()) is not None:
        heart.is_epoch_over = True
    yield
    if heart is not None:
        ends, epoch, batches = heart.batch
        heart.batch, heart.is_epoch_over = (ends + 1, epoch, batches), False


def raise_if_lost() -> None:
    """Raise a RankError if a rank is lost; called by loops that wait for other ranks."""
    if (heart := _heart()) is not None and heart.lost is not None:
        raise RankError(heart.lost)


def find_lost() -> str | None:
    """Return a sentence that names a rank that has failed or left, for a collective that failed here; None if unknown.

    Not collective. Waits for a moment, since the connections of a process end before the process.
    """
    heart = _heart()
    return None if heart is None else heart.find_lost()


def ranks_that_left() -> dict[int, str]:
    """Return the ranks that had ended when this rank last looked, with a sentence for each."""
    heart = _heart()
    return {} if heart is None else heart.left


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
    """The heartbeats of the ranks of one process group.

    Args:
        store: shared by the ranks.
        name: the prefix of the keys; the same on all ranks.
        rank: of this process.
        world: the number of ranks.
        tuning: the interval of heartbeats, and the longest silence.
        host_ranks: the processes of this host; by default their registration in the store under ``name``.

    Attributes:
        is_logged: whether the log has the sentence of ``lost``.
        left: the ranks whose processes have ended without an uncaught exception, with a sentence for each.
        beats: the number of rounds of this rank.
        batch: how often `epoch_over` has ended in this rank's run, its epoch, and the number of its batches that have
            begun. A trial run, such as LearningRateFinder's, and the run after it have epochs of the same number.
        is_epoch_over: True if this rank has no more batches in the epoch.
        has_group: returns False once this rank has destroyed the process group, which ends its heartbeats.
    """

    def __init__(
        self, store: Store, name: str, rank: int, world: int, tuning: Tuning, host_ranks: HostRanks | None = None
    ) -> None:
        self.is_logged, self.left = False, dict[int, str]()
        self.batch, self.is_epoch_over = (0, 0, 0), False
        self.has_group: Callable[[], bool] = lambda: True
        self._store, self._rank, self._size, self._tuning = prefix_store(store, name), rank, world, tuning
        self._host_ranks = host_ranks or HostRanks(self._store, rank)
        self._runs, self._run_count = list[tuple[int, tuple[int, int, int], bool]](), 0  # with what was true before
        self._lost: str | None = None  # for all time
        self._failed: tuple[int, str] | None = None  # in a run
        self._reports = dict[str, int]()  # the number of rounds since which a report is there
        self._watched, self._last_beat, self._missed = (rank + 1) % world, b"", 0
        self.beats, self._is_over, self._has_left = 0, False, False  # _is_over: rank 0 has left
        self._running = threading.Lock()  # held until `end`; taken and released in one step each
        self._thread = Worker(lambda: None, name="shardckpt-heartbeat", daemon=True)

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

    def start(self) -> None:
        """Start to write and to watch; does nothing if the system can start no more threads."""
        put_bytes(self._store, f"{self._rank}", b"[0, 0, 0, 0, 0]")
        self._running.acquire()
        self._thread = Worker(self._beat, name="shardckpt-heartbeat", daemon=True)
        with suppress(NoThreadError):
            self._thread.start()

    def set_times(self, tuning: Tuning) -> None:
        """Use other times from now on."""
        if tuning != self._tuning:
            self._tuning = tuning
            if self._running.locked():
                self._stop()
                self.start()

    def begin_run(self) -> None:
        """Begin a run, perhaps inside another one. Every rank must begin the same runs."""
        self._run_count += 1
        self._runs.append((self._run_count, self.batch, self.is_epoch_over))
        self.batch, self.is_epoch_over, self.is_logged = (0, 0, 0), False, self._lost is not None and self.is_logged

    def end_run(self, error: BaseException | None = None) -> str | None:
        """End the innermost run, and report the error with which this rank leaves it to the ranks that are in it.

        Returns:
            The sentence of ``lost``, perhaps found just now.
        """
        lost = self.find_lost() if error is not None and is_collective_failure(error) else self.lost
        if error is not None and lost is None:
            text = f"failed: {type(error).__name__}: {one_line(str(error))}"
            self._request(partial(self._report, f"failed/{self._run}", self._rank, text))
        _, self.batch, self.is_epoch_over = self._runs.pop()
        return lost

    def end(self, error: BaseException | None = None, *, check: bool = False) -> None:
        """Stop, and tell the other ranks that this one ends, perhaps with an error.

        Rank 0, whose process may keep the store, waits for a while until the others have ended, too.

        Args:
            error: that ends this process.
            check: look for a lost rank once more, and set ``lost``.
        """
        self._stop()
        if check:
            self._lost = self.find_lost()
        has_told = self._request(partial(self._leave, error))
        deadline = time.monotonic() + self._tuning.heartbeat_s + self._tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: its server is in another process, and gone
            while self._rank == 0 and has_told and time.monotonic() < deadline:
                if self._store.add("count of left", 0) + len(self._host_ranks.gone()) >= self._size:
                    return
                time.sleep(self._tuning.look_again_s)

    def find_lost(self) -> str | None:
        """Return the sentence of ``lost``, or that of a rank whose report is there, or whose process has ended.

        Looks for as long as ``error_delivery_s``.
        """
        deadline = time.monotonic() + self._tuning.error_delivery_s
        while self.lost is None and not self._is_over and time.monotonic() < deadline:
            if not self._request(partial(self._look, at_once=True)):
                break
            if self.lost is None and self.left:
                return next(iter(self.left.values()))
            if self.lost is None:
                time.sleep(self._tuning.look_again_s)
        return self.lost or next(iter(self.left.values()), None)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for up to ``timeout_s``; return True if this rank watches no more."""
        return self._thread.has_ended(timeout_s)

    def _stop(self) -> None:
        if self._running.locked():
            self._running.release()
        self._thread.has_ended(_LEAVING_S)

    def _request(self, ask: Callable[[], object]) -> bool:
        """Return True if the store, which may be gone, has answered."""
        asking = Worker(ask, name="shardckpt-leave", daemon=True)
        asking.start_or_run()
        return asking.has_ended(_LEAVING_S) and asking.error is None

    def _leave(self, error: BaseException | None) -> None:
        if error is not None and self.lost is None:
            self._report("lost", self._rank, f"failed: {type(error).__name__}: {one_line(str(error))}")
        if not self._has_left:
            self._has_left = True
            put_bytes(self._store, f"{self._rank}", _LEFT)
            self._store.add("count of left", 1)

    # --- the thread ---

    def _beat(self) -> None:
        requests, unanswered = Worker(self._round, name="shardckpt-beat", daemon=True), 0
        requests.start_or_run()
        while not self._running.acquire(timeout=self._tuning.heartbeat_s):
            answered = requests.has_ended(0) and requests.error is None
            unanswered = 0 if answered else unanswered + 1
            if not self.has_group():
                self._leave(None)
            if self._is_over or self._has_left:
                return
            if unanswered >= self._silent_rounds:
                keeper = "the process that keeps the store of the process group, perhaps rank 0,"
                self._lost = f"{keeper} {self._silence_text}"
            if self.lost is not None and not self.is_logged:
                self.is_logged = True
                _log.error("%s", self.lost)  # the main thread may wait in gloo, which can't be aborted
                abort_accelerators()
            if self._lost is not None:
                return
            if requests.has_ended(0):
                requests = Worker(self._round, name="shardckpt-beat", daemon=True)
                requests.start_or_run()

    @property
    def _silent_rounds(self) -> int:
        return max(int(self._tuning.silent_s / self._tuning.heartbeat_s), 2)

    @property
    def _silence_text(self) -> str:
        return f"gave no sign of life for {self._tuning.silent_s:g} s: it hangs, is stopped, or its machine is lost"

    def _round(self) -> None:
        """Write one heartbeat and check the other ranks, in a few requests."""
        self.beats += 1
        put_bytes(self._store, f"{self._rank}", json.dumps([self.beats, self._run, *self.batch]).encode())
        self._check_next_rank()
        self._look()

    def _look(self, *, at_once: bool = False) -> None:
        """Look for ended processes and for reports; ``at_once``: believe a report that is new."""
        for rank, process in self._host_ranks.gone().items():
            if get_if_set(self._store, f"{rank}") != _LEFT:
                self._report("lost", rank, f"is lost: its process, pid {process.pid}, is gone")
        if self._store.add("count of left", 0) > len(self.left):
            beats = get_present(self._store, [f"{rank}" for rank in range(self._size)])
            gone = [int(rank) for rank, beat in beats.items() if beat == _LEFT]
            self.left |= {rank: f"rank {rank} has left: its process, or its process group, has ended" for rank in gone}
        is_over, run = 0 in self.left and self._rank != 0, self._run
        for key in ("lost", f"failed/{run}"):
            report = get_if_set(self._store, key) if key != "failed/0" else None
            if report is None:
                continue
            rank, text = json.loads(report)
            is_over = False
            since = self._reports.setdefault(key, self.beats)  # this rank may yet end with an error of its own
            waited_s = (self.beats - since + 1) * self._tuning.heartbeat_s
            if rank == self._rank or (rank is not None and not at_once and waited_s < self._tuning.exception_meeting_s):
                continue
            sentence = text if rank is None else f"rank {rank} {text}"
            if key == "lost":
                self._lost = sentence
            else:
                self._failed = run, sentence
        self._is_over = is_over

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
                self._report("lost", self._watched, self._silence_text)

    def _compare_batches(self, beat: bytes) -> None:
        """Report if the watched rank has begun a batch of an epoch that is over on this rank."""
        is_over, (ends, epoch, batches), (_, *its_epoch, begun) = self.is_epoch_over, self.batch, json.loads(beat)
        if is_over and its_epoch == [self._run, ends, epoch] and begun > batches:
            text = unequal_batches_text(epoch, self._rank, batches, self._watched, begun)
            self._report(f"failed/{self._run}" if self._run else "lost", None, text)

    def _report(self, key: str, rank: int | None, text: str) -> None:
        """Report a lost rank, or None for an error of all, to all ranks; only the first report is kept."""
        self._store.compare_set(key, "", json.dumps([rank, text]))

