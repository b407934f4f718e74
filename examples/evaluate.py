"""Evaluate one checkpoint of examples/train.py, and print its loss as JSON.

    python -m lightning_shardckpt follow lightning_logs/text/version_0/checkpoints -- python examples/evaluate.py {}

runs this for each checkpoint of a training, while it goes on. The checkpoints may be of any topology: this process
loads whole weights.
"""

from __future__ import annotations

import json
import sys

import torch
from text import ByteTransformer, PythonDocs
from torch import Tensor, nn

from lightning_shardckpt import load_from_checkpoint


@torch.no_grad()
def loss(model: ByteTransformer, windows: Tensor) -> float:
    """Return the mean loss of the model over windows of bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = windows.to(device)
    logits = model.to(device).eval()(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def main() -> None:
    model = load_from_checkpoint(ByteTransformer, sys.argv[1])
    print(json.dumps({"eval/loss": loss(model, PythonDocs().windows()[:64])}))


if __name__ == "__main__":
    main()
