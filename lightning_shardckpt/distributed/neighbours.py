"""The ranks on the same host, whose processes this one can look up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from lightning_shardckpt.compat.torch_store import Store, put_bytes
from lightning_shardckpt.distributed.liveness import Process, host

_LISTED = 5


class Neighbours:
    """The ranks of this host, as they register themselves in a store; each also tells the name of its machine there."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._host = store, f"host/{host()}"
        self._found: dict[int, tuple[int, Process]] = {}  # rank and process by the place at which it registered
        me = Process.this()
        place = store.add(self._host, 1)
        about = {"rank": rank, "pid": me.pid, "started": me.started}
        put_bytes(store, f"{self._host}/{place}", json.dumps(about).encode())
        put_bytes(store, f"machine/{rank}", os.uname().nodename.encode())

    def gone(self) -> dict[int, Process]:
        """The processes that have ended, by rank."""
        for place in range(1, self._store.add(self._host, 0) + 1):
            if place not in self._found and self._store.check([f"{self._host}/{place}"]):
                about = json.loads(self._store.get(f"{self._host}/{place}"))
                self._found[place] = about["rank"], Process(about["pid"], about["started"])
        return {rank: process for rank, process in self._found.values() if process.is_gone()}

    def living(self) -> set[int]:
        """The ranks that had registered by the last call of ``gone``, and live."""
        return {rank for rank, process in self._found.values() if not process.is_gone()}

    def machines_text(self, ranks: Sequence[int]) -> str:
        """Return where ranks are, on any host, as far as they have told it: text to follow them in a sentence."""
        keys = [f"machine/{rank}" for rank in ranks]
        names = list(dict.fromkeys(self._store.get(key).decode() for key in keys if self._store.check([key])))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return f" (on {', '.join(names[:_LISTED])}{more})" if names else ""
