"""How long does a save hold up training? Prints one table, of saves of the same tensors by two processes.

    python examples/benchmarks/async_save.py

All ways take turns, round after round; each save is complete before the next way's turn. In each of them both ranks
start together, and the slower one counts. Medians over rounds, the first one left out:

blocked   seconds until the call returns and training could go on.
ratio     of that to memcpy in the same round.
complete  seconds until the checkpoint is whole. Only ours is also durable then: it syncs to disk.

memcpy    copies the tensors into memory that was used before, and does nothing else: what any save of values that are
          about to change has to wait for.
async     ours, as ShardCkptIO(use_async=True) does it.
sync      ours, as ShardCkptIO() does it.
DCP       torch.distributed.checkpoint.async_save as it comes, with its thread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import start_processes

from lightning_shardckpt.background import Background
from lightning_shardckpt.checkpoint import save, save_async
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.saving import About
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.trainer import snapshot

WORLD, TENSORS, MB = 2, 16, 1 << 20
WAYS = ("memcpy", "async", "sync", "DCP")
Finish = Callable[[], Any]


class Bench:
    """What a rank saves, and how; each way returns what waits until the checkpoint is complete."""

    def __init__(self, size: Namespace, folder: str) -> None:
        self.folder = folder
        mesh = init_device_mesh("cpu", (WORLD,))
        rows = size.mb * MB // TENSORS // 4096
        local = [torch.rand(rows, 1024) for _ in range(TENSORS)]
        self.state = {f"w{i}": DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for i, t in enumerate(local)}
        self.copies = [(torch.empty_like(t), t) for t in local]
        self.ranks, behind = Ranks.of_default_group(), Ranks.of_default_group()
        self.background = Background(behind)

    def describe(self) -> Snapshot:
        return snapshot({"state_dict": self.state, "global_step": 1})

    def memcpy(self, path: str) -> Finish:
        for to, tensor in self.copies:
            to.copy_(tensor)
        return lambda: None

    def sync(self, path: str) -> Finish:
        save(path, self.describe, ranks=self.ranks, about=About(1), size_per_shard=1024)
        return lambda: None

    def behind(self, path: str) -> Finish:
        common: dict[str, Any] = {"about": About(1), "size_per_shard": 1024, "background": self.background}
        save_async(path, self.describe, ranks=self.ranks, **common)
        return lambda: self.background.settle(self.ranks)

    def dcp(self, path: str) -> Finish:
        return dcp.async_save({"model": self.state}, checkpoint_id=path).result  # type: ignore[union-attr]

    def times(self, way: str, number: int) -> tuple[float, float]:
        """Of the slower rank."""
        path = f"{self.folder}/{number}-{way}.ckpt"
        act = {"memcpy": self.memcpy, "sync": self.sync, "async": self.behind, "DCP": self.dcp}[way]
        dist.barrier()
        begin = time.perf_counter()
        finish = act(path)
        blocked = time.perf_counter() - begin
        finish()
        both = torch.tensor([blocked, time.perf_counter() - begin])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        return float(both[0]), float(both[1])


def run(rank: int, size: Namespace, folder: str, port: int) -> None:
    warnings.filterwarnings("ignore")  # torch's, of names that it is going to change
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    bench = Bench(size, folder)
    rounds = [{way: bench.times(way, number) for way in WAYS} for number in range(size.rounds + 1)][1:]
    if rank == 0:
        print(f"{WORLD} processes, {size.mb} MB of each, {size.rounds} rounds, in {folder}\n")
        print("          blocked    ratio  complete")
        for way in WAYS:
            blocked, complete = (median(r[way][i] for r in rounds) for i in (0, 1))
            ratio = median(r[way][0] / r["memcpy"][0] for r in rounds)
            print(f"{way:8} {blocked:8.3f} {ratio:8.2f} {complete:9.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="How long does a save hold up training?")
    parser.add_argument("--mb", type=int, default=256, help="of each process (default: 256)")
    parser.add_argument("--rounds", type=int, default=7, help="that count (default: 7)")
    parser.add_argument("--dir", help="where to save (default: a temporary directory)")
    size = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory(dir=size.dir) as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        start_processes(run, (size, folder, port), nprocs=WORLD, start_method="spawn")


if __name__ == "__main__":
    main()
