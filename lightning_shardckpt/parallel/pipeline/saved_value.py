"""One value of a module as it was: whether it is still the same object, unchanged, and how it becomes so again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state, set_generator_state


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value as it was: the object, what was inside it, and of a tensor its version and a copy.

    Tensors inside containers are not copied, since there may be many: a change of one is noticed, but not undone.
    """

    value: Any
    inside: Any = None
    copy: Tensor | None = None

    @classmethod
    def of(cls, value: Any, *, copied: bool = True) -> SavedValue:
        """Return a value as it is now; of a tensor with a copy, if ``copied``."""
        if isinstance(value, Placeholder):
            return cls(value)
        if isinstance(value, Tensor):
            return cls(value, version_of(value), value.detach().clone() if copied else None)
        if isinstance(value, GENERATORS):
            return cls(value, generator_state(value))
        if isinstance(value, np.ndarray):
            return cls(value, value.tobytes())
        if isinstance(value, list | tuple | deque):
            return cls(value, [cls.of(item, copied=False) for item in value])
        if isinstance(value, dict):
            return cls(value, {key: cls.of(item, copied=False) for key, item in value.items()})
        return cls(value, set(value) if isinstance(value, set) else None)

    def same(self, value: Any) -> bool:
        """Return whether ``value`` is this object, and unchanged."""
        if value is not self.value:
            return False
        if isinstance(value, Placeholder):  # unless it was one then, something unknown was written into it
            return self.inside is None
        if isinstance(value, Tensor):
            return bool(version_of(value) == self.inside)
        if isinstance(value, GENERATORS):
            state = generator_state(value)
            if isinstance(state, Tensor):
                return torch.equal(state, self.inside)
            return repr(state) == repr(self.inside)
        if isinstance(value, np.ndarray):
            return bool(value.tobytes() == self.inside)
        if isinstance(value, list | tuple | deque):
            return len(value) == len(self.inside) and self.begins(value)
        if isinstance(value, dict):
            return value.keys() == self.inside.keys() and all(kept.same(value[k]) for k, kept in self.inside.items())
        return not isinstance(value, set) or value == self.inside

    def begins(self, value: Any) -> bool:
        """Return whether a list begins with what was in it."""
        kept = self.inside
        return len(value) >= len(kept) and all(k.same(v) for k, v in zip(kept, value, strict=False))

    def restored(self, name: str) -> Any:
        """Return the object, with what was inside it.

        Args:
            name: of the attribute, for errors.

        Raises:
            UnsupportedCodeError: for a tensor that was changed in place and not copied.
        """
        value = self.value
        if isinstance(value, GENERATORS):
            set_generator_state(value, self.inside)
        elif isinstance(value, Placeholder) and self.copy is not None:  # something unknown was written into it
            value.become(self.copy.clone(), requires_grad=False)
        elif isinstance(value, Tensor) and self.inside is not None and version_of(value) != self.inside:
            if self.copy is None:
                raise UnsupportedCodeError(
                    f"{name}, or a tensor inside of it, is changed in place before the layers of a pipelined step. "
                    "Stages run that part several times, and cannot undo it: replace the tensor, or change it after "
                    "the layers."
                )
            with torch.no_grad():
                value.copy_(self.copy)
        elif isinstance(value, np.ndarray):
            value[...] = np.frombuffer(self.inside, value.dtype).reshape(value.shape)
        elif isinstance(value, tuple):
            for kept in self.inside:
                kept.restored(name)
        elif isinstance(value, list | deque):
            items = [kept.restored(name) for kept in self.inside]
            value.clear()
            value.extend(items)
        elif isinstance(value, dict):
            before = {key: kept.restored(name) for key, kept in self.inside.items()}
            value.clear()
            value.update(before)
        elif isinstance(value, set):
            value.clear()
            value.update(self.inside)
        return value
