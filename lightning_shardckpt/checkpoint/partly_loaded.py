"""Modules and optimizers whose load failed after it had changed some of their tensors: refused until a full load.

A load fills live tensors while it verifies them, so a corrupted file leaves a mix of two states. Such objects carry a
mark, which saves and training runs refuse, and hooks that refuse their use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.errors import StateError

_MARK = "_shardckpt_partly_loaded"


@dataclass(frozen=True, slots=True)
class _Mark:
    """The path of the failed load, and the hooks that refuse the object."""

    path: str
    hooks: tuple[RemovableHandle, ...] = ()


@contextmanager
def mark_partly_loaded(
    objects: Collection[nn.Module | Optimizer], path: str, is_full: bool = False
) -> Iterator[None]:
    """Mark objects as partly loaded while the block changes them; if it raises, the marks stay.

    Then hooks refuse the forward of marked modules and the step of marked optimizers.

    Args:
        objects: the modules and optimizers that the block fills.
        path: of the checkpoint.
        is_full: whether the block gives a value to every tensor, which also removes the marks of earlier failures.
    """
    new = [item for item in objects if _mark_of(item) is None]
    for item in new:
        object.__setattr__(item, _MARK, _Mark(path))
    try:
        yield
    except BaseException:
        for item in new:
            object.__setattr__(item, _MARK, _Mark(path, tuple(_refuse_use(item, path))))
        raise
    for item in objects if is_full else new:
        for hook in vars(item)[_MARK].hooks:
            hook.remove()
        object.__delattr__(item, _MARK)


def is_partly_loaded(item: nn.Module | Optimizer) -> bool:
    """Return True if a load of the object has failed after it changed some tensors, and no full load came since."""
    return _mark_of(item) is not None


def check_loaded(objects: Iterable[nn.Module | Optimizer]) -> None:
    """Refuse objects that are partly loaded.

    Raises:
        StateError: naming the class of the object and the path of the failed load.
    """
    for item in objects:
        mark = _mark_of(item)
        if mark is not None:
            raise _refusal(item, mark.path)


def _mark_of(item: nn.Module | Optimizer) -> _Mark | None:
    mark = vars(item).get(_MARK)
    return mark if isinstance(mark, _Mark) else None


def _refusal(item: nn.Module | Optimizer, path: str) -> StateError:
    return StateError(
        f"loading {path!r} failed after some tensors of {type(item).__name__} were filled. They are a mix of two "
        "states, which cannot be used or saved. Load another checkpoint that has all its tensors, or create a new "
        "object."
    )


def _refuse_use(item: nn.Module | Optimizer, path: str) -> Iterator[RemovableHandle]:
    """Yield the handles of hooks that refuse each forward of a module, or each step of an optimizer."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise _refusal(item, path)

    if isinstance(item, Optimizer):
        yield item.register_step_pre_hook(refuse)
        return
    for part in item.modules():
        yield part.register_forward_pre_hook(refuse)
