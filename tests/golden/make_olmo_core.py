"""Make ``olmo-core-3.0.zip``: directories that OLMo-core itself writes, and what should be found in them.

Run once, beside the package, where ``ai2-olmo-core==3.0.0`` and torch 2.13 are installed: ``python make_olmo_core.py``.
Like the other files here it is never made again; it fails where one is. Two ranks, FSDP2, a model with rows that two
ranks cannot share evenly, and two param groups; nested and flattened optimizer state. Packed, since most of the 180 KB
are zeros between records.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

TARGET = Path(__file__).parent / "olmo-core-3.0.zip"


class Net(nn.Module):
    """As in ``tests/ranks/sources/test_olmo_core.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def make(rank: int, folder: str) -> None:
    olmo: Any = importlib.import_module("olmo_core.distributed.checkpoint")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = Net()
    fully_shard(net, mesh=dist.init_device_mesh("cpu", (2,)))
    groups = [{"params": [net.head.bias], "weight_decay": 0.0}, {"params": [net.embed.weight, net.head.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(2):
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, flat in (("step2", False), ("step2-flat", True)):
        olmo.save_model_and_optim_state(
            f"{folder}/made/{name}/model_and_optim", net, optimizer, flatten_optimizer_state=flat, thread_count=1
        )
    tensors = {f"model/{name}": full(tensor) for name, tensor in net.state_dict().items()}
    for name, param in net.named_parameters():
        tensors |= {f"optimizer/{name}/{key}": full(value) for key, value in optimizer.state[param].items()}
    if rank == 0:
        safetensors.torch.save_file(tensors, f"{folder}/made/expected.safetensors")
        names = {id(param): name for name, param in net.named_parameters()}
        found = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        Path(folder, "made", "expected.json").write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(TARGET, "x", zipfile.ZIP_DEFLATED) as archive:
        mp.spawn(make, (folder,), 2)
        made = Path(folder, "made")
        for path in sorted(p for p in made.rglob("*") if p.is_file()):
            archive.write(path, path.relative_to(made))
