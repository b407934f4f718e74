"""The ranks on this host, whose processes can be looked up, and reads of many keys of a store in few requests.

Each request is a round trip, during which the server serves all other clients.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from lightning_shardckpt.compat.torch_distributed import Store, put_bytes
from lightning_shardckpt.distributed.liveness import Process, host
from lightning_shardckpt.system.text import list_some

_BLOCK = 512  # keys of one request: in much longer ones, a TCPStore server takes more time per key


class Arrivals:
    """Values that other clients write under keys, to be read when all are present.

    Args:
        store: in which clients write.
        keys: must not be deleted once written; a value may still change until all keys are present.
    """

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._blocks, self._complete = store, _blocks(keys), 0

    def get_if_complete(self) -> list[bytes] | None:
        """Return all values in the order of the keys, or None if one is not present yet."""
        while self._complete < len(self._blocks):
            if not self._store.check(self._blocks[self._complete]):
                return None
            self._complete += 1
        return [value for block in self._blocks for value in self._store.multi_get(block)]


def absent_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Return the ``keys`` that are absent from the store. Each absent key costs a few requests."""
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [*keys]
    half = len(keys) // 2
    return [*absent_keys(store, keys[:half]), *absent_keys(store, keys[half:])]


def get_present(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the values of the ``keys`` that are present in the store."""
    absent = {*absent_keys(store, keys)}
    present = [key for key in keys if key not in absent]
    return dict(zip(present, (value for block in _blocks(present) for value in store.multi_get(block)), strict=True))


def _blocks(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[at : at + _BLOCK]) for at in range(0, len(keys), _BLOCK)]


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
        return dict(self._gone)

    def living(self) -> set[int]:
        """Return the ranks that had registered by the last call of ``gone`` and whose processes live."""
        return {rank for rank, process in [*self._processes.values()] if not process.is_gone()}

    def machines_text(self, ranks: Sequence[int]) -> str:
        """Return the machines of ranks on any host, as far as registered: text that follows the ranks in a sentence."""
        machines = get_present(self._store, [f"machine/{rank}" for rank in ranks])
        names = list(dict.fromkeys(name.decode() for name in machines.values()))
        return f" (on {list_some(names, 5)})" if names else ""
