"""Compare each schedule of a pipeline with one process, on this machine's GPUs or CPU, in one table.

    python examples/benchmarks/pipeline.py

Every schedule trains the same transformer (random weights, random bytes, AdamW) on the same batches as one process of
plain Lightning, with Pipeline(loss="microbatch"). All take turns, round after round, each time in fresh processes with
one thread per process; the first step of a run is not counted. Without a GPU for each, the processes of a pipeline talk
over gloo on the loopback device, so the table says nothing about GPUs or networks. With them, work and idle are those
of the threads on the CPU, and peak is the memory of the GPU; that has been run on no real one. Medians over rounds:

step      seconds of one optimizer step.
ratio     of that to the step of one process in the same round.
at best   the ratio with the bubble of theory, if nothing else cost anything and all stages cost the same.
work      CPU time of all processes for one step, over that of one process: what cutting costs besides waiting.
idle      measured: the share of the time in which a rank's own thread sleeps, from the start of a step to the end of
          its backward, the mean over ranks. That is the bubble, with communication and stages that are not equal.
bubble    `schedule.bubble_fraction`: the same of theory, with backward passes of twice the forward's time.
state     MB of parameters, gradients and optimizer state: of the rank with most, and as a share of one process's.
peak      MB: the largest resident memory of a rank above that of the same run of a model of no size, with the
          activations in it; and as a share of one process's.

The last line says how long threads that could run waited for a core. Much more than 0 means that the machine had other
things to do (or too few cores): then the times are too long, and idle too high.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_shardckpt import Pipeline, ShardedStrategy
from lightning_shardckpt.parallel.pipeline.schedule import bubble_fraction, resolve_schedule

ALONE = "one process"
STAGES_PER_RANK = {
    "gpipe": 1,
    "1f1b": 1,
    "looped_bfs": 2,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
    "dualpipe_v": 2,
}
NO_SIZE = {"width": 8, "length": 8, "steps": 1}
BYTES = 256
MB = 1e6


class Net(pl.LightningModule):
    """Predicts bytes, by default with 6 million parameters."""

    def __init__(self, size: Namespace) -> None:
        super().__init__()
        self.size = size

    def configure_model(self) -> None:
        width = self.size.width
        self.embed = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
            for _ in range(self.size.layers)
        )
        self.head = nn.Linear(width, BYTES)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[0].flatten())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        shape = ((1 + self.size.steps) * self.size.batch, self.size.length)
        return DataLoader(TensorDataset(torch.randint(BYTES, shape)), self.size.batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(pl.Callback):
    """Notes the times of each step, how this rank's thread spent its passes, and the bytes that the rank holds."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {"step": [], "work": [], "idle": [], "queued": []}
        self.state = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if dist.is_initialized():
            dist.barrier()
        _wait_for_gpu()
        self._clock, self._work, self._thread = time.perf_counter(), time.process_time(), _thread_seconds()

    def on_after_backward(self, *_: Any) -> None:
        _wait_for_gpu()
        clock = time.perf_counter() - self._clock
        ran, queued = (now - before for now, before in zip(_thread_seconds(), self._thread, strict=True))
        self.seen["idle"].append(1 - (ran + queued) / clock)
        self.seen["queued"].append(queued / clock)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        _wait_for_gpu()
        self.seen["step"].append(time.perf_counter() - self._clock)
        self.seen["work"].append(time.process_time() - self._work)
        own = [p for p in module.parameters() if not getattr(p, "is_elsewhere", False)]  # of this stage
        tensors = [*own, *(p.grad for p in own if p.grad is not None)]
        for parameter in own:
            tensors += [v for v in trainer.optimizers[0].state[parameter].values() if isinstance(v, Tensor)]
        self.state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _thread_seconds() -> tuple[float, float]:
    """How long this thread has run, and how long it could have run but had no core."""
    ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) / 1e9, int(queued) / 1e9


def train(rank: int, name: str, size: Namespace, folder: str) -> None:
    """One rank of one run; writes what it saw into the folder."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    strategy: Any = "auto"
    on_gpus = torch.cuda.device_count() >= size.ranks
    if name != ALONE:
        strategy = ShardedStrategy(
            pipeline_parallel_size=size.ranks,
            pipeline=Pipeline(
                schedule=name,
                stages_per_rank=STAGES_PER_RANK[name],
                microbatches=size.microbatches,
                loss="microbatch",
            ),
        )
        # What torchrun would set: Lightning then starts no processes of its own.
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size.ranks, "LOCAL_WORLD_SIZE": size.ranks}
        os.environ |= {key: str(value) for key, value in places.items()} | {"TORCHELASTIC_RUN_ID": "benchmark"}
        os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
        if on_gpus:
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size.ranks)
    pl.seed_everything(1, verbose=False)
    watch, quiet = Watch(), ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = pl.Trainer(
        accelerator="cuda" if on_gpus else "cpu",
        devices=1 if name == ALONE else size.ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[watch],
        **dict.fromkeys((*quiet, "use_distributed_sampler"), False),
    )
    trainer.fit(Net(size))
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(lines["VmHWM"].split()[0]) * 1024
    if on_gpus:
        peak = torch.cuda.max_memory_allocated()
    facts = {key: median(values[1:]) for key, values in watch.seen.items()} | {"state": watch.state, "peak": peak}
    Path(folder, f"{rank}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


def run(name: str, size: Namespace) -> dict[str, float]:
    """Train in processes of their own, forked so that none imports torch again."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = 1 if name == ALONE else size.ranks
        start_processes(train, (name, size, folder), ranks, start_method="fork")
        facts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    over = {"work": sum, "idle": mean, "queued": mean}
    return {key: over.get(key, max)(one[key] for one in facts) for key in facts[0]}


def table(runs: Mapping[str, list[dict[str, float]]], floors: Mapping[str, float], size: Namespace) -> str:
    """What the module's docstring describes."""

    def typical(name: str, key: str) -> float:
        return median(one[key] for one in runs[name])

    def ratio(name: str, key: str) -> str:
        return f"{median(one[key] / alone[key] for one, alone in zip(runs[name], runs[ALONE], strict=True)):.2f}"

    def memory(name: str) -> Iterator[str]:
        for key in ("state", "peak"):
            got, whole = (typical(of, key) - (floors[of] if key == "peak" else 0) for of in (name, ALONE))
            yield from (f"{got / MB:.0f}", f"{got / whole:.0%}")

    rows = [("", "step", "ratio", "at best", "work", "idle", "bubble", "state", "", "peak", "")]
    for name in runs:
        best, idle, bubble = "", "", ""
        if name != ALONE:
            waiting = bubble_fraction(resolve_schedule(name, size.ranks, STAGES_PER_RANK[name]), size.microbatches)
            best, bubble = f"{1 / size.ranks / (1 - waiting):.2f}", f"{waiting:.0%}"
            idle = f"{typical(name, 'idle'):.0%}"
        step, work = f"{typical(name, 'step'):.3f}", ratio(name, "work")
        rows.append((name, step, ratio(name, "step"), best, work, idle, bubble, *memory(name)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    defaults = {"ranks": 2, "layers": 8, "width": 256, "length": 128, "batch": 16, "microbatches": 4}
    for name, default in {**defaults, "steps": 2, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedules", nargs="+", choices=STAGES_PER_RANK, default=list(STAGES_PER_RANK))
    size = parser.parse_args()
    names, cores = [ALONE, *size.schedules], len(os.sched_getaffinity(0))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tqdm(total=len(names) * (1 + size.rounds), unit="run", disable=None) as bar:
        floors = {}
        for name in names:
            floors[name] = run(name, Namespace(**vars(size) | NO_SIZE))["peak"]
            bar.update()
        for name in names * size.rounds:
            runs[name].append(run(name, size))
            bar.update()
    print(
        f"{size.ranks} processes in a pipeline, {cores} cores, {torch.cuda.device_count()} GPUs; {size.layers} layers "
        f"of width {size.width}, {size.batch} x {size.length} bytes, {size.microbatches} microbatches, "
        f"{size.rounds} rounds\n"
    )
    print(table(runs, floors, size))
    queued = mean(one["queued"] for name in names for one in runs[name])
    print(f"\nready to run, but without a core: {queued:.0%} of the time")


if __name__ == "__main__":
    main()
