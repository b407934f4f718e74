"""Names of torch.distributed below its public API: collectives, groups, the store, and orders of pipelines.

Checked with torch 2.12 to 2.15. ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` are called
``all_gather_single`` and ``reduce_scatter_single`` since torch 2.13, which warns of the old names; torch 2.12 has these
alone. They are looked up at each call, so that `watched_collectives` sees it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _object_to_tensor, _tensor_to_object

# ── collectives ───────────────────────────────────────────────────────────────────────────────────────────────────────


_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_single(output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Fill ``output`` with the ``own`` of each rank in turn. Collective: every rank of ``group`` must call it.

    Args:
        output: contiguous, with as many elements as all ranks have.
        own: contiguous, of the same shape on every rank.
        group: None for the world.
        async_op: return at once.

    Returns:
        The work to wait for, with ``async_op``; else None.
    """
    return getattr(dist, _ALL_GATHER)(_bytes(output), _bytes(own), group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, all_parts: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Fill ``output`` with the ranks' sum of this rank's part. Collective: every rank of ``group`` must call it.

    Args:
        output: contiguous, of the shape of a part.
        all_parts: contiguous, the parts of all ranks in turn.
        group: None for the world.
        async_op: return at once.

    Returns:
        The work to wait for, with ``async_op``; else None.
    """
    if output.is_complex():  # which NCCL lacks
        output, all_parts = torch.view_as_real(output), torch.view_as_real(all_parts)
    return getattr(dist, _REDUCE_SCATTER)(output, all_parts, group=group, async_op=async_op)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as it travels: NCCL lacks complex and short dtypes, gloo others."""
    return tensor.view(-1).view(torch.uint8)


_COLLECTIVES = [
    name
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
        *("all_reduce_coalesced", "all_gather_coalesced"),
        *("all_gather_single", "reduce_scatter_single"),  # since torch 2.13
        *("gather_single", "gather_into_tensor"),  # since torch 2.14
    )
    if hasattr(dist, name)
]
_GROUP_POSITION = {
    name: list(inspect.signature(getattr(dist, name)).parameters).index("group") for name in _COLLECTIVES
}


@contextmanager
def watched_collectives(watch: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, call ``watch`` before every collective of this thread, with its name and its ``group`` argument.

    Replaces the functions of ``torch.distributed``. What looked them up before, such as ``from torch.distributed import
    all_reduce`` in a module imported earlier, is not seen; nor is what is below them, as FSDP's own communication.
    """
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}
    thread = threading.get_ident()
    vars(dist).update({name: _watched(name, originals[name], watch, thread) for name in _COLLECTIVES})
    try:
        yield
    finally:
        vars(dist).update(originals)


@lru_cache(maxsize=128)  # this happens several times in a step
def _watched(
    name: str, original: Callable[..., Any], watch: Callable[[str, Any], None], thread: int
) -> Callable[..., Any]:
    position = _GROUP_POSITION[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            watch(name, kwargs.get("group", args[position] if len(args) > position else None))
        return original(*args, **kwargs)

    return call


def pickled(value: Any, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bytes of an object, and how many, as ``broadcast_object_list`` sends them: tensors of uint8 and int64."""
    found: tuple[Tensor, Tensor] = _object_to_tensor(value, device, group)  # type: ignore[no-untyped-call]
    return found


def unpickled(content: Tensor, count: Tensor, group: dist.ProcessGroup) -> Any:
    """The object of `pickled`."""
    return _tensor_to_object(content, count, group)  # type: ignore[no-untyped-call]


# ── process groups ────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────────


__all__ = ["Store", "default_store", "get_if_there", "own_view", "put_bytes"]

_NO_VALUE = "?"


def default_store() -> Store:
    """The store through which the ranks of the default process group found each other; every rank reaches it.

    Relies on ``torch.distributed.distributed_c10d._get_default_store``, which raises ValueError without a group.
    """
    return dist.distributed_c10d._get_default_store()


def own_view(store: Store, prefix: str) -> Store:
    """Return the same store through a connection of its own, with a prefix before every key.

    While one thread waits with a client of a TCPStore, no other thread can use that client. Relies on ``Store.clone``,
    which torch's stub lacks.
    """
    return PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]


def put_bytes(store: Store, key: str, value: bytes) -> None:
    """Set a key to bytes, which are stored as they are; torch's stub says str."""
    store.set(key, value)  # type: ignore[arg-type]


def get_if_there(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if there is no such key, in one request; ``check`` and ``get`` take three.

    Relies on ``Store.compare_set``, which changes nothing and returns what it was told to expect where there is no such
    key, and the value where that is another one. No value may be ``?``.
    """
    found: bytes = store.compare_set(key, _NO_VALUE, _NO_VALUE)
    return None if found == _NO_VALUE.encode() else found


# ── orders of operations of pipelines ─────────────────────────────────────────────────────────────────────────────────


def torch_schedule(name: str) -> type:
    """Return the class of torch's schedule with this name, such as ``ZBVZeroBubble``; ValueError if there is none."""
    from torch.distributed.pipelining.schedules import get_schedule_class  # half a second, for pipelines alone

    found: type = get_schedule_class(name)
    return found


def has_order(schedule: type) -> bool:
    """Return whether a class is a schedule that tells its order: torch's with one stage per rank do not."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    return issubclass(schedule, PipelineScheduleMulti)


def actions_of(schedule: Any, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """Return each rank's actions as torch writes them into a CSV file, such as ``0F1``.

    Relies on ``pipeline_order``, and on what the constructor reads of stages: no module and no process group.

    Args:
        schedule: a class with an order.
        ranks: of the pipeline.
        stages_per_rank: how many parts each of them has.
        microbatches: how many a step has.

    Raises:
        ValueError: if the schedule is not defined for so many.
    """
    stage = SimpleNamespace(
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
    built = schedule([stage] * stages_per_rank, microbatches, loss_fn=lambda *_: None)
    order = built.pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
