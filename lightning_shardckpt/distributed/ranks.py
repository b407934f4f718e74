"""Steps that ranks take together, in which a failure on one reaches all.

Every communication of the checkpoint side is one ``step``: each rank does its work, rank 0 sees all results, acts
once, and everybody gets its answer or the first error. It runs over the process group's key-value store, not over
the training group: it works off the main thread and its timeout is its own. A rank that waits looks around every
second: for one whose process is gone, it answers in its place, so that nobody waits for the dead.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import Store, default_store, get_if_there, own_view, put_bytes
from lightning_shardckpt.distributed.error_report import ErrorReport, rebuild_error, report_error
from lightning_shardckpt.distributed.heartbeat import heartbeat, raise_if_lost
from lightning_shardckpt.distributed.many_keys import Arrivals, lacking
from lightning_shardckpt.distributed.neighbours import Neighbours
from lightning_shardckpt.errors import MismatchError, RankError
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import Worker

T = TypeVar("T")
R = TypeVar("R")
_instances = itertools.count()
_of_groups: dict[str, itertools.count[int]] = {}  # by name: only the ranks of a group count its instances
_PAUSE_PER_RANK_S = 2e-5  # so that all ranks together ask at most 50,000 times a second: a server takes 11 µs for each
_LONGEST_PAUSE_PER_RANK_S = 1e-4  # 10,000 times after a while
_LOOK_PER_RANK_S = 2e-4  # so that all ranks together look around at most 5,000 times a second
_ROLL_CALL_PAUSE_S = 0.1
_LISTED = 32  # ranks in a message


class Ranks:
    """The processes that save and load one checkpoint together. All must take the same steps in the same order.

    Every rank must create its instances in the same order. Values that travel must be JSON.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world: int,
        timeout_s: float = 1800.0,
        *,
        name: str | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        self.rank, self.world, self._timeout_s = rank, world, timeout_s
        self._store: Store | None = None
        self._tuning = tuning
        self._kept = store  # if its server is in this process, it is there for as long as somebody may ask it
        self._count, self._open = 0, False  # steps begun; whether the last one has not ended here
        self._heard, self._deaf = 0.0, False  # when the store answered last; whether it does not any more
        if store is not None:
            self._store = own_view(store, f"shardckpt-{next(_instances) if name is None else name}")
            self._neighbours = Neighbours(self._store, rank)

    @classmethod
    def alone(cls) -> Ranks:
        """A single process: steps run in place."""
        return cls(None, 0, 1)

    @classmethod
    def of_default_group(cls, timeout_s: float = 1800.0, *, tuning: Tuning = TUNING) -> Ranks:
        """Return all ranks of the initialized default process group; this process alone without one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.alone()
        found = cls(default_store(), dist.get_rank(), dist.get_world_size(), timeout_s, tuning=tuning)
        atexit.register(found.linger)
        return found

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, timeout_s: float = 1800.0) -> Ranks:
        """The ranks of a process group, in its order. All of them must create their instances in the same order."""
        if group.size() == 1:
            return cls.alone()
        name = f"{group.group_name}-{next(_of_groups.setdefault(group.group_name, itertools.count()))}"
        store = default_store()
        found = cls(store, group.rank(), group.size(), timeout_s, name=name)
        atexit.register(found.linger)
        return found

    def linger(self, timeout_s: float = 10.0) -> None:
        """Wait, on rank 0, until the others have got the answer to the last step: it may keep the store.

        Not collective. For the end of a run, or of a process, which does it by itself unless it is one of Python's
        multiprocessing. Those that are gone from another host, or have left, are waited for
        in vain.
        """
        if self._store is None or self.rank != 0 or self._open:
            return
        deadline = time.monotonic() + timeout_s
        with suppress(RuntimeError):  # the store's: it is kept elsewhere, and gone
            for rank in range(1, self.world):
                while self._store.check([f"{self._count}/{rank}"]) and rank not in self._neighbours.gone():
                    if time.monotonic() >= deadline:
                        return
                    time.sleep(self._tuning.rank_longest_poll_s)

    def watched(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks of the world, which must enter it, notice that one of them is lost.

        Raises:
            RankError: naming it, at the latest at the end of the context; see `heartbeat`.
        """
        return heartbeat(self._tuning)

    def step(
        self, phase: str, work: Callable[[], T], lead: Callable[[list[T]], R], *, timeout_s: float | None = None
    ) -> R:
        """Run ``work`` here and ``lead`` on rank 0 over the results by rank; return what ``lead`` returned.

        Collective: every rank must call it.

        Args:
            phase: completes the sentence "rank 3 failed while …"; its first word must be the same on all ranks.
            work: gives what this rank has to say; JSON.
            lead: called on rank 0, when all have done their work, with the list of results by rank; returns JSON.
            timeout_s: instead of the one of all steps, for one that may be in vain.

        Raises:
            Exception: on every rank if any rank failed: of the class that the first failing rank raised, where that is
                an error of this package or of the operating system, else RankError. The message names the rank.
        """
        if self._store is None:
            return lead([work()])
        self._count, self._open = self._count + 1, True
        cause: BaseException | None = None
        try:
            text = _json({"value": work(), "phase": phase})
        except BaseException as error:
            text, cause = _json({"error": report_error(error), "phase": phase}), error
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        answer = self._exchange(self._store, phase, text, lead, wait_s)
        if "error" in answer:
            self.linger(self._tuning.error_delivery_s)  # with this error the process may end, and with it the store
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if "error" in answer:
            raise _rebuilt(answer["error"], phase) from cause
        result: R = answer["value"]
        return result

    def step_until(
        self, phase: str, look: Callable[[], T], same: Callable[[list[T], bool], bool], within_s: float
    ) -> None:
        """Take a step until all ranks see the same: a network file system may show it to some of them late.

        Collective: every rank must call it.

        Args:
            phase: as in ``step``.
            look: gives what this rank sees; JSON.
            same: called on rank 0 with what the ranks see and whether they are to look again if it differs; returns
                whether they see the same, or raises.
            within_s: so long they look again.

        Raises:
            Exception: as ``step`` does.
        """
        deadline = time.monotonic() + within_s
        while not self.step(phase, look, lambda views: same(views, time.monotonic() < deadline)):
            time.sleep(self._tuning.look_again_s)

    def leave(self, error: BaseException, *, roll_call: bool = False) -> str | None:
        """Tell the others that this rank takes no further step, and why: the one that they wait in fails on all.

        Not collective. Of no effect if the store can't be reached any more.

        Args:
            error: why.
            roll_call: whether to wait for the others to leave, too, since their processes or machines may be lost: a
                collective of training that fails tells only that somebody is gone.

        Returns:
            Sentences for the user, or None: which rank left first with another error; and of a roll call, which ranks
            did not leave and on which machines they are, or that the store can't be reached.
        """
        store = self._store
        if store is None or self._deaf:
            return None
        self._count, self._open = self._count + (not self._open), True
        try:
            tell = partial(self._said_on_leaving, store, error, roll_call)
            said = self._while_it_answers(tell, "leaving", self._tuning.roll_call_s)
        except RankError as silence:
            return str(silence) if roll_call else None
        return "; ".join(said) or None

    def _said_on_leaving(self, store: Store, error: BaseException, roll_call: bool) -> list[str]:
        mine = report_error(error)
        text = _json({"error": {**mine, "ranks": [self.rank]}, "phase": ""})
        try:
            put_bytes(store, f"{self._count}/{self.rank}", text)
            if self.rank == 0:
                put_bytes(store, f"{self._count}/answer", text)
            first = json.loads(store.compare_set("left", "", text.decode()))["error"]
            put_bytes(store, f"left/{self.rank}", b"")
            store.add("left/count", 1)
            absent = self._absent(store) if roll_call else ""
        except RuntimeError as gone:  # its server has left before
            lost = "the process that keeps the store of the process group, which may be rank 0, or its machine is gone"
            return [f"{lost}: {_first_line(gone)}"] if roll_call else []
        said = []
        if first["ranks"] != [self.rank] and (first["type"], first["message"]) != (mine["type"], mine["message"]):
            said.append(f"rank {first['ranks'][0]} had left before: {first['type']}: {first['message']}")
        if absent:
            said.append(
                f"rank(s) {absent} did not leave, as the others did, within "
                f"{self._tuning.roll_call_s:g} s: their processes or their machine may be lost, or they hang"
            )
        return said

    def _absent(self, store: Store) -> str:
        """Wait for all to leave; returns who did not and where, without those of one host that still live, as text."""
        deadline = time.monotonic() + self._tuning.roll_call_s
        pause = max(_ROLL_CALL_PAUSE_S, self.world * _PAUSE_PER_RANK_S)
        while (now := time.monotonic()) < deadline and not store.check(["left/absent"]):
            self._heard = now
            gone = [rank for rank in self._neighbours.gone() if not store.check([f"left/{rank}"])]
            if store.add("left/count", 0) + len(gone) >= self.world:
                break
            time.sleep(pause)
        me = str(self.rank)
        if store.compare_set("left/counted by", "", me).decode() == me:  # asks for each rank: one does it for all
            living = self._neighbours.living()
            absent = [rank for rank in _absentees(store, "left", self.world) if rank not in living]
            where = self._neighbours.machines_text(absent)
            put_bytes(store, "left/absent", _json({"who": absent and f"{_list_ranks(absent)} of {self.world}{where}"}))
        text = self._wait(store, partial(get_if_there, store, "left/absent"), self._tuning.roll_call_s)
        return (text is not None and json.loads(text)["who"]) or ""

    def _exchange(
        self, store: Store, phase: str, mine: bytes, lead: Callable[[list[T]], R], timeout_s: float
    ) -> dict[str, Any]:
        number = self._count
        put_bytes(store, f"{number}/{self.rank}", mine)
        if self.rank == 0:
            try:
                text = _json(self._lead(store, phase, lead, timeout_s))
            except BaseException as error:
                text = _json({"error": {**report_error(error), "ranks": [0]}})
                if not isinstance(error, Exception):
                    put_bytes(store, f"{number}/answer", text)
                    raise
            put_bytes(store, f"{number}/answer", text)
        else:
            text = self._while_it_answers(lambda: self._get_answer(store, phase, timeout_s), phase, timeout_s)
        answer: dict[str, Any] = json.loads(text)
        self._open = False
        store.delete_key(f"{number}/{self.rank}")
        if self.rank == 0:
            store.delete_key(f"{number}/leading")
            if number > 1:
                store.delete_key(f"{number - 1}/answer")  # everybody has read it: they have all answered since
        return answer

    def _lead(self, store: Store, phase: str, lead: Callable[[list[T]], R], timeout_s: float) -> dict[str, Any]:
        arrivals = Arrivals(store, [f"{self._count}/{rank}" for rank in range(self.world)])
        texts = self._wait(store, partial(_unless_lost, arrivals.all_if_there), timeout_s)
        if texts is None:
            missing = _absentees(store, str(self._count), self.world)
            where = self._neighbours.machines_text(missing)
            raise RankError(
                f"rank(s) {_list_ranks(missing)} of {self.world} did not answer within {timeout_s:g} s while {phase}: "
                f"they{where} hang, are stopped, did not enter this call, or their machine is lost"
            )
        reports = json.loads(b"[" + b",".join(texts) + b"]")
        failed = [rank for rank, report in enumerate(reports) if "error" in report]
        if failed:
            return {"error": {**reports[failed[0]]["error"], "ranks": failed[:_LISTED], "count": len(failed)}}
        calls: dict[str, str] = {}
        for rank, report in enumerate(reports):
            calls.setdefault(report["phase"].split(" ")[0], f"rank {rank} is {report['phase']}")
        if len(calls) > 1:
            raise MismatchError(f"the ranks are in different calls: {', '.join(calls.values())}")
        put_bytes(store, f"{self._count}/leading", b"")
        return {"value": lead([report["value"] for report in reports])}

    def _while_it_answers(self, get: Callable[[], T], phase: str, timeout_s: float) -> T:
        """Run ``get`` in a thread: calls to a store whose server is stopped, rank 0 perhaps, can't be interrupted."""
        found: list[T] = []
        self._heard = time.monotonic()
        asking = Worker(lambda: found.append(get()), name="shardckpt-answer", daemon=True)
        asking.start_or_run()
        while not asking.has_ended(self._tuning.host_look_s):
            if time.monotonic() - self._heard > timeout_s + self._tuning.rank_grace_s:
                self._deaf = True
                raise RankError(
                    f"rank {self.rank} got no answer from the store of the process group for {timeout_s:g} s while "
                    f"{phase}: the process that keeps it, which may be rank 0, hangs or is stopped, or its machine is "
                    "lost"
                )
        if asking.error is not None:
            raise asking.error
        return found[0]

    def _get_answer(self, store: Store, phase: str, timeout_s: float) -> bytes:
        key, started = f"{self._count}/answer", time.monotonic()
        signs = [f"{self._count}/0", f"{self._count}/leading"]
        try:
            look = partial(_unless_lost, partial(get_if_there, store, key))
            if (text := self._wait(store, look, timeout_s + self._tuning.rank_grace_s, signs)) is not None:
                return text
            problem = "it hangs, is stopped, or did not enter this call"
        except RankError:
            raise
        except RuntimeError as error:  # the store's
            problem = f"it died, and the store with it: {error}"
        waited = time.monotonic() - started
        raise RankError(f"rank {self.rank} got no answer from rank 0 after {waited:.0f} s while {phase}: {problem}")

    def _wait(
        self, store: Store, look: Callable[[], T | None], timeout_s: float, signs: Iterable[str] = ()
    ) -> T | None:
        """Return what ``look`` finds, or None if it finds nothing in time.

        Each of ``signs``, keys that come in this order, restarts the time. Rank 0 alone looks as often as a few ranks
        would. All others at once would keep the server of a store busy, and with it rank 0, whose every request is
        served after one of each of them: the more there are, the less often each looks.
        """
        signs = list(signs)
        looked = time.monotonic()
        began, deadline = looked, looked + timeout_s
        many = self.world if self.rank else 1
        shortest = max(self._tuning.rank_poll_s, many * _PAUSE_PER_RANK_S)
        longest = max(self._tuning.rank_longest_poll_s, many * _LONGEST_PAUSE_PER_RANK_S)
        around_s = max(self._tuning.host_look_s, many * _LOOK_PER_RANK_S)
        while (found := look()) is None:  # no store.wait: each one that is in vain makes a TCPStore print warnings
            self._heard = now = time.monotonic()
            if now - looked >= around_s or now >= deadline:
                looked = now
                self._answer_for_the_dead(store)
                while signs and store.check([signs[0]]):
                    del signs[0]
                    deadline = now + timeout_s
            if now >= deadline:
                return look()
            pause = min(max(shortest, (now - began) / 20), longest)
            time.sleep(max(min(pause, deadline - now), 0))
        return found

    def _answer_for_the_dead(self, store: Store) -> None:
        """Report for the ranks of this host whose processes are gone, and in place of rank 0 if it is among them."""
        for rank, process in self._neighbours.gone().items():
            message = f"its process, pid {process.pid} on {os.uname().nodename}, is gone: it was killed, or it left"
            text = _json({"error": {**report_error(RankError(message)), "ranks": [rank]}, "phase": ""})
            for key in (f"{self._count}/{rank}", *([f"{self._count}/answer"] if rank == 0 else [])):
                if not store.check([key]):
                    put_bytes(store, key, text)


def _unless_lost(look: Callable[[], T | None]) -> T | None:
    """Return what ``look`` finds; raise a RankError if it finds nothing and a heartbeat was missed."""
    found = look()
    if found is None:
        raise_if_lost()
    return found


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _absentees(store: Store, folder: str, world: int) -> list[int]:
    """Return the ranks that have put nothing under ``folder/<rank>``."""
    return [int(key.rpartition("/")[2]) for key in lacking(store, [f"{folder}/{rank}" for rank in range(world)])]


def _list_ranks(ranks: list[int], count: int | None = None) -> str:
    """Return the first ranks of a list as text, and how many more there are: each rank gets a message, and shows it."""
    more = (count or len(ranks)) - len(ranks[:_LISTED])
    text = ", ".join(map(str, ranks[:_LISTED]))
    return f"[{text}, … and {more:,} more]" if more > 0 else f"[{text}]"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _rebuilt(report: ErrorReport, phase: str) -> Exception:
    ranks = report["ranks"]
    others = f" (and rank(s) {_list_ranks(ranks[1:], report.get('count', len(ranks)) - 1)})" if len(ranks) > 1 else ""
    return rebuild_error(report, f"rank {ranks[0]}{others} failed while {phase}: {report['type']}: {report['message']}")
