"""Incremental saves of a LoRA-like run with its full base: bytes and seconds of each save, beside saves that write all.

    python examples/benchmarks/incremental.py --gb 0.5
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time

import torch
from torch import nn

from lightning_shardckpt import save

WIDTH, RANK = 1024, 8


class Lora(nn.Module):
    """A frozen matrix and two trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)


def written_mb(path: str) -> float:
    """MB of the files that no other checkpoint has."""
    return sum(file.stat().st_size for file in os.scandir(path) if file.stat().st_nlink == 1) / 1e6


def run(folder: str, net: nn.Module, saves: int, *, incremental: bool, all_change: bool) -> list[tuple[float, float]]:
    """Seconds and MB of each save; what is trained, or everything, changes before each."""
    found = []
    for step in range(saves):
        with torch.no_grad():
            for parameter in net.parameters():
                if all_change or parameter.requires_grad:
                    parameter.add_(1.0)
        path, begin = os.path.join(folder, f"{step}.ckpt"), time.perf_counter()
        save(path, {"net": net}, incremental=incremental)
        found.append((time.perf_counter() - begin, written_mb(path)))
        if step > 0:  # as save_top_k=1 does
            shutil.rmtree(os.path.join(folder, f"{step - 1}.ckpt"))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Measure incremental saves.")
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model")
    parser.add_argument("--saves", type=int, default=9)
    parser.add_argument("--dir", default=None, help="where to save")
    options = parser.parse_args()
    net = nn.Sequential(*(Lora() for _ in range(max(int(options.gb * 1e9) // (4 * WIDTH**2), 1))))
    print("| what changes | saves | first: s | MB written | later: s (median) | MB written |")
    print("|---|---|---:|---:|---:|---:|")
    for all_change in (False, True):
        for incremental in (False, True):
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                first, *later = run(folder, net, options.saves, incremental=incremental, all_change=all_change)
            seconds, mb = (statistics.median(column) for column in zip(*later, strict=True))
            what, kind = "everything" if all_change else "adapters", "incremental" if incremental else "whole"
            print(f"| {what} | {kind} | {first[0]:.2f} | {first[1]:.0f} | {seconds:.3f} | {mb:.1f} |", flush=True)


if __name__ == "__main__":
    main()
