"""Optimizers of a sharded module: its parameters take the place of those before sharding.

In a pipeline an optimizer steps this stage's parameters, and shows all stages' to user code: there, param groups have
the parameters of the whole module, in its order. The optimizer's state covers only this stage's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from lightning_shardckpt.parallel.shard_model import ShardedModule


def rebind_optimizer(optimizer: Optimizer, *modules: ShardedModule) -> None:
    """Replace the old parameters of an optimizer, and the keys of its state, by those of sharded modules.

    Raises:
        UnsupportedCodeError: if the optimizer has a parameter that was never in a module.
    """
    current = {old: new for module in modules for old, new in module.current.items()}
    live = {*current.values(), *(adopted for module in modules for adopted in module.gradients.adopted)}
    for index, group in enumerate(optimizer.param_groups):
        with user_code():  # it may have been rebound before
            params = list(group["params"])
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
    if any(module.pipeline is not None for module in modules):
        show_all_stages(optimizer)


# ── stages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_IN_USER_CODE: ContextVar[bool] = ContextVar("_IN_USER_CODE", default=False)


class user_code:  # a class, since it is entered dozens of times in a step
    """A context in which param groups show the parameters of all stages; of this stage only, if not ``is_run``."""

    __slots__ = ("_is_run", "_token")

    def __init__(self, is_run: bool = True) -> None:
        self._is_run = is_run

    def __enter__(self) -> None:
        self._token = _IN_USER_CODE.set(self._is_run)

    def __exit__(self, *error: object) -> None:
        _IN_USER_CODE.reset(self._token)


class GroupParameters(list[Tensor]):
    """The parameters of this stage in a param group; in user code also placeholders for the others, in order.

    The list itself has those of this stage, for C++ code of torch, which reads it without ``__iter__``.
    """

    def __init__(self, whole: Sequence[Tensor]) -> None:
        super().__init__(tensor for tensor in whole if not isinstance(tensor, Placeholder))
        self._whole = list(whole)

    def _visible(self) -> Sequence[Tensor]:
        if not _IN_USER_CODE.get():
            return list(super().__iter__())
        own = set(map(id, super().__iter__()))  # user code may have added or removed parameters
        visible = [tensor for tensor in self._whole if isinstance(tensor, Placeholder) or id(tensor) in own]
        ids = set(map(id, visible))
        return [*visible, *(tensor for tensor in super().__iter__() if id(tensor) not in ids)]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._visible())

    def __len__(self) -> int:
        return len(self._visible()) if _IN_USER_CODE.get() else super().__len__()

    def __reversed__(self) -> Iterator[Tensor]:
        return reversed(self._visible())

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]

    def copy(self) -> list[Tensor]:
        return list(self._visible())

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Tensor]:
        return [deepcopy(parameter, memo) for parameter in super().__iter__()]

    def __getitem__(self, index: Any) -> Any:
        return self._visible()[index] if _IN_USER_CODE.get() else super().__getitem__(index)


def show_all_stages(optimizer: Optimizer) -> None:
    """Make an optimizer of the whole module's parameters step with this stage's, and show user code all.

    Also replaces ``add_param_group`` and torch's ``zero_grad``.
    """
    add = type(optimizer).add_param_group

    def zero_grad(set_to_none: bool = True) -> None:
        with user_code(False):
            Optimizer.zero_grad(optimizer, set_to_none)
        for group in optimizer.param_groups if set_to_none else ():
            for tensor in group["params"]:
                if isinstance(tensor, Placeholder):
                    tensor.set_gradient(False)

    def add_param_group(group: dict[str, Any]) -> None:
        params = group["params"]
        whole = [params] if isinstance(params, Tensor) else list(params)
        with user_code(False):
            add(optimizer, {**group, "params": [tensor for tensor in whole if not isinstance(tensor, Placeholder)]})
        optimizer.param_groups[-1]["params"] = GroupParameters(whole)

    for group in optimizer.param_groups:
        group["params"] = GroupParameters(group["params"])
    optimizer.__dict__["add_param_group"] = add_param_group
    if type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
        optimizer.__dict__["zero_grad"] = zero_grad
