"""The ranks on the same host, whose processes this one can look up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from lightning_shardckpt.compat.torch_distributed import Store, put_bytes
from lightning_shardckpt.distributed.liveness import Process, host
from lightning_shardckpt.distributed.many_keys import known_values

_LISTED = 5
_LOOKED_AT = 64  # processes at a time: of more ranks on a host, each looks at some, and all of them at all


class Neighbours:
    """The ranks of this host, as they register themselves in a store; each also tells the name of its machine there."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._host = store, f"host/{host()}"
        self._found: dict[int, tuple[int, Process]] = {}  # rank and process by the place at which it registered
        self._gone: dict[int, Process] = {}
        me = Process.this()
        place = self._next = store.add(self._host, 1)
        about = {"rank": rank, "pid": me.pid, "started": me.started}
        put_bytes(store, f"{self._host}/{place}", json.dumps(about).encode())
        put_bytes(store, f"machine/{rank}", os.uname().nodename.encode())

    def gone(self) -> dict[int, Process]:
        """The processes that were found to have ended, by rank; of many on this host, by this call or an earlier one.

        Costs two requests, and a look at 64 processes at most.
        """
        count = self._store.add(self._host, 0)
        new = {f"{self._host}/{place}": place for place in range(1, count + 1) if place not in self._found}
        for key, text in known_values(self._store, list(new)).items():
            about = json.loads(text)
            self._found[new[key]] = about["rank"], Process(about["pid"], about["started"])
        looked_at = [(self._next + i) % count + 1 for i in range(min(count, _LOOKED_AT))]
        self._next += len(looked_at)
        for rank, process in (self._found[place] for place in looked_at if place in self._found):
            if process.is_gone():
                self._gone[rank] = process
        return self._gone

    def living(self) -> set[int]:
        """The ranks that had registered by the last call of ``gone``, and live."""
        return {rank for rank, process in self._found.values() if not process.is_gone()}

    def machines_text(self, ranks: Sequence[int]) -> str:
        """Return where ranks are, on any host, as far as they have told it: text to follow them in a sentence."""
        told = known_values(self._store, [f"machine/{rank}" for rank in ranks])
        names = list(dict.fromkeys(name.decode() for name in told.values()))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return f" (on {', '.join(names[:_LISTED])}{more})" if names else ""
