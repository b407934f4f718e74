"""Measure saves, loads, exports and training steps beside the limits of the machine and beside peers.

    python examples/benchmarks/compare.py                  # a few minutes; --only save async … for some of it
    python examples/benchmarks/compare.py --gb 2.14 --rounds 5 --out results.json

Prints a table for each case, and with --out writes them as JSON. A case is one set of processes: gloo ranks on this
machine with one thread each, or NCCL where there is a GPU for each rank, and an FSDP2 model in float32 with AdamW, --gb
GB in all. Before anything is timed, each way has to bring back every bit of what it saved. Then all take turns, round
after round, each round in another order; in between, files are deleted and the journal is synced. Before a load from
the page cache, its files are read once. Before a save, a file of the same size is written and deleted: memory that the
page cache has just used is faster than memory that a virtual machine has to ask its host for. A time is that of the
slowest rank. Shown is the median over rounds, with the shortest and the longest; "× limit" and "× DCP" are medians of
the ratios in each round. Durable ways are compared with the limit O_DIRECT + fsync and with DCP's default, others with
their equals that do without fsync.

extra MB is what the rank that needed most had at most above what it had before (VmHWM, reset for each turn; pages of
mapped files count). Loads with new moments begin without optimizer state, as those of runs that resume do; with DCP its
own function makes the state first.

Sections: save (1, 2, 4 ranks), async (seconds blocked, and until complete), load (2 ranks → 2, from the page cache, and
from the disk below it), reshard (other ranks, columns), small (microseconds per tensor), consolidate (shards of 4 ranks
into whole tensors, for torch.load and as safetensors), training (steps, tokens per second and, on GPUs, the share of
the fastest matrix product, beside a plain loop and Lightning's strategies).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from consolidating import consolidate
from loading import load, reshard
from report import store, summarise, tables
from saving import asynchronous, save
from small import small
from training import training

SECTIONS = {
    "save": save,
    "async": asynchronous,
    "load": load,
    "reshard": reshard,
    "small": small,
    "consolidate": consolidate,
    "training": training,
}
_ROOM = 8  # times --gb: the files of a case at most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gb", type=float, default=0.2, help="of parameters and optimizer state in all (0.2)")
    parser.add_argument("--rounds", type=int, default=3, help="that count (3)")
    parser.add_argument("--tensors", type=int, default=10_000, help="of section small (10000)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--ranks", type=int, nargs="+", help="of save, async and training: cases of so many ranks only")
    parser.add_argument("--dir", help="where to save (a temporary directory)")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    free = shutil.disk_usage(options.dir or tempfile.gettempdir()).free
    if free < _ROOM * options.gb * 1e9:
        parser.error(f"{free / 1e9:.0f} GB are free, {_ROOM * options.gb:.0f} GB are needed; see --gb and --dir")
    torch.set_num_threads(1)
    for section in options.only:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            rows = SECTIONS[section](options, folder)
        summarise(rows)
        print(*tables(section, rows), sep="\n\n", end="\n\n")
        about = {"gb": options.gb, "rounds": options.rounds, "seconds": round(time.perf_counter() - begin)}
        if options.out is not None:
            store(options.out, section, {**_machine(), **about}, rows)


def _machine() -> dict[str, str | int]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": (models or [platform.machine()])[0],
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.device_count() else {}),
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
