"""Operations of torch below the public API: a dispatch mode, schemas, and the identity of memory.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Overload: TypeAlias = torch._ops.OpOverload[..., Any]
"""One operator as a dispatch mode gets it, such as ``torch.ops.aten.add.Tensor``."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that gets every operation of this thread in ``__torch_dispatch__``, without importing torch.compile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch._dynamo: a second, and 60 MB


@contextmanager
def below_modes() -> Iterator[None]:
    """Inside, operations reach no mode and no subclass, and record no history."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def dispatches(kind: type[Any]) -> bool:
    """Return whether tensors of this class handle operations themselves, as a DTensor does and a Parameter doesn't."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def written_arguments(func: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, by its schema; None for those that are not given."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    return [
        given.get(argument.name, given.get(position))
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def is_in_place(func: Overload) -> bool:
    """Return whether an operator changes its first argument and returns it."""
    return func._schema.name.endswith("_")


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that all tensors over a storage share, also on the meta device; unique while weakly held."""
    return int(storage._cdata)


def alive(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if something still holds it."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found
