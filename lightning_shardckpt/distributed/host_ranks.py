"""The ranks on this host, whose processes can be looked up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from lightning_shardckpt.compat.torch_distributed import Store, put_bytes
from lightning_shardckpt.distributed.liveness import Process, host
from lightning_shardckpt.distributed.many_keys import get_present

_LISTED = 5
_CHECKED = 64  # processes per call; with more ranks on a host, each checks some of them, and together they check all


class HostRanks:
    """The ranks of this host, which register in a store; each also registers the name of its machine.

    Args:
        store: shared by all ranks.
        rank: of this process, which is registered.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._host = store, f"host/{host()}"
        self._processes: dict[int, tuple[int, Process]] = {}  # rank and process by number of registration
        self._gone: dict[int, Process] = {}
        this = Process.this()
        number = self._next = store.add(self._host, 1)
        entry = {"rank": rank, "pid": this.pid, "started": this.started}
        put_bytes(store, f"{self._host}/{number}", json.dumps(entry).encode())
        put_bytes(store, f"machine/{rank}", os.uname().nodename.encode())

    def gone(self) -> dict[int, Process]:
        """Return the processes of this host that have ended, by rank, as found by this call and earlier ones.

        Makes two requests and checks at most 64 processes.
        """
        count = self._store.add(self._host, 0)
        new = {f"{self._host}/{number}": number for number in range(1, count + 1) if number not in self._processes}
        for key, text in get_present(self._store, list(new)).items():
            entry = json.loads(text)
            self._processes[new[key]] = entry["rank"], Process(entry["pid"], entry["started"])
        checked = [(self._next + i) % count + 1 for i in range(min(count, _CHECKED))]
        self._next += len(checked)
        for rank, process in (self._processes[number] for number in checked if number in self._processes):
            if process.is_gone():
                self._gone[rank] = process
        return self._gone

    def living(self) -> set[int]:
        """Return the ranks that had registered by the last call of ``gone`` and whose processes live."""
        return {rank for rank, process in self._processes.values() if not process.is_gone()}

    def machines_text(self, ranks: Sequence[int]) -> str:
        """Return the machines of ranks on any host, as far as registered: text that follows the ranks in a sentence."""
        machines = get_present(self._store, [f"machine/{rank}" for rank in ranks])
        names = list(dict.fromkeys(name.decode() for name in machines.values()))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return f" (on {', '.join(names[:_LISTED])}{more})" if names else ""
