"""Optimizers that were built before the module was sharded, or for a stage without parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_autograd import change_parameters
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from lightning_shardckpt.parallel.pipeline.stage_optimizer import show_all_stages, user_code
from lightning_shardckpt.parallel.shard_model import ShardedModule


def rebind_optimizer(optimizer: Optimizer, module: ShardedModule) -> None:
    """Replace the old parameters of an optimizer, and the keys of its state, by the sharded module's parameters.

    Raises:
        UnsupportedCodeError: if the optimizer has a parameter that was never in the module.
    """
    current = dict[Tensor, Tensor]((*module.replaced.items(), *module.elsewhere.items()))
    live = {*current.values(), *module.gradients.adopted}
    for index, group in enumerate(optimizer.param_groups):
        with user_code():  # it may have been rebound before
            params = [p for p in group["params"] if not isinstance(p, _Dummy)]
        unknown = [p for p in params if p not in live and p not in current]
        if unknown:
            raise UnsupportedCodeError(
                f"param group {index} of {type(optimizer).__name__} holds {len(unknown)} parameters that are not in "
                f"the module (first shape: {tuple(unknown[0].shape)}). Build the optimizer from the module's "
                "parameters: in configure_optimizers, from self.parameters()."
            )
        group["params"] = [current.get(p, p) for p in params]
    for old, new in current.items():
        if new is not old and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
    for placeholder in [p for p in optimizer.state if isinstance(p, Placeholder)]:
        del optimizer.state[placeholder]
    if module.pipeline is not None:
        show_all_stages(optimizer)


@contextmanager
def allow_empty_optimizers() -> Iterator[None]:
    """Inside, an optimizer may be built with an empty list of parameters, which torch refuses.

    The optimizer gets a dummy parameter, which `rebind_optimizer` removes.
    """

    def add_dummy(params: Any) -> Any:
        return params if isinstance(params, Tensor | dict) else list(params) or [_Dummy(torch.empty(0), False)]

    with change_parameters(add_dummy):
        yield


class _Dummy(nn.Parameter):
    """The parameter of an empty optimizer."""
