"""Deferred parameters after their context: functions of torch on them run inside it, so that what they do is logged.

Scripts of Fabric build a module in ``init_module(empty_init=True)`` and initialise it in place afterwards. On plain
tensors of the meta device that would have no effect, and nothing would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from lightning_shardckpt.compat.pytree import tree_leaves
from lightning_shardckpt.compat.tensor_subclass import without_torch_function
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.parallel.deferred_init.op_log import Log

Recording = Callable[[], AbstractContextManager[None]]
_PLACE = "_outside"
"""The attribute of a tensor with what records operations on it, and the log."""


def release(tensors: Iterable[Tensor], recording: Recording, log: Log) -> None:
    """Have what is done to deferred tensors from now on happen inside ``recording()``; the same for what is derived."""
    for tensor in tensors:
        tensor.__dict__[_PLACE] = recording, log
        tensor.__class__ = _OutsideParameter if isinstance(tensor, nn.Parameter) else _OutsideTensor


def take_back(tensor: Tensor) -> None:
    """Undo `release` for one tensor."""
    if isinstance(tensor, _OutsideParameter | _OutsideTensor):
        del tensor.__dict__[_PLACE]
        _make_plain(tensor)


def _make_plain(tensor: Tensor) -> None:
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


def _inside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, _OutsideParameter | _OutsideTensor)]
    with without_torch_function():
        recording, log = given[0].__dict__[_PLACE]
        for tensor in given:
            _make_plain(tensor)
        try:
            with recording():
                result = func(*args, **(kwargs or {}))
        except StateError as error:
            raise StateError(
                f"{error}. Parameters of init_module(empty_init=True) have no memory before fabric.setup: load and "
                "save after it."
            ) from None
        finally:
            release(given, recording, log)

        release([x for x in tree_leaves(result) if type(x) is Tensor and log.is_mirror(x)], recording, log)
        return result


class _OutsideTensor(Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _inside(func, args, kwargs)


class _OutsideParameter(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _inside(func, args, kwargs)
