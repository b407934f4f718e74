"""Heartbeats of ranks in the store: a dead or silent rank is named on all others, and what they wait for is aborted.

NCCL does not notice that a peer is gone: the others would wait in a collective for the timeout of the process group. So
each rank has a daemon thread that counts up a key of its own, and looks whether the next rank's goes on counting. One
that does not for ``silent_s`` is lost, as is a process of this host that is gone; a rank that leaves with an error says
so. All others learn of it, give it ``exception_meeting_s`` to be no news, log it, and abort the communicators of their
accelerator. Gloo's can't be aborted: what waits there goes on to the timeout of the process group. A rank that is slow,
or stopped in a debugger of Python, is alive: its thread writes.

Beats are counted in rounds of the thread that looks, not in time: a job that is stopped and continued as a whole loses
nobody. They end where rank 0 has left without an error: it may keep the store.
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

import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import (
    Store,
    abort_accelerators,
    default_store,
    get_if_there,
    own_view,
    put_bytes,
)
from lightning_shardckpt.distributed.error_report import is_of_a_collective
from lightning_shardckpt.distributed.neighbours import Neighbours
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import one_line
from lightning_shardckpt.system.threads import NoThreadError
from lightning_shardckpt.system.tuning import Tuning
from lightning_shardckpt.system.workers import Worker

_LEFT = b"left"
_LEAVING_S = 1.0
_runs = itertools.count()
_running: list[Heartbeat] = []
_log = logging.getLogger(__name__)


@contextmanager
def heartbeat(tuning: Tuning) -> Iterator[None]:
    """Watch the other ranks of the world inside, which must enter it, too.

    Raises:
        RankError: naming the rank that is lost, instead of what a collective raised because of that.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    beats = _start(tuning)
    try:
        yield
    except BaseException as error:
        beats.stop(error, looks=is_of_a_collective(error))
        if beats.lost is not None and isinstance(error, Exception) and not isinstance(error, RankError):
            raise RankError(beats.lost) from error
        raise
    else:
        beats.stop()
        if beats.lost is not None:  # what came out of an aborted collective is nothing to go on with
            raise RankError(beats.lost)
    finally:
        _running.remove(beats)


def watch_until_exit(tuning: Tuning) -> None:
    """Watch the other ranks of the world, which must call it, too, until this process ends; for scripts.

    `raise_if_lost` tells of a lost rank, and the log does. An exception that nobody catches is told to the others.
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
    error: BaseException | None = getattr(sys, "last_value", None)  # what Python has just shown
    was_known = beats.lost is not None
    beats.stop(error, looks=error is not None and is_of_a_collective(error), waits=True)
    if beats.lost is not None and not was_known:
        _log.error("%s", beats.lost)


def raise_if_lost() -> None:
    """Raise a RankError if a rank is lost; for those that wait for other ranks in a loop."""
    for beats in _running:
        if beats.lost is not None:
            raise RankError(beats.lost)


class Heartbeat:
    """The heartbeats of the ranks in one run.

    Args:
        store: of the ranks.
        name: of the run, which all ranks give it.
        rank: of this process.
        world: how many ranks there are.
        tuning: how often ranks write, and how long one may be silent.

    Attributes:
        lost: which rank, and why it is taken for lost; None if none is.
        beats: how often this rank has written and looked.
    """

    def __init__(self, store: Store, name: str, rank: int, world: int, tuning: Tuning) -> None:
        self.lost: str | None = None
        self._news: str | None = None  # of a lost rank, before it is taken for one
        self._kept = store  # if its server is in this process, it is there for as long as others beat
        self._store, self._rank, self._size, self._tuning = own_view(store, name), rank, world, tuning
        self._patience = max(int(tuning.silent_s / tuning.heartbeat_s), 2)  # rounds
        self._watched, self._seen, self._missed = (rank + 1) % world, b"", 0
        self.beats, self._told_for, self._is_over = 0, 0, False  # rounds; whether rank 0 has left
        self._patience_with_news_s = tuning.exception_meeting_s
        self._neighbours = Neighbours(self._store, rank)
        self._going_on = threading.Lock()  # until it is released; taken and released in one step each
        self._thread = Worker(self._run, name="shardckpt-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to write and to look; not if the system gives no more threads."""
        put_bytes(self._store, f"{self._rank}", b"0")
        self._going_on.acquire()
        with suppress(NoThreadError):
            self._thread.start()

    def stop(self, error: BaseException | None = None, *, looks: bool = False, waits: bool = False) -> None:
        """End, telling the others that this rank has left, or has failed with an error.

        Args:
            error: with which this rank leaves.
            looks: whether to look for another rank that is lost, without giving it time to be no news.
            waits: whether rank 0, which may keep the store, waits until the others have left or heard of its end.
        """
        if self._going_on.locked():
            self._going_on.release()
        self._thread.has_ended(_LEAVING_S)
        farewell = Worker(lambda: self._say_farewell(error, looks=looks), name="shardckpt-farewell", daemon=True)
        farewell.start_or_run()
        farewell.has_ended(_LEAVING_S)  # the store may be gone
        deadline = time.monotonic() + self._tuning.heartbeat_s + self._tuning.error_delivery_s
        with suppress(RuntimeError):  # the store's: it is kept elsewhere, and gone
            while waits and self._rank == 0 and farewell.has_ended(0) and time.monotonic() < deadline:
                if self._store.add("count of left", 0) >= self._size:
                    return
                time.sleep(self._tuning.look_again_s)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for up to ``timeout_s``; return whether this rank looks no more."""
        return self._thread.has_ended(timeout_s)

    def _say_farewell(self, error: BaseException | None, *, looks: bool) -> None:
        if looks:
            self._patience_with_news_s = 0.0
            with suppress(RuntimeError):  # the store's: rank 0 may be the one that is gone, and have said why
                self._round()
            self.lost = self.lost or self._news
        if error is not None and self.lost is None:
            self._tell(self._rank, f"failed: {type(error).__name__}: {one_line(str(error))}")
        put_bytes(self._store, f"{self._rank}", _LEFT)
        self._store.add("count of left", 1)

    def _run(self) -> None:
        asking, unanswered = Worker(self._round, name="shardckpt-beat", daemon=True), 0
        asking.start_or_run()
        while not self._going_on.acquire(timeout=self._tuning.heartbeat_s):
            answered = asking.has_ended(0) and asking.error is None
            unanswered = 0 if answered else unanswered + 1
            if self._is_over:
                return
            if unanswered >= self._patience:
                keeper = "the process that keeps the store of the process group, perhaps rank 0,"
                self.lost = f"{keeper} {self._silent}"
            if self.lost is not None:
                _log.error("%s", self.lost)  # the main thread may wait in gloo, which can't be aborted
                abort_accelerators()
                return
            if asking.has_ended(0):
                asking = Worker(self._round, name="shardckpt-beat", daemon=True)
                asking.start_or_run()

    @property
    def _silent(self) -> str:
        return f"gave no sign of life for {self._tuning.silent_s:g} s: it hangs, is stopped, or its machine is lost"

    def _round(self) -> None:
        """Write one beat and look once around; a few requests."""
        self.beats += 1
        put_bytes(self._store, f"{self._rank}", str(self.beats).encode())
        for rank, process in self._neighbours.gone().items():
            if get_if_there(self._store, f"{rank}") != _LEFT:
                self._tell(rank, f"is lost: its process, pid {process.pid}, is gone")
        self._look_at_the_next()
        self._is_over = get_if_there(self._store, "0") == _LEFT
        told = get_if_there(self._store, "lost")
        if told is None:
            return
        rank, text = json.loads(told)
        self._is_over = False
        self._told_for += 1  # rounds, in which this rank may end by itself, with an error of its own
        if rank != self._rank:
            self._news = f"rank {rank} {text}"
            if self._told_for * self._tuning.heartbeat_s >= self._patience_with_news_s:
                self.lost = self._news

    def _look_at_the_next(self) -> None:
        now = get_if_there(self._store, f"{self._watched}")
        if now == _LEFT and (self._watched + 1) % self._size != self._rank:
            self._watched, self._seen, self._missed = (self._watched + 1) % self._size, b"", 0
        elif now is None or now != self._seen or now == _LEFT:
            self._seen, self._missed = now or b"", 0
        else:
            self._missed += 1
            if self._missed >= self._patience:
                self._tell(self._watched, self._silent)

    def _tell(self, rank: int, text: str) -> None:
        """Tell all that a rank is lost; the first one that is found counts."""
        self._store.compare_set("lost", "", json.dumps([rank, text]))
