"""Run scripts of Fabric on one process, and sharded; in the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from lightning.fabric import Fabric, seed_everything
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy
from tests.sweeps.twins.fabric_scripts import SCRIPTS, Loop
from tests.sweeps.twins.run import TOPOLOGIES, Found, described


def scripts(names: Sequence[str], topology: str | None = None) -> dict[str, Found]:
    """What scripts leave; without a topology on one process, under Fabric's own strategy."""
    return {name: _run(name, topology) for name in names}


def _run(name: str, topology: str | None) -> Found:
    seed_everything(7, verbose=False)
    devices, arguments = TOPOLOGIES[topology or "one"]
    sharded = {"strategy": ShardedStrategy(**arguments, timeout_s=30), "plugins": [ShardCkptIO()]}
    fabric = Fabric(accelerator="cpu", devices=devices, precision="64-true", **(sharded if topology else {}))
    fabric.launch()
    loop = Loop(fabric)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # what scripts make by themselves
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SCRIPTS[name](loop)
            return Found(_whole(loop), loop.seen)
    except Exception as error:
        return Found({}, [], described(error))
    finally:
        torch.set_default_dtype(before)


def _whole(loop: Loop) -> dict[str, Tensor]:
    found = {}
    for owner, module in loop.modules.items():
        for name, value in module.state_dict().items():
            value = value.detach()
            found[f"{owner}.{name}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found
