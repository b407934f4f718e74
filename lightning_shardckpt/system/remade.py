"""Objects that pickle as the arguments that they were made with: what they keep of a run belongs to its process."""

from __future__ import annotations

from functools import partial
from typing import Any, Self


class Remade:
    """Copies and pickles are what the same call of the class makes, with nothing of a run, and no later change."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments."""
        made = super().__new__(cls)
        made.__dict__["_arguments"] = args, kwargs
        return made

    def __reduce__(self) -> Any:
        """Return the call."""
        args, kwargs = self._arguments
        return partial(type(self), *args, **kwargs), ()
