"""How do ranks agree, and how does a failure on one reach all?

Every communication of the checkpoint side is one ``step``: each rank does its work, rank 0 sees all results, acts
once, and everybody gets its answer or the first error. It runs over the process group's key-value store, not over
the training group: it works off the main thread, its timeout is its own, and a rank that does not answer is named.
"""

from __future__ import annotations

import builtins
import itertools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed exports them under a condition only

from lightning_shardckpt import errors
from lightning_shardckpt.errors import RankError

T = TypeVar("T")
R = TypeVar("R")
_instances = itertools.count()
_GRACE_S = 30.0  # a rank waits this much longer for rank 0 than rank 0 waits for the others


class Ranks:
    """The processes that save and load one checkpoint together. All must take the same steps in the same order.

    Every rank must create its instances in the same order. Values that travel must be JSON.
    """

    def __init__(self, store: Store | None, rank: int, world: int, timeout_s: float = 1800.0) -> None:
        self.rank, self.world, self._timeout_s = rank, world, timeout_s
        self._store: Store | None = None
        if store is not None:
            # while one thread waits with a client of a TCPStore, no other thread can use that client
            own = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
            self._store = PrefixStore(f"shardckpt-{next(_instances)}", own)
        self._count = 0

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

    def step(self, phase: str, work: Callable[[], T], lead: Callable[[list[T]], R]) -> R:
        """Run ``work`` here and ``lead`` on rank 0 over the results by rank; return what ``lead`` returned.

        Collective: every rank must call it. ``phase`` completes the sentence "rank 3 failed while …".

        Raises:
            Exception: on every rank if any rank failed: of the class that the first failing rank raised, where that is
                an error of this package or of the operating system, else RankError. The message names the rank.
        """
        if self._store is None:
            return lead([work()])
        self._count += 1
        cause: BaseException | None = None
        try:
            mine = _json({"value": work()})
        except BaseException as error:
            mine, cause = _json({"error": _describe(error)}), error
        answer = self._exchange(self._store, phase, mine, lead)
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        if "error" in answer:
            raise _rebuilt(answer["error"], phase) from cause
        result: R = answer["value"]
        return result

    def _exchange(self, store: Store, phase: str, mine: bytes, lead: Callable[[list[T]], R]) -> dict[str, Any]:
        number = self._count
        _put(store, f"{number}/{self.rank}", mine)
        if self.rank == 0:
            try:
                text = _json(self._lead(store, phase, lead))
            except BaseException as error:
                text = _json({"error": {**_describe(error), "ranks": [0]}})
                if not isinstance(error, Exception):
                    _put(store, f"{number}/answer", text)
                    raise
            _put(store, f"{number}/answer", text)
        else:
            text = self._get_answer(store, phase)
        answer: dict[str, Any] = json.loads(text)
        store.delete_key(f"{number}/{self.rank}")
        if self.rank == 0 and number > 1:
            store.delete_key(f"{number - 1}/answer")  # everybody has read it: they have all answered since
        return answer

    def _lead(self, store: Store, phase: str, lead: Callable[[list[T]], R]) -> dict[str, Any]:
        reports = [json.loads(value) for value in self._collect(store, phase)]
        failed = [rank for rank, report in enumerate(reports) if "error" in report]
        if failed:
            return {"error": {**reports[failed[0]]["error"], "ranks": failed}}
        return {"value": lead([report["value"] for report in reports])}

    def _collect(self, store: Store, phase: str) -> list[bytes]:
        keys = [f"{self._count}/{rank}" for rank in range(self.world)]
        try:
            store.wait(keys, timedelta(seconds=self._timeout_s))
        except Exception as error:  # the class differs between stores
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            raise RankError(
                f"rank(s) {missing} of {self.world} did not answer within {self._timeout_s:g} s while {phase}: "
                "they died, hang, or did not enter this call"
            ) from error
        return [store.get(key) for key in keys]

    def _get_answer(self, store: Store, phase: str) -> bytes:
        key, limit = f"{self._count}/answer", self._timeout_s + _GRACE_S
        started = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=limit))
            return store.get(key)
        except Exception as error:
            waited = time.monotonic() - started
            raise RankError(
                f"rank {self.rank} got no answer from rank 0 after {waited:.0f} s while {phase}: {error}"
            ) from error


def _put(store: Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch says str; bytes are stored as they are


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _describe(error: BaseException) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}


def _rebuilt(error: dict[str, Any], phase: str) -> Exception:
    """The error of another rank as an exception of the same class, where that is safe to construct."""
    ranks: list[int] = error["ranks"]
    others = f" (and rank(s) {ranks[1:]})" if len(ranks) > 1 else ""
    message = f"rank {ranks[0]}{others} failed while {phase}: {error['type']}: {error['message']}"
    kind = getattr(errors, error["type"], None) or getattr(builtins, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.ShardCkptError | OSError):
        if not issubclass(kind, errors.ShardCkptError) and error["errno"] is not None:
            return kind(error["errno"], message)
        return kind(message)
    return RankError(message)
