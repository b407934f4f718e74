"""Fabric: train some steps on any mix of parallelisms, save, and continue on another one.

    python examples/with_fabric.py --steps 10 --devices 2
    python examples/with_fabric.py --steps 20 --devices 2 --pipeline 2
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy


class Mlp(nn.Module):
    """Returns its loss, which is what a pipeline needs: a step is a function of the batch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.down = nn.Linear(width, 1)

    def forward(self, batch: list[Tensor]) -> Tensor:
        x = self.up(batch[0])
        for layer in self.layers:
            x = x + layer(x).tanh()
        return nn.functional.mse_loss(self.down(x), batch[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="train up to this step")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1, help="stages")
    parser.add_argument("--checkpoint", default="checkpoints/fabric")
    args = parser.parse_args()
    strategy = ShardedStrategy(pipeline_parallel_size=args.pipeline)
    io = ShardCkptIO(use_async=True)
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=strategy, plugins=[io])
    fabric.launch()

    fabric.seed_everything(1, verbose=False)
    with fabric.init_module(empty_init=True):  # no memory until each rank knows its slices
        model = Mlp()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if os.path.exists(args.checkpoint):
        fabric.load(args.checkpoint, state)
        fabric.print(f"continuing after step {state['step']} on {strategy.topology}")

    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(data, data.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16 // strategy.topology.data_parallel))
    while state["step"] < args.steps:
        for batch in loader:
            loss = strategy.run_step(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        state["step"] += 1
    fabric.save(args.checkpoint, state)  # the process does not end before it is written
    fabric.print(f"step {state['step']}: loss {fabric.all_reduce(loss.detach()).item():.6f}")


if __name__ == "__main__":
    main()
