"""Let optimizers hold the parameters of a sharded module, also those that were built before or for an empty stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_autograd import changed_parameters
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.stage_optimizer import show_all_stages, user_code
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder


def rebind_optimizer(optimizer: Optimizer, module: ShardedModule) -> None:
    """Make an optimizer that was built before the module was sharded hold the parameters that the module has now.

    Raises:
        UnsupportedCodeError: if it holds a parameter that the module never had.
    """
    known = dict[Tensor, Tensor]((*module.replaced.items(), *module.elsewhere.items()))
    live = set(known.values())
    for index, group in enumerate(optimizer.param_groups):
        with user_code():  # if it was rebound before
            given = [p for p in group["params"] if not is_placeholder(p)]
        strangers = [p for p in given if p not in live and p not in known]
        if strangers:
            raise UnsupportedCodeError(
                f"param group {index} of {type(optimizer).__name__} holds {len(strangers)} parameters that are not in "
                f"the module (first shape: {tuple(strangers[0].shape)}). Build the optimizer from the module's "
                "parameters: in configure_optimizers, from self.parameters()."
            )
        group["params"] = [known.get(p, p) for p in given]
    for old, new in known.items():
        if new is not old and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
    for placeholder in [p for p in optimizer.state if isinstance(p, Placeholder)]:
        del optimizer.state[placeholder]
    if module.pipeline is not None:
        show_all_stages(optimizer)


@contextmanager
def allow_empty_optimizers() -> Iterator[None]:
    """Inside, an optimizer may be built for a stage that has none of its parameters; torch refuses an empty list.

    It gets a placeholder, which `rebind_optimizer` removes.
    """

    def with_placeholder(params: Any) -> Any:
        return params if isinstance(params, Tensor | dict) else list(params) or [_placeholder()]

    with changed_parameters(with_placeholder):
        yield


def _placeholder() -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.__dict__["_shardckpt_placeholder"] = True
    return parameter


def is_placeholder(parameter: Tensor) -> bool:
    """Return whether a parameter stands for those that a stage does not have."""
    return "_shardckpt_placeholder" in parameter.__dict__
