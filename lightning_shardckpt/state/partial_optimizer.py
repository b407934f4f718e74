"""Parts of an optimizer that a load leaves: hyper-parameters, state of parameters, single entries of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_shardckpt.errors import MismatchError


class Leaving:
    """The parts of one optimizer that stay as they are.

    Args:
        number: which one it is, for the names.
        parts: "optimizer" in it if the state of parameters is to be taken, "param_groups" if hyper-parameters are.
        is_skipped: tells by name what is to be left besides; a parameter that is keeps its state, too. None: nothing.
    """

    def __init__(
        self,
        number: int,
        parts: frozenset[str] = frozenset({"optimizer", "param_groups"}),
        is_skipped: Callable[[str], bool] | None = None,
    ) -> None:
        self._number, self._state, self.hyper = number, "optimizer" in parts, "param_groups" not in parts
        self._is_skipped = is_skipped

    @property
    def all(self) -> bool:
        """Whether nothing of the optimizer is taken."""
        return not self._state and self.hyper

    @property
    def has_names(self) -> bool:
        """Whether anything is left by its name. Where nothing is, as in nearly all loads, nobody need ask for each."""
        return self._is_skipped is not None

    def look_at(self, entries: Iterable[tuple[str, str]]) -> None:
        """Ask for all of these, so that it is known which patterns are the name of something."""
        for name, key in entries:
            self.entry(name, key)

    def param(self, name: str) -> bool:
        """Return whether all state of a parameter stays."""
        return not self._state or (self._is_skipped is not None and self._is_skipped(name))

    def entry(self, name: str, key: str) -> bool:
        """Return whether an entry of a parameter's state stays."""
        return self._is_skipped is not None and self._is_skipped(f"optimizer/{self._number}/{name}/{key}")

    def own(self, key: str) -> bool:
        """Return whether an entry of the state that is of no parameter stays."""
        return not self._state or self.entry("own", key)

    def setting(self, group: int, key: str) -> bool:
        """Return whether a hyper-parameter of a param group stays."""
        return self.entry(f"param_groups/{group}", key)

    def entries(self, name: str, stored: Iterable[str], live: Mapping[str, Any]) -> set[str]:
        """The stored entries of a parameter's state that stay.

        Raises:
            MismatchError: if some are to stay that are not there, beside others that are taken.
        """
        stored = {*stored}
        left = {key for key in stored if self.entry(name, key)}
        missing = sorted(left - live.keys())
        if missing and left < stored:
            raise MismatchError(
                f"optimizer {self._number}: {missing} of {name} cannot be skipped alone, since the live optimizer has "
                f"none yet: skip 'optimizer/{self._number}/{name}/*', or nothing of it"
            )
        return left
