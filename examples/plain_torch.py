"""Plain torch without Trainer or Fabric: train some steps, save, and continue on any number of processes.

    python examples/plain_torch.py --steps 10
    torchrun --nproc-per-node 2 examples/plain_torch.py --steps 20
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_shardckpt import load, save_async


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10, help="train up to this step")
    parser.add_argument("--checkpoint", default="checkpoints/plain-torch")
    args = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    if world > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if os.path.exists(args.checkpoint):
        load(args.checkpoint, state)
        if rank == 0:
            print(f"continuing after step {state['step']} on {world} process(es)")

    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    mine = data[rank::world]
    for step in range(state["step"], args.steps):
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
    save_async(args.checkpoint, state, overwrite=True)  # the process does not end before it is written
    if rank == 0:
        print(f"step {state['step']}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
