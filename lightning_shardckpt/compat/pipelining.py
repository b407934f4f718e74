"""Names of torch.distributed below its public API for pipelined steps: collectives to replace, objects as bytes.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

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
