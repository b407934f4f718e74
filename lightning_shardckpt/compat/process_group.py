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


def abort_accelerators() -> None:
    """Abort the communicators of all process groups for the accelerator: what waits in them goes on, or fails.

    May run off the main thread, which waits in one of them. All at once, in the order of torch's own
    ``_abort_process_group``: NCCL's communicators could wait for each other. That also forgets the groups, so that the
    main thread would take itself for the only rank.

    Relies on ``torch.distributed.distributed_c10d._world.pg_names``, a dict of groups, on ``_device_types`` and
    ``_get_backend`` of a group, and on ``abort``, ``_group_start`` and ``_group_end`` of NCCL's backend.
    """
    names = dist.distributed_c10d._world.pg_names
    groups = sorted(names, key=lambda group: str(names[group]), reverse=True)
    backends = [
        group._get_backend(device) for group in groups for device in group._device_types if device.type != "cpu"
    ]
    nccl = [backend for backend in backends if backend.name() == "nccl"][:1]
    for backend in nccl:
        backend._group_start()  # type: ignore[attr-defined]  # NCCL's
    for backend in backends:
        backend.abort()
    for backend in nccl:
        backend._group_end()  # type: ignore[attr-defined]  # NCCL's
