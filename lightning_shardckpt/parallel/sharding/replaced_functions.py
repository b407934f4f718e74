"""Functions of torch that are replaced in the process while sharded modules are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_shardckpt.compat.dtensor import look_for_anomalies_in_rows
from lightning_shardckpt.compat.torch_autograd import allow_lists_of, change_arguments, on_node_hook
from lightning_shardckpt.compat.torch_modules import on_deepcopy
from lightning_shardckpt.parallel.sharding.gathered_parameters import sharded_for
from lightning_shardckpt.parallel.sharding.replicated_gradients import average_copy
from lightning_shardckpt.parallel.sharding.user_hooks import refuse_node_hook
from lightning_shardckpt.parallel.tensors.derivatives import gather_arguments
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor

_put_back: list[Callable[[], None]] = []
_watchers: list[Callable[[type, tuple[Any, ...]], None]] = []


def replace_functions() -> None:
    """Replace them until `put_back_functions`; does nothing if they are replaced already.

    * ``autograd.Function.apply``: custom functions get whole tensors for sharded ones;
    * ``copy.deepcopy`` of a parameter: gradients of the copy are averaged as those of the original;
    * ``detect_anomaly`` on a DTensor: looks at this rank's rows;
    * hooks on nodes of autograd's graph are refused;
    * torch's optimizers and clipping take sharded tensors by lists on GPUs, as they take plain ones.
    """
    if not _put_back:
        _put_back.extend([change_arguments(_whole_arguments), on_deepcopy(average_copy), look_for_anomalies_in_rows()])
        _put_back.extend([on_node_hook(refuse_node_hook), allow_lists_of(ShardedTensor)])


def put_back_functions() -> None:
    """Put torch's own functions back. Modules that are still sharded can be read and saved, not trained, after it."""
    while _put_back:
        _put_back.pop()()


@contextmanager
def watched_functions(watch: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, ``watch`` gets each custom function that is applied, and its arguments; it may apply functions itself."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def _whole_arguments(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    args = gather_arguments(function, tuple(map(sharded_for, args)))
    if _watchers:
        watch = _watchers.pop()
        try:
            watch(function, args)
        finally:
            _watchers.append(watch)
    return args
