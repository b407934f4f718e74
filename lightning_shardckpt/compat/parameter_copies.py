"""Hear of copies of parameters.

Checked with torch 2.12 to 2.15 and Python 3.11 to 3.14.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

Told = Callable[[nn.Parameter, nn.Parameter], None]
_told: list[Told] = []


def on_deepcopy(told: Told) -> Callable[[], None]:
    """Call a function with each parameter of the class ``nn.Parameter`` that is deep-copied from now on, and its copy.

    Relies on ``copy._deepcopy_dispatch``, in which a class is looked up before its ``__deepcopy__``.

    Returns:
        A function that ends it.
    """
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]  # private

    def end() -> None:
        _told.remove(told)
        if not _told:
            del dispatch[nn.Parameter]

    _told.append(told)
    dispatch[nn.Parameter] = _copied
    return end


def _copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    found: nn.Parameter = parameter.__deepcopy__(memo)  # type: ignore[no-untyped-call]  # torch's
    for told in _told:
        told(parameter, found)
    return found
