"""Process groups by the names that torch gives them, and their backends. Checked with torch 2.12 to 2.15."""

from __future__ import annotations

import torch
import torch.distributed as dist


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group whose ``group_name`` this is: a name can be pickled and compared, a group cannot.

    Relies on ``torch.distributed.distributed_c10d._resolve_process_group``, which takes a str.
    """
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that a group has for tensors of a device, such as ``gloo`` or ``nccl``; None without one.

    Relies on ``ProcessGroup._get_backend``, which raises RuntimeError for a device that the group does not serve.
    """
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return None
