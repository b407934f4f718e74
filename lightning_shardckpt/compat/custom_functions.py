"""Change what autograd functions of users are called with.

Checked with torch 2.12 to 2.15. ``apply`` of an ``autograd.Function`` does not ask ``__torch_function__`` of its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NOT_OF_USERS = ("torch.", "lightning_shardckpt.")
_apply: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]  # of the bound class method


def change_arguments(change: Callable[[type, tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[], None]:
    """Let every ``Function.apply``, but those of torch and of this package, get ``change(function, args)``.

    Relies on ``apply`` being a class method of ``torch.autograd.Function``. One change at a time.

    Returns:
        What ends it.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(_NOT_OF_USERS):
            return _apply(cls, *args, **kwargs)
        return _apply(cls, *change(cls, args), **kwargs)

    _set_apply(apply)
    return lambda: _set_apply(_apply)


def _set_apply(function: Any) -> None:
    torch.autograd.Function.apply = classmethod(function)  # type: ignore[assignment,method-assign]  # as it was
