"""Evaluate each checkpoint of a running training as soon as it is complete, in another process.

    python examples/train.py fit --config configs/transformer.yaml --config configs/fsdp2_tp2.yaml
    python examples/evaluate.py lightning_logs/text/version_0/checkpoints --until 240  # in another shell

The checkpoints may be of any topology: this process loads whole weights. It ends with the checkpoint of step
``--until``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from text import ByteTransformer, PythonDocs
from torch import Tensor, nn

from lightning_shardckpt import load_from_checkpoint, metadata
from lightning_shardckpt.errors import CheckpointNotFoundError


def complete(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by their steps, without those that are being written or deleted."""
    found = {}
    for path in folder.glob("*.ckpt"):
        try:
            found[metadata(path).step or 0] = path
        except CheckpointNotFoundError:
            continue
    return found


@torch.no_grad()
def loss(model: ByteTransformer, windows: Tensor) -> float:
    """Return the mean loss of the model over windows of bytes."""
    logits = model.eval()(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=int, required=True, help="the last step of the training")
    args = parser.parse_args()
    windows = PythonDocs().windows()[:64]
    evaluated: set[int] = set()
    while args.until not in evaluated:
        for step, path in sorted(complete(args.folder).items()):
            if step in evaluated:
                continue
            try:
                model = load_from_checkpoint(ByteTransformer, path)
            except CheckpointNotFoundError:  # save_top_k has deleted it
                continue
            print(f"step {step}: loss {loss(model, windows):.6f}", flush=True)
            evaluated.add(step)
        time.sleep(0 if args.until in evaluated else 5)


if __name__ == "__main__":
    main()
