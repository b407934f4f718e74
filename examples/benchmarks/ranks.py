"""Measure what a step of thousands of ranks costs rank 0 and the server of their store, in one table.

    python examples/benchmarks/ranks.py                 # --processes 16 64 256 --played 512 1024 4096 16384

The ranks of a save or a load tell rank 0 something, and get its answer, through a TCPStore, whose server has a process
of its own here; under some launchers it is a thread of rank 0's. Medians over --steps:

processes  each rank is a process, all on this machine, that takes real steps of ``Ranks``. A step lasts until the
           slowest rank has come, so on a few cores it is mostly a wait for their turn: look at the CPU time.
played     rank 0 takes real steps of ``Ranks``; one connection plays all others. Before a step it puts their reports,
           after it it asks for the answer and deletes the report, for one rank after the other. So the time of a step
           is that of rank 0's own work, and the server's CPU time that of all requests, none of which come together
           as they would from many clients.
before     seconds in which rank 0, alone with the server, gets all reports by one request each: what it did before.

Last comes the slope, in microseconds for each rank, fitted to the played sizes but the largest, and what it foretells
for that one.

Each connection to a TCPStore makes torch ask for the name of ``::ffff:127.0.0.1``. If the name server is slow, so is
the start of many processes: ``::ffff:127.0.0.1 localhost`` in /etc/hosts helps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import clone_store, put_bytes
from lightning_shardckpt.distributed.ranks import Ranks

_NAME = "benchmark"
_PHASE = "preparing to save 'epoch=0-step=100000.ckpt'"
_TIMEOUT = timedelta(seconds=900)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Facts:
    """Seconds of one step."""

    wall: float
    rank_0: float
    server: float
    before: float


@dataclass(frozen=True)
class Server:
    """The process with the server of a TCPStore."""

    pid: int
    port: int

    def client(self) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, None, is_master=False, timeout=_TIMEOUT)

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


@contextmanager
def server() -> Iterator[Server]:
    ports, end = os.pipe(), os.pipe()

    def serve() -> NoReturn:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        os.write(ports[1], str(store.port).encode())
        os.close(end[1])
        os.read(end[0], 1)
        os._exit(0)

    pid = fork(serve)
    port = int(os.read(ports[0], 9))
    try:
        yield Server(pid, port)
    finally:
        for fd in (*end, *ports):
            os.close(fd)
        os.waitpid(pid, 0)


def report(rank: int) -> dict[str, Any]:
    """What a rank says at the first step of a save, of about the usual size."""
    replicas = {f"0-{rank}": f"{rank:016x}"}
    return {"path": "epoch=0-step=100000.ckpt", "step": 100000, "digest": "0" * 16, "replicas": replicas}


def step(ranks: Ranks) -> None:
    found = ranks.step(_PHASE, lambda: report(ranks.rank), lambda reports: [len(reports), reports[-1]])
    assert found == [ranks.world, report(ranks.world - 1)]


def timed_step(ranks: Ranks) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step(ranks)
    return time.perf_counter() - wall, time.process_time() - cpu


def one_by_one(store: Any, world: int) -> float:
    """Put all reports, and get them as rank 0 did once; returns the seconds of the latter."""
    keys, view = [f"{rank}" for rank in range(world)], clone_store(store, "before")
    for rank, key in enumerate(keys):
        put_bytes(view, key, json.dumps(report(rank)).encode())
    begin = time.perf_counter()
    assert view.check(keys) and [json.loads(view.get(key)) for key in keys][-1] == report(world - 1)
    return time.perf_counter() - begin


def of_processes(world: int, steps: int) -> Facts:
    results = os.pipe()

    def take_steps(server: Server, rank: int) -> None:
        store = server.client()
        ranks = Ranks(store, rank, world, _TIMEOUT.total_seconds(), name=_NAME)
        for number in range(1 + steps):  # the first one waits for the others to start
            before = server.cpu()
            wall, cpu = timed_step(ranks)
            if number and rank == 0:
                os.write(results[1], json.dumps([wall, cpu, server.cpu() - before]).encode() + b"\n")
        ranks.wait_until_read()

    with server() as served:
        before = one_by_one(served.client(), world)
        gc.collect()
        gc.freeze()  # so that forked processes share their pages
        pids = [fork(lambda rank=rank: take_steps(served, rank)) for rank in range(world)]
        ended = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(results[1])
    with os.fdopen(results[0]) as lines:
        found = [json.loads(line) for line in lines]
    if any(ended) or len(found) != steps:
        raise SystemExit(f"{sum(map(bool, ended))} of {world} processes failed")
    return Facts(*(median(column) for column in zip(*found, strict=True)), before)


def played(world: int, steps: int) -> Facts:
    with server() as served:
        store = served.client()
        ranks, others = Ranks(store, 0, world, 60, name=_NAME), clone_store(store, f"shardckpt-{_NAME}")
        before = one_by_one(store, world)
        found = []
        for number in range(1, 1 + steps):
            begin = served.cpu()
            for rank in range(1, world):
                put_bytes(others, f"{number}/{rank}", json.dumps({"value": report(rank), "phase": _PHASE}).encode())
            others.check([f"{number}/0"])  # answered when all of them are there
            times = timed_step(ranks)
            for rank in range(1, world):
                others.compare_set(f"{number}/answer", "?", "?")
                others.delete_key(f"{number}/{rank}")
            found.append((*times, served.cpu() - begin))
    return Facts(*(median(column) for column in zip(*found, strict=True)), before)


def slope(worlds: list[int], seconds: list[float]) -> tuple[float, float]:
    """Least squares: seconds for each rank, and without any."""
    middle, mean = sum(worlds) / len(worlds), sum(seconds) / len(worlds)
    spread = sum((world - middle) ** 2 for world in worlds)
    each = sum((w - middle) * (s - mean) for w, s in zip(worlds, seconds, strict=True)) / spread if spread else 0.0
    return each, mean - each * middle


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[16, 64, 256], help="numbers of real processes")
    parser.add_argument("--played", type=int, nargs="+", default=[512, 1024, 4096, 16384], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=5, help="that count (5)")
    options = parser.parse_args()
    rows = [("processes", world, of_processes(world, options.steps)) for world in options.processes]
    rows += [("played", world, played(world, options.steps)) for world in options.played]
    print("| ranks | | before, s | step, s | rank 0, CPU s | server, CPU s |\n|---:|---|---:|---:|---:|---:|")
    for kind, world, facts in rows:
        times = " | ".join(f"{value:.3f}" for value in (facts.before, facts.wall, facts.rank_0, facts.server))
        print(f"| {world:,} | {kind} | {times} |")
    *fitted, (_, largest, measured) = [row for row in rows if row[0] == "played"]
    for name in ("before", "wall", "rank_0", "server") if len(fitted) > 1 else ():
        each, rest = slope([world for _, world, _ in fitted], [getattr(facts, name) for *_, facts in fitted])
        foretold, found = rest + each * largest, getattr(measured, name)
        print(f"{name}: {each * 1e6:.1f} µs for each rank, {foretold:.3f} s for {largest:,}; measured {found:.3f} s")


if __name__ == "__main__":
    main()
