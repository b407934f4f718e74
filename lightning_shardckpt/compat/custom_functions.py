"""Change what autograd functions of users are called with.

Checked with torch 2.12 to 2.15. ``apply`` of an ``autograd.Function`` does not ask ``__torch_function__`` of its
arguments. It is a class method in Python or in C, by the build of torch: both are descriptors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NOT_OF_USERS = ("torch.", "lightning_shardckpt.")
_OF_TORCH: Any = torch.autograd.Function.__dict__["apply"]


def change_arguments(change: Callable[[type, tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[], None]:
    """Let every ``Function.apply``, but those of torch and of this package, get ``change(function, args)``.

    Relies on ``apply`` being a class method of ``torch.autograd.Function``. One change at a time.

    Returns:
        What ends it.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(_NOT_OF_USERS):
            args = change(cls, args)
        return _OF_TORCH.__get__(None, cls)(*args, **kwargs)

    _set_apply(classmethod(apply))
    return lambda: _set_apply(_OF_TORCH)


def _set_apply(descriptor: Any) -> None:
    torch.autograd.Function.apply = descriptor  # type: ignore[method-assign]  # put back, or changed on purpose
