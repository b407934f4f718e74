"""Collective steps of ranks, in which a failure of one rank reaches all.

Every communication of the checkpoint side is one ``step``. It runs over the process group's key-value store, not over
the training group, so it works off the main thread and has a timeout of its own. A waiting rank looks every second
whether the others live, and answers in the place of those that are gone, so that no rank waits for them.
"""

from __future__ import annotations

import builtins
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_shardckpt import errors
from lightning_shardckpt.compat.torch_distributed import PrefixStore, get_if_set, put_bytes
from lightning_shardckpt.distributed.host_numbers import look_for_notices
from lightning_shardckpt.distributed.world import World, current_world
from lightning_shardckpt.errors import MismatchError, RankError, ShardCkptError
from lightning_shardckpt.system.host import TUNING, Tuning
from lightning_shardckpt.system.text import list_some

T = TypeVar("T")
R = TypeVar("R")
_instances: dict[str, itertools.count[int]] = defaultdict(itertools.count)  # by group, since only its ranks count them
_PARTS = 3  # of a step: the work of rank 0, that of the others, and the lead
_PAUSE_PER_RANK_S = 2e-5  # at most 50,000 requests of all ranks per second: a server takes 11 µs for each
_LONGEST_PAUSE_PER_RANK_S = 1e-4  # at most 10,000 per second after a while
_KEYS = 512  # in a request
_LISTED = 32  # ranks in a message, which every rank prints


class Ranks:
    """The processes that save and load one checkpoint together.

    All must create their instances, and take the steps of each, in the same order. Values in steps must be JSON.
    ``members`` are ranks in the world of ``peers``, which share a store; None for a single process. ``rank`` counts by
    their order, and ``world`` is their number. ``timeout_s`` is for each step, and ``name`` the same on all ranks. Set
    ``is_background`` for another thread than the main one.
    """

    def __init__(
        self, peers: World | None, members: Sequence[int], timeout_s: float, *, name: str = "", tuning: Tuning = TUNING
    ) -> None:
        self.rank, self.world, self._is_alone = 0, len(members), peers is None
        self._members, self._timeout_s, self.tuning, self.is_background = members, timeout_s, tuning, False
        if peers is not None:
            self.rank, self._peers = members.index(peers.rank), peers
            self._store = PrefixStore(f"shardckpt-{name}", peers.store)
        self._count = self._answered = 0  # steps that have begun; the last one that rank 0, if this is it, has answered

    @classmethod
    def alone(cls) -> Ranks:
        """Return a single process, whose steps run in place."""
        return cls(None, (0,), 0.0)

    @classmethod
    def of_group(
        cls, group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0, tuning: Tuning = TUNING
    ) -> Ranks:
        """Return the ranks of a process group, in its order; by default of the default one, if it is initialized."""
        group = group or dist.group.WORLD
        if group is None or group.size() == 1:
            return cls.alone()
        name = f"{group.group_name}-{next(_instances[group.group_name])}"
        return cls(current_world(), dist.get_process_group_ranks(group), timeout_s, name=name, tuning=tuning)

    def step(
        self, phase: str, work: Callable[[], T], lead: Callable[[list[T]], R], *, timeout_s: float | None = None
    ) -> R:
        """Run ``work`` on every rank, then ``lead`` with the list of results on rank 0; return its result on each.

        Collective: every rank must call it.

        Args:
            phase: completes the sentence "rank 3 failed while …"; its first word must be the same on all ranks.
            work, lead: return JSON.
            timeout_s: of this step, in place of the instance's.

        Raises:
            Exception: on every rank if any rank failed: of the class that the first failing rank raised, if that is
                an error of this package or of the operating system, else RankError. The message names the rank.
        """
        if self._is_alone:
            return lead([work()])
        store, self._count = self._store, self._count + 1
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        text, cause = _call(lambda: {"value": work(), "phase": phase})
        put_bytes(store, f"{self._count}/{self.rank}", text)
        if self.rank == 0:
            text, failure = _call(lambda: self._answer(phase, lead, timeout_s))
            put_bytes(store, f"{self._count}/answer", text)
            if self._answered:
                store.delete_key(f"{self._answered}/answer")  # all have read it, since they have all come to this step
            self._answered, cause = self._count, cause or failure
        else:
            text = self._wait_for_answer(phase, timeout_s)
        answer = json.loads(text)
        store.delete_key(f"{self._count}/{self.rank}")  # which says that this rank has read the answer
        if "error" not in answer:
            result: R = answer["value"]
            return result
        self.wait_until_read(self.tuning.error_delivery_s)  # the error may end this process, which keeps the store
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        raise _rebuild(answer["error"], answer.get("ranks", [0]), phase) from cause

    def wait_until_read(self, timeout_s: float = 10.0) -> None:
        """Wait on rank 0, whose process may keep the store, until the others have read the answer to the last step.

        Not collective. Waits the whole time if a rank's process on another host is gone.
        """
        deadline = time.monotonic() + timeout_s
        with suppress(RuntimeError):  # the store's: its server is in another process, and gone
            for rank in range(1, self.world if self.rank == 0 else 1):
                while self._store.check([f"{self._answered}/{rank}"]) and self._members[rank] not in self._peers.gone:
                    if time.monotonic() >= deadline:
                        return
                    time.sleep(self.tuning.rank_longest_poll_s)
                    self._peers.look()

    def _answer(self, phase: str, lead: Callable[[list[T]], R], timeout_s: float) -> dict[str, Any]:
        """Wait on rank 0 for the reports of all ranks, and return the answer to them."""
        store, keys = self._store, [f"{self._count}/{rank}" for rank in range(self.world)]
        absent = list(keys)

        def are_present() -> bool | None:
            while absent and store.check(absent[:_KEYS]):
                del absent[:_KEYS]
            return None if absent else True

        if self._wait(are_present, timeout_s, phase) is None:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RankError(
                f"rank(s) {_ranks_text(missing)} of {self.world} did not answer within {timeout_s:g} s while {phase}: "
                "they hang, are stopped, did not enter this call, or their machine is lost"
            )
        texts = [text for at in range(0, self.world, _KEYS) for text in store.multi_get(keys[at : at + _KEYS])]
        reports = json.loads(b"[" + b",".join(texts) + b"]")
        failed = [rank for rank, report in enumerate(reports) if "error" in report]
        if failed:
            return {"error": reports[failed[0]]["error"], "ranks": failed}
        calls: dict[str, str] = {}
        for rank, report in enumerate(reports):
            calls.setdefault(report["phase"].split(" ")[0], f"rank {rank} is {report['phase']}")
        if len(calls) > 1:
            raise MismatchError(f"the ranks are in different calls: {', '.join(calls.values())}")
        return {"value": lead([report["value"] for report in reports])}

    def _wait_for_answer(self, phase: str, timeout_s: float) -> bytes:
        """Wait for rank 0, which has the time for its own work, then for that of others, then to lead."""
        look = partial(get_if_set, self._store, f"{self._count}/answer")
        try:
            if (text := self._wait(look, _PARTS * timeout_s + self.tuning.rank_grace_s, phase)) is not None:
                return text
            problem = f"within {_PARTS} * {timeout_s:g} s: it hangs, is stopped, or did not enter this call"
        except ShardCkptError:
            raise
        except RuntimeError as error:  # the store's
            problem = f"any more: it died, and the store with it: {error}"
        raise RankError(f"rank {self.rank} got no answer from rank 0 while {phase}, {problem}")

    def _wait(self, look: Callable[[], T | None], timeout_s: float, phase: str) -> T | None:
        """Poll ``look`` until it returns a value; return None if it does not in time. Raises for a lost rank.

        The more ranks poll, the longer each but rank 0 pauses: the store's server serves a request of rank 0 only after
        one of each other rank.
        """
        seen, polling = set[str](), self.world if self.rank else 1
        began = checked_at = now = time.monotonic()
        shortest = max(self.tuning.rank_poll_s, polling * _PAUSE_PER_RANK_S)
        longest = max(self.tuning.rank_longest_poll_s, polling * _LONGEST_PAUSE_PER_RANK_S)
        while (value := look()) is None and now - began < timeout_s:  # store.wait prints warnings when it times out
            if (lost := self._peers.lost) is not None:
                raise RankError(lost)
            if now - checked_at >= self.tuning.host_look_s:
                checked_at = now
                self._answer_for_gone_ranks()
                if not self.is_background:
                    look_for_notices(phase, self._members, seen)
            time.sleep(min(max(shortest, (now - began) / 20), longest))
            now = time.monotonic()
        return value

    def _answer_for_gone_ranks(self) -> None:
        """Report, for each rank that has ended, the error that ended it; for rank 0 also write its answer."""
        self._peers.look()
        for rank, member in enumerate(self._members):
            if (reason := self._peers.gone.get(member)) is not None:
                report = _report(RankError(self._peers.lost or reason))
                text = json.dumps({"error": report, "ranks": [rank]}).encode()
                for key in (f"{self._count}/{rank}", *([f"{self._count}/answer"] if rank == 0 else [])):
                    if not self._store.check([key]):
                        put_bytes(self._store, key, text)


def _call(work: Callable[[], dict[str, Any]]) -> tuple[bytes, BaseException | None]:
    """Return the result of ``work`` as JSON, or its error in place of a result, and the error."""
    try:
        return json.dumps(work()).encode(), None
    except BaseException as error:
        return json.dumps({"error": _report(error)}).encode(), error


def _report(error: BaseException) -> tuple[str, str, int | None]:
    try:
        message = str(error)
    except Exception:  # a user's class whose __str__ raises
        message = "(it has no message)"
    return type(error).__name__, message, getattr(error, "errno", None)


def _rebuild(report: tuple[str, str, int | None], ranks: list[int], phase: str) -> Exception:
    kind, message, number = report
    also = f" (and rank(s) {_ranks_text(ranks[1:])})" if ranks[1:] else ""
    message = f"rank {ranks[0]}{also} failed while {phase}: {kind}: {message}"
    cls = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, ShardCkptError | OSError)):
        return RankError(message)
    return cls(message) if number is None or issubclass(cls, ShardCkptError) else cls(number, message)


def _ranks_text(ranks: list[int]) -> str:
    return f"[{list_some([*map(str, ranks)], _LISTED)}]"


def refuse_unusable_world(ranks: Ranks) -> None:
    """Raise a RankError on every rank if an earlier run has left collectives that can't end any more.

    Collective: every rank of ``ranks``, those of the default group, must call it.
    """
    phase, unusable = "beginning a run", lambda: ranks.world > 1 and not current_world().is_usable
    waited: list[int] = ranks.step(phase, unusable, lambda rows: [rank for rank, row in enumerate(rows) if row])
    if waited:
        raise RankError(
            f"this run cannot begin: an earlier one ended on rank(s) {_ranks_text(waited)} in a collective that "
            "another rank, which had failed alone, never entered: start all processes again, from the last checkpoint"
        )
