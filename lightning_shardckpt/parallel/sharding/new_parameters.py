"""Parameters that a module gets after it was sharded: heads that are added, weights that are assigned.

They stay whole on every rank. What they need is that their gradients are averaged, as those of all others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.torch_modules import parameter_slots, set_frame_callback
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import where_is

Adopt = Callable[[Sequence[nn.Parameter]], None]


def watch_for_new_parameters(root: nn.Module, adopt: Adopt) -> list[RemovableHandle]:
    """Call a method with the plain parameters that modules inside ``root`` get from now on.

    Args:
        root: sharded.
        adopt: a bound method; the watch ends with its object.

    Returns:
        What ends it before.
    """
    known, told = WeakSet(root.modules()), WeakMethod(adopt)

    def is_known(module: nn.Module) -> bool:
        compiler = set_frame_callback(None)  # torch.compile cannot trace a WeakSet
        try:
            return module in known
        finally:
            set_frame_callback(compiler)

    def on_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if type(parameter) is nn.Parameter and is_known(module) and (call := told()) is not None:
            _refuse_whole(module, name)
            call([parameter])

    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and is_known(module) and (call := told()) is not None:
            known.update(child.modules())
            call([p for p in child.parameters() if type(p) is nn.Parameter])

    return [
        register_module_parameter_registration_hook(on_parameter),
        register_module_module_registration_hook(on_module),
    ]


def _refuse_whole(module: nn.Module, name: str) -> None:
    """Raise where a whole parameter is to take the place of one that tensor parallelism shards."""
    present: Any = parameter_slots(module).get(name)
    if isinstance(present, ShardedTensor) and where_is(present).model_mesh is not None:
        raise UnsupportedCodeError(
            f"{name} of {type(module).__name__}, which tensor_parallel_plan shards, was assigned a whole parameter. "
            "Copy the values into the one that is there (load_state_dict without assign=True, weight.data.copy_), or "
            "leave the module out of the plan."
        )
