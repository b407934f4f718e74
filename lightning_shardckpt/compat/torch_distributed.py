"""Private names of torch.distributed: collectives, groups, the store, and orders of pipeline schedules.

Checked with torch 2.12 to 2.15. Torch 2.13 renamed ``all_gather_into_tensor`` to ``all_gather_single``, and warns of
the old name. It is looked up at each call, so that `watch_collectives` sees the call."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore as PrefixStore
from torch.distributed.distributed_c10d import Store as Store

from lightning_shardckpt.compat.torch_modules import replace_attributes
from lightning_shardckpt.system.tensor_digest import byte_view

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def all_gather_single(output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Fill ``output`` with the ``own`` of each rank in turn. Collective: every rank of ``group`` must call it.

    Both are contiguous, and ``own`` has the same shape on every rank. Sends bytes, since NCCL and gloo do not support
    all dtypes. Returns the work to wait for, with ``async_op``; else None.
    """
    return getattr(dist, _ALL_GATHER)(byte_view(output), byte_view(own), group=group, async_op=async_op)


_GROUP_POSITION = {
    name: list(inspect.signature(getattr(dist, name)).parameters).index("group")
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
        *("all_reduce_coalesced", "all_gather_coalesced"),
        *("all_gather_single", "reduce_scatter_single"),  # since torch 2.13
        *("gather_single", "gather_into_tensor"),  # since torch 2.14
    )
    if hasattr(dist, name)
}


@contextmanager
def watch_collectives(watch: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, call ``watch`` before every collective of this thread, with its name and its ``group`` argument.

    Functions of ``torch.distributed`` that a module has imported by name before are not seen, nor is communication
    below them, such as FSDP's.
    """
    thread = threading.get_ident()

    def watched(name: str, position: int) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                watch(name, kwargs.get("group", args[position] if len(args) > position else None))
            return original(*args, **kwargs)

        return call

    undo = replace_attributes(dist, **{name: watched(name, position) for name, position in _GROUP_POSITION.items()})
    try:
        yield
    finally:
        undo()


@contextmanager
def distribute_locally() -> Iterator[None]:
    """Inside, ``distribute_tensor`` cuts each rank's own tensor, and sends nothing; for tensors equal on all ranks.

    Relies on ``placement_types`` calling ``mesh_scatter`` and ``mesh_broadcast`` by these names.
    """
    module: Any = import_module("torch.distributed.tensor.placement_types")  # its import is slow

    def scatter(output: Tensor, parts: list[Tensor], mesh: Any, mesh_dim: int = 0, **options: Any) -> None:
        if not output.is_meta:
            output.copy_(parts[mesh.get_local_rank(mesh_dim)])

    undo = replace_attributes(module, mesh_scatter=scatter, mesh_broadcast=lambda *args, **options: None)
    try:
        yield
    finally:
        undo()


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the process group of a ``group_name``, which can be pickled and compared, unlike a group."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of a group's backend for a device, such as ``gloo`` or ``nccl``; None without one."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return None


def abort_accelerators() -> None:
    """Abort the communicators of all process groups for the accelerator; waiting threads continue, or fail.

    May run off the main thread, which may wait in one of them. Aborts all in one group, in the order of torch's
    ``_abort_process_group``, since NCCL's communicators could wait for each other. torch's function also removes the
    groups, so that the main thread would consider itself the only rank.
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


def default_store() -> Store:
    """Return the store of the default process group's rendezvous, which every rank can reach."""
    group: Any = dist.group.WORLD
    return group.get_group_store()  # type: ignore[no-any-return]  # not in torch's stub


def clone_store(store: Store, prefix: str) -> Store:
    """Return the same store through another connection, with a prefix before every key.

    While a thread waits in a client of a TCPStore, no other thread can use the client.
    """
    return PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]  # not in torch's stub


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Set a key to bytes, which the store accepts although torch's stub has str."""
    store.set(key, value)  # type: ignore[arg-type]


def get_if_set(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if it is not set, in one request; ``check`` and ``get`` take three.

    Relies on ``Store.compare_set``, which returns the expected value if the key is not set, without setting it, and
    else the key's value. No value may be ``?``.
    """
    value: bytes = store.compare_set(key, "?", "?")
    return None if value == b"?" else value


def interleaved_order(
    ranks: int, stages_per_rank: int, microbatches: int
) -> list[list[tuple[Literal["forward", "backward"], int, int]]]:
    """Return torch's order of passes in ``ScheduleInterleaved1F1B``, for each rank: a kind, a stage and a microbatch.

    Has more microbatches if torch has no order for this number. Relies on ``pipeline_order``, on attributes of actions,
    and on the attributes of stages that the constructor reads.
    """
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B  # takes half a second

    stage: Any = SimpleNamespace(
        num_stages=ranks * stages_per_rank,
        group_size=ranks,
        group_rank=0,
        stage_index=0,
        is_first=False,
        is_last=False,
        has_backward=False,
        stage_index_to_group_rank=None,
        submod=nn.Identity(),
    )
    count = microbatches if microbatches < ranks else -(-microbatches // ranks) * ranks
    built = ScheduleInterleaved1F1B([stage] * stages_per_rank, count, loss_fn=lambda *_: None)
    kinds: Any = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    rows: list[Any] = [filter(None, built.pipeline_order[rank]) for rank in range(ranks)]
    return [[(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in row] for row in rows]
