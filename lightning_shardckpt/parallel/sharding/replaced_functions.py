"""Functions of torch that are replaced in this process while sharded modules are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_shardckpt.compat.dtensor import detect_local_anomalies
from lightning_shardckpt.compat.torch_autograd import (
    allow_lists_of,
    change_arguments,
    check_unused_inputs,
    on_node_hook,
)
from lightning_shardckpt.compat.torch_modules import on_deepcopy
from lightning_shardckpt.parallel.sharding.gathered_parameters import resolve_outliving
from lightning_shardckpt.parallel.sharding.replicated_gradients import average_gradients_of_copy
from lightning_shardckpt.parallel.sharding.user_hooks import refuse_node_hook
from lightning_shardckpt.parallel.tensors.derivatives import gather_arguments, refuse_unused_copies
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor

_restore: list[Callable[[], None]] = []


def replace_functions() -> None:
    """Replace functions until `restore_functions`; does nothing if they are replaced already.

    * ``autograd.Function.apply`` gathers sharded arguments.
    * ``torch.autograd.grad`` in a backward refuses gathered arguments that are unused there.
    * ``copy.deepcopy`` of a parameter makes the copy average its gradients as the original does.
    * ``detect_anomaly`` on a DTensor looks at this rank's rows.
    * Hooks of the user on autograd nodes are refused.
    * torch's optimizers and clipping choose functions of lists for sharded tensors on GPUs, as for plain ones.
    """
    if not _restore:
        _restore.extend([change_arguments(_prepare_arguments), on_deepcopy(average_gradients_of_copy)])
        _restore.append(check_unused_inputs(refuse_unused_copies))
        _restore.extend([detect_local_anomalies(), on_node_hook(refuse_node_hook), allow_lists_of(ShardedTensor)])


def restore_functions() -> None:
    """Restore torch's functions. Modules that are still sharded can then be read and saved, but not trained."""
    while _restore:
        _restore.pop()()


def _prepare_arguments(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return gather_arguments(function, tuple(map(resolve_outliving, args)))
