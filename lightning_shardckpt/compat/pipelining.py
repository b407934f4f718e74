"""Which communication of user code would hang in a pipelined step?

Stages run different parts of a step, so a collective of all processes inside one is never entered by all of them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_shardckpt.errors import TopologyError

_NAMES = [
    name
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
        *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
        *("all_gather_single", "reduce_scatter_single", "all_reduce_coalesced", "all_gather_coalesced"),
    )
    if hasattr(dist, name)
]
_POSITION = {name: list(inspect.signature(getattr(dist, name)).parameters).index("group") for name in _NAMES}


@contextmanager
def without_world_collectives() -> Iterator[None]:
    """Inside, a collective over all processes is an error in this thread; others, such as FSDP's, are not touched."""
    originals = {name: getattr(dist, name) for name in _NAMES}
    thread = threading.get_ident()
    for name, original in originals.items():
        setattr(dist, name, _guarded(name, original, thread))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _guarded(name: str, original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    position = _POSITION[name]

    def guarded(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        if (group is None or group is dist.group.WORLD) and threading.get_ident() == thread:
            raise TopologyError(
                f"torch.distributed.{name} over all processes was called inside a pipelined step. The stages run "
                "different parts of the step, so not all of them would come here. Use self.all_gather, which covers "
                "the data-parallel ranks of one stage, log with sync_dist=True, or communicate in a hook outside of "
                "the step."
            )
        return original(*args, **kwargs)

    return guarded
