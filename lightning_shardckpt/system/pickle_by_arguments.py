"""Pickle and copy objects as their constructor arguments, since the state of a run belongs to its process."""

from __future__ import annotations

from functools import partial
from typing import Any, Self


class PickleByArguments:
    """Base class whose copies and pickles repeat the constructor call, without attributes that changed later."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments."""
        self = super().__new__(cls)
        self.__dict__["_arguments"] = args, kwargs
        return self

    def __reduce__(self) -> Any:
        """Return the constructor call."""
        args, kwargs = self._arguments
        return partial(type(self), *args, **kwargs), ()
