"""Lightning Fabric: how it starts processes, makes their group, reduces, and guards the backward.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric import wrappers
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.optim import Optimizer


class FabricScriptLauncher(_SubprocessScriptLauncher):
    """The launcher that starts the same script once for each local process; its methods are those of ``_Launcher``."""


def init_process_group(
    environment: ClusterEnvironment, device: torch.device, *, backend: str | None, timeout_s: float
) -> str:
    """Make the default process group, where there is none yet, and return its backend. Collective over the world.

    Leaves no ``MASTER_PORT`` in the environment: a program that this process starts would take the port for that of its
    own ranks, while this process still listens there.

    Args:
        environment: knows address, rank and world size.
        device: of this process.
        backend: of torch.distributed; by default Lightning's for the device, and gloo for tensors of the CPU.
        timeout_s: of collectives.
    """
    chosen: str = backend or dist.get_default_backend_for_device(device)
    if backend is None and chosen == "nccl":
        chosen = f"cpu:gloo,{device.type}:nccl"
    if dist.is_initialized():
        return chosen
    address = environment.main_address
    host = f"[{address}]" if ":" in address else address
    dist.init_process_group(
        chosen,
        init_method=f"tcp://{host}:{environment.main_port}",
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    if chosen.rpartition(":")[2] == "nccl":
        atexit.register(_destroy_process_group)
    return chosen


def _destroy_process_group() -> None:
    """Destroy NCCL's groups when the process ends, of which torch warns otherwise; Ctrl-C does not interrupt it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    if dist.is_initialized():
        dist.destroy_process_group()
    signal.signal(signal.SIGINT, before)


def reduced(tensor: Tensor, group: dist.ProcessGroup, reduce_op: dist.ReduceOp | str | None) -> Tensor:
    """Return a tensor reduced over a group, in its own memory, as Lightning spells operations: "mean" for None.

    A mean of integers is not rounded down, as Lightning's own is: it divides epochs' sums by mean numbers of samples.

    Collective: every rank of ``group`` must call it.
    """
    is_mean = reduce_op in (None, "mean", "avg")
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    total = tensor.to(torch.int64, copy=True) if is_mean and is_integer else tensor
    op = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) and not is_mean else reduce_op
    dist.all_reduce(total, op=dist.ReduceOp.SUM if is_mean else op, group=group)
    if not is_mean:
        return total
    if not is_integer:
        return total.div_(dist.get_world_size(group))
    mean = total / dist.get_world_size(group)
    return mean.to(tensor.dtype) if bool((mean == mean.floor()).all()) else mean


def optimizer_to_device(optimizer: Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer to a device, but for ``step``, which optimizers keep on the CPU."""
    for parameter, values in optimizer.state.items():
        if isinstance(values, MutableMapping):
            values.update({k: move_data_to_device(v, device) for k, v in values.items() if k != "step"})
        else:  # of an optimizer that is not torch's
            optimizer.state[parameter] = move_data_to_device(values, device)


@contextmanager
def backward_allowed() -> Generator[None, None, None]:
    """Allow backward passes in this context, which Fabric refuses outside ``fabric.backward``.

    Relies on the flag ``_in_fabric_backward`` of ``lightning.fabric.wrappers``, which its backward hooks look at.
    """
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before
