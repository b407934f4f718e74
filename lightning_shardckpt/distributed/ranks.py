"""How do ranks agree, and how does a failure on one reach all?

Every communication of the checkpoint side is one ``step``: each rank does its work, rank 0 sees all results, acts
once, and everybody gets its answer or the first error. It runs over the process group's key-value store, not over
the training group: it works off the main thread and its timeout is its own. A rank that waits looks around every
second: for one whose process is gone, it answers in its place, so that nobody waits for the dead.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed exports them under a condition only

from lightning_shardckpt import errors
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.processes import Process, host
from lightning_shardckpt.threads import start

T = TypeVar("T")
R = TypeVar("R")
_instances = itertools.count()
_of_groups: dict[str, itertools.count[int]] = {}  # by name: only the ranks of a group count its instances
_GRACE_S = 2.0  # a rank waits this much longer for rank 0 than rank 0 waits for the others
_FAREWELL_S = 2.0  # rank 0 waits so long for others to hear of an error
_LOOK_S = 1.0  # between two looks at the processes of this host
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.003  # between two looks into the store
_PAUSE_PER_RANK_S = 2e-5  # so that all ranks together ask at most 50,000 times a second
_ROLL_CALL_S = 10.0  # when a collective has failed on one rank, it fails on the others within this time
_ROLL_CALL_PAUSE_S = 0.1
_LISTED = 5
_OF_COLLECTIVES = re.compile(r"gloo|nccl|connection closed|connection reset|broken pipe|timed out", re.IGNORECASE)


class Ranks:
    """The processes that save and load one checkpoint together. All must take the same steps in the same order.

    Every rank must create its instances in the same order. Values that travel must be JSON.
    """

    def __init__(
        self, store: Store | None, rank: int, world: int, timeout_s: float = 1800.0, *, name: str | None = None
    ) -> None:
        self.rank, self.world, self._timeout_s = rank, world, timeout_s
        self._store: Store | None = None
        self._kept = store  # if its server is in this process, it is there for as long as somebody may ask it
        self._count, self._open = 0, False  # steps begun; whether the last one has not ended here
        self._heard, self._deaf = 0.0, False  # when the store answered last; whether it does not any more
        if store is not None:
            # while one thread waits with a client of a TCPStore, no other thread can use that client
            own = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
            self._store = PrefixStore(f"shardckpt-{next(_instances) if name is None else name}", own)
            self._host = f"host/{host()}"
            self._neighbours: dict[int, tuple[int, Process]] = {}  # rank and process by place
            me = Process.this()
            place = self._store.add(self._host, 1)
            _put(self._store, f"{self._host}/{place}", _json({"rank": rank, "pid": me.pid, "started": me.started}))
            _put(self._store, f"machine/{rank}", os.uname().nodename.encode())

    @classmethod
    def alone(cls) -> Ranks:
        """A single process: steps run in place."""
        return cls(None, 0, 1)

    @classmethod
    def of_default_group(cls, timeout_s: float = 1800.0) -> Ranks:
        """All ranks of the initialized default process group; this process alone without one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.alone()
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout_s)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, timeout_s: float = 1800.0) -> Ranks:
        """The ranks of a process group, in its order. All of them must create their instances in the same order."""
        if group.size() == 1:
            return cls.alone()
        name = f"{group.group_name}-{next(_of_groups.setdefault(group.group_name, itertools.count()))}"
        store = dist.distributed_c10d._get_default_store()
        return cls(store, group.rank(), group.size(), timeout_s, name=name)

    def linger(self, timeout_s: float = 10.0) -> None:
        """On rank 0, until the others have got the answer to the last step: it may keep the store. Not collective.

        For the end of a process. Those that are gone from another host, or have left, are waited for in vain.
        """
        if self._store is None or self.rank != 0 or self._open:
            return
        deadline = time.monotonic() + timeout_s
        with suppress(RuntimeError):  # the store's: it is kept elsewhere, and gone
            while time.monotonic() < deadline:
                waiting = {rank for rank in range(1, self.world) if self._store.check([f"{self._count}/{rank}"])}
                if not waiting - self._gone(self._store).keys():
                    return
                time.sleep(_LONGEST_PAUSE_S)

    def step(
        self, phase: str, work: Callable[[], T], lead: Callable[[list[T]], R], *, timeout_s: float | None = None
    ) -> R:
        """Run ``work`` here and ``lead`` on rank 0 over the results by rank; return what ``lead`` returned.

        Collective: every rank must call it. ``phase`` completes the sentence "rank 3 failed while …"; its first word
        must be the same on all ranks. ``timeout_s``: instead of the one of all steps, for one that may be in vain.

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
            text, cause = _json({"error": described(error), "phase": phase}), error
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        answer = self._exchange(self._store, phase, text, lead, wait_s)
        if "error" in answer:
            self.linger(_FAREWELL_S)  # with this error the process may end, and with it the store
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if "error" in answer:
            raise _rebuilt(answer["error"], phase) from cause
        result: R = answer["value"]
        return result

    def leave(self, error: BaseException, *, roll_call: bool = False) -> str | None:
        """Tell the others that this rank takes no further step, and why: the one that they wait in fails on all.

        Not collective. Of no effect if the store can't be reached any more. Returns who left first with which other
        error, if another rank did. With ``roll_call``, waits for the others to leave, too, and also returns who did
        not, or that the store can't be reached: that may be why this rank leaves.
        """
        store = self._store
        if store is None or self._deaf:
            return None
        self._count, self._open = self._count + (not self._open), True
        try:
            tell = partial(self._said_on_leaving, store, error, roll_call)
            said = self._while_it_answers(tell, "leaving", _ROLL_CALL_S)
        except RankError as silence:
            return str(silence) if roll_call else None
        return "; ".join(said) or None

    def _said_on_leaving(self, store: Store, error: BaseException, roll_call: bool) -> list[str]:
        mine = described(error)
        text = _json({"error": {**mine, "ranks": [self.rank]}, "phase": ""})
        try:
            _put(store, f"{self._count}/{self.rank}", text)
            if self.rank == 0:
                _put(store, f"{self._count}/answer", text)
            first = json.loads(store.compare_set("left", "", text.decode()))["error"]
            _put(store, f"left/{self.rank}", b"")
            store.add("left/count", 1)
            absent = self._absent(store) if roll_call else []
            where = self._machines(store, absent)
        except RuntimeError as gone:  # its server has left before
            lost = "the process that keeps the store of the process group, which may be rank 0, or its machine is gone"
            return [f"{lost}: {_first_line(gone)}"] if roll_call else []
        said = []
        if first["ranks"] != [self.rank] and (first["type"], first["message"]) != (mine["type"], mine["message"]):
            said.append(f"rank {first['ranks'][0]} had left before: {first['type']}: {first['message']}")
        if absent:
            said.append(
                f"rank(s) {absent} of {self.world}{where} did not leave, as the others did, within {_ROLL_CALL_S:g} s: "
                "their processes or their machine may be lost, or they hang"
            )
        return said

    def _absent(self, store: Store) -> list[int]:
        """The ranks that do not leave within some time, without those of this host that still live."""
        deadline, pause = time.monotonic() + _ROLL_CALL_S, max(_ROLL_CALL_PAUSE_S, self.world * _PAUSE_PER_RANK_S)
        while (now := time.monotonic()) < deadline and not store.check(["left/absent"]):
            self._heard = now
            gone = [rank for rank in self._gone(store) if not store.check([f"left/{rank}"])]
            if store.add("left/count", 0) + len(gone) >= self.world:
                break
            time.sleep(pause)
        me = str(self.rank)
        if store.compare_set("left/counted by", "", me).decode() == me:  # asks for each rank: one does it for all
            absent = [rank for rank in range(self.world) if not store.check([f"left/{rank}"])]
            living = {rank for rank, process in self._neighbours.values() if not process.is_gone()}
            _put(store, "left/absent", _json({"ranks": [rank for rank in absent if rank not in living]}))
        self._wait(store, ["left/absent"], _ROLL_CALL_S)
        found: list[int] = json.loads(store.get("left/absent"))["ranks"] if store.check(["left/absent"]) else []
        return found

    def _machines(self, store: Store, ranks: list[int]) -> str:
        """Where ranks are, as far as they have said it."""
        keys = [f"machine/{rank}" for rank in ranks]
        names = list(dict.fromkeys(store.get(key).decode() for key in keys if store.check([key])))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return f" (on {', '.join(names[:_LISTED])}{more})" if names else ""

    def _exchange(
        self, store: Store, phase: str, mine: bytes, lead: Callable[[list[T]], R], timeout_s: float
    ) -> dict[str, Any]:
        number = self._count
        _put(store, f"{number}/{self.rank}", mine)
        if self.rank == 0:
            try:
                text = _json(self._lead(store, phase, lead, timeout_s))
            except BaseException as error:
                text = _json({"error": {**described(error), "ranks": [0]}})
                if not isinstance(error, Exception):
                    _put(store, f"{number}/answer", text)
                    raise
            _put(store, f"{number}/answer", text)
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
        keys = [f"{self._count}/{rank}" for rank in range(self.world)]
        if not self._wait(store, keys, timeout_s):
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RankError(
                f"rank(s) {missing} of {self.world} did not answer within {timeout_s:g} s while {phase}: they"
                f"{self._machines(store, missing)} hang, are stopped, did not enter this call, or their machine is lost"
            )
        reports = [json.loads(store.get(key)) for key in keys]
        failed = [rank for rank, report in enumerate(reports) if "error" in report]
        if failed:
            return {"error": {**reports[failed[0]]["error"], "ranks": failed}}
        calls: dict[str, str] = {}
        for rank, report in enumerate(reports):
            calls.setdefault(report["phase"].split(" ")[0], f"rank {rank} is {report['phase']}")
        if len(calls) > 1:
            raise errors.MismatchError(f"the ranks are in different calls: {', '.join(calls.values())}")
        _put(store, f"{self._count}/leading", b"")
        return {"value": lead([report["value"] for report in reports])}

    def _while_it_answers(self, get: Callable[[], T], phase: str, timeout_s: float) -> T:
        """Run ``get`` in a thread: calls to a store whose server is stopped, rank 0 perhaps, can't be interrupted."""
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(get())
            except BaseException as error:
                failed.append(error)

        self._heard = time.monotonic()
        thread = threading.Thread(target=run, name="shardckpt-answer", daemon=True)
        start(thread)
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and time.monotonic() - self._heard > timeout_s + _GRACE_S:
                self._deaf = True
                raise RankError(
                    f"rank {self.rank} got no answer from the store of the process group for {timeout_s:g} s while "
                    f"{phase}: the process that keeps it, which may be rank 0, hangs or is stopped, or its machine is "
                    "lost"
                )
        if failed:
            raise failed[0]
        return found[0]

    def _get_answer(self, store: Store, phase: str, timeout_s: float) -> bytes:
        key, started = f"{self._count}/answer", time.monotonic()
        signs = [f"{self._count}/0", f"{self._count}/leading"]
        try:
            if self._wait(store, [key], timeout_s + _GRACE_S, signs):
                return store.get(key)
            problem = "it hangs, is stopped, or did not enter this call"
        except RuntimeError as error:  # the store's
            problem = f"it died, and the store with it: {error}"
        waited = time.monotonic() - started
        raise RankError(f"rank {self.rank} got no answer from rank 0 after {waited:.0f} s while {phase}: {problem}")

    def _wait(self, store: Store, keys: list[str], timeout_s: float, signs: Iterable[str] = ()) -> bool:
        """Whether all keys came in time; each of ``signs``, keys that come in this order, begins the time anew."""
        signs = list(signs)
        looked = time.monotonic()
        began, deadline = looked, looked + timeout_s
        longest = max(_LONGEST_PAUSE_S, self.world * _PAUSE_PER_RANK_S)
        while not store.check(keys):  # no store.wait: each one that is in vain makes a TCPStore print warnings
            self._heard = now = time.monotonic()
            if now - looked >= _LOOK_S or now >= deadline:
                looked = now
                self._answer_for_the_dead(store)
                while signs and store.check([signs[0]]):
                    del signs[0]
                    deadline = now + timeout_s
            if now >= deadline:
                return store.check(keys)
            pause = min(max(_SHORTEST_PAUSE_S, (now - began) / 20), longest)
            time.sleep(max(min(pause, deadline - now), 0))
        return True

    def _gone(self, store: Store) -> dict[int, Process]:
        """The ranks of this host whose processes are gone."""
        for place in range(1, store.add(self._host, 0) + 1):
            if place not in self._neighbours and store.check([f"{self._host}/{place}"]):
                found = json.loads(store.get(f"{self._host}/{place}"))
                self._neighbours[place] = found["rank"], Process(found["pid"], found["started"])
        return {rank: process for rank, process in self._neighbours.values() if process.is_gone()}

    def _answer_for_the_dead(self, store: Store) -> None:
        """Report for the ranks of this host whose processes are gone, and in place of rank 0 if it is among them."""
        for rank, process in self._gone(store).items():
            message = f"its process, pid {process.pid} on {os.uname().nodename}, is gone: it was killed, or it left"
            text = _json({"error": {**described(RankError(message)), "ranks": [rank]}, "phase": ""})
            for key in (f"{self._count}/{rank}", *([f"{self._count}/answer"] if rank == 0 else [])):
                if not store.check([key]):
                    _put(store, key, text)


def is_of_a_collective(error: BaseException) -> bool:
    """Whether a collective of training failed, perhaps since other ranks are gone; gloo has no class for that."""
    return isinstance(error, RuntimeError) and not isinstance(error, errors.ShardCkptError) and (
        isinstance(error, dist.DistError) or _OF_COLLECTIVES.search(str(error)) is not None
    )


def _put(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch says str; bytes are stored as they are


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def described(error: BaseException) -> dict[str, Any]:
    """An error as JSON, from which other ranks can raise it."""
    try:
        message = str(error)
    except Exception:  # of a class of the user's
        message = "(it has no message)"
    return {"type": type(error).__name__, "message": message, "errno": getattr(error, "errno", None)}


def _rebuilt(error: dict[str, Any], phase: str) -> Exception:
    ranks: list[int] = error["ranks"]
    others = f" (and rank(s) {ranks[1:]})" if len(ranks) > 1 else ""
    return raisable(error, f"rank {ranks[0]}{others} failed while {phase}: {error['type']}: {error['message']}")


def raisable(error: dict[str, Any], message: str) -> Exception:
    """What ``described`` made, as an exception of the same class, where that is safe to construct."""
    kind = getattr(errors, error["type"], None) or getattr(builtins, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.ShardCkptError | OSError):
        if not issubclass(kind, errors.ShardCkptError) and error["errno"] is not None:
            return kind(error["errno"], message)
        return kind(message)
    return RankError(message)
