"""Names below the public API for tensor subclasses: dispatch, parameters, hooks, versions, schemas, memory and files.

Checked with torch 2.12 to 2.15. DTensor, which takes long to import, has a module of its own."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# ── functions and hooks ───────────────────────────────────────────────────────────────────────────────────────────────


L = TypeVar("L", bound=Tensor)

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which ``__torch_function__`` of subclasses is not called in this thread: they act as Tensors."""

with_torch_function = torch._C._EnableTorchFunction
"""A context inside of `without_torch_function` in which ``__torch_function__`` is called again."""

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a class: functions act as on Tensors, and return those."""


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, and any other tensor itself; without importing DTensor, which takes long."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def mark_as_parameter(tensor: Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor of another class."""
    tensor._is_param = True


def is_marked_as_parameter(tensor: Tensor) -> bool:
    """Return whether `mark_as_parameter` was called for this tensor."""
    return getattr(tensor, "_is_param", False)


def gradient_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """The hooks of ``register_hook``, by id of their handle, in the dict that the handles remove them from; or None."""
    return leaf._backward_hooks


def accumulation_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """Return the hooks of ``register_post_accumulate_grad_hook``, like `gradient_hooks`."""
    found: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    return found


def with_hooks(leaves: Iterable[L]) -> list[L]:
    """Return the leaves that have hooks of either kind. Fast, as it is asked several times in a step."""
    with without_torch_function():
        return [leaf for leaf in leaves if leaf._backward_hooks or leaf._post_accumulate_grad_hooks]


@contextmanager
def watched_hooks(
    hooked: Callable[..., None], retained: Callable[[Tensor], None], packed: Callable[[saved_tensors_hooks], None]
) -> Iterator[None]:
    """Inside, what this thread is going to do with hooks of tensors is told before.

    ``hooked`` gets the arguments of ``Tensor.register_hook`` and ``register_post_accumulate_grad_hook``, ``retained``
    the tensors of which ``retain_grad`` is called, and ``packed`` the contexts of ``saved_tensors_hooks`` that are
    entered. Replaces these methods for all threads, and passes the others on.
    """
    thread = threading.get_ident()

    def watched(method: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                check(self, *args, **kwargs)
            return method(self, *args, **kwargs)

        return call

    watchers: list[tuple[Any, str, Callable[..., None]]] = [
        (Tensor, "register_hook", hooked),
        (Tensor, "register_post_accumulate_grad_hook", hooked),
        (Tensor, "retain_grad", retained),
        (saved_tensors_hooks, "__enter__", packed),
    ]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in watchers]
    for owner, name, check in watchers:
        setattr(owner, name, watched(getattr(owner, name), check))
    try:
        yield
    finally:
        for owner, name, method in before:
            if method is None:  # torch's own is that of a base
                delattr(owner, name)
            else:
                setattr(owner, name, method)


def set_gradient_hooks(leaf: Tensor, hooks: dict[int, Any]) -> None:
    """Let a leaf have these hooks of gradients; handles of another tensor's remove them from here, too."""
    leaf._backward_hooks = hooks


def set_accumulation_hooks(leaf: Tensor, hooks: dict[int, Any]) -> None:
    """Let a leaf have these hooks that run after a gradient was accumulated, like `set_gradient_hooks`."""
    leaf._post_accumulate_grad_hooks = hooks


def version_of(tensor: Tensor) -> int:
    """Return how often the memory of a tensor was changed in place, by it or by a view; ``data`` counts apart."""
    if type(tensor) is Tensor:
        return tensor._version
    with without_torch_function():
        return tensor._version


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """A context whose changes of ``tensor`` do not count: autograd does not see that a saved tensor was changed."""
    return _unsafe_preserve_version_counter(tensor)


def in_functional_transform() -> bool:
    """Return whether ``torch.func.vmap``, ``grad`` or another of its transforms runs here, which hides subclasses.

    Relies on ``torch._C._functorch.peek_interpreter_stack``.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def memory_id(tensor: Tensor) -> int:
    """A number of the storage of a plain strided tensor, equal for all tensors over it, also on the meta device.

    It may be used again once the storage is freed.
    """
    return int(tensor.untyped_storage()._cdata)


def shares_memory(tensor: Tensor) -> bool:
    """Return whether other tensors have its memory: views, also those of inference mode, ``data`` and ``detach()``."""
    storage = tensor.untyped_storage()  # the tensor and this object make 2
    return tensor._base is not None or bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors there are over the memory of a plain strided tensor, and objects of its storage.

    Relies on ``torch._C._storage_Use_Count``. Equal numbers, asked for in the same way, mean that nothing was added.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── files of torch.save ───────────────────────────────────────────────────────────────────────────────────────────────


def byte_order(path: str | os.PathLike[str]) -> str | None:
    """Return the byte order that an archive of ``torch.save`` names, "little" or "big"; None if it names none.

    Relies on ``torch._C.PyTorchFileReader``, by which ``torch.load`` reads archives, odd ones included.
    """
    archive: Any = torch._C.PyTorchFileReader(os.fspath(path))  # its stub lacks half of it
    return archive.get_record("byteorder").decode() if archive.has_record("byteorder") else None


def rebuilding(
    storage: object, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype | None
) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and the arguments by which a pickle of ``torch.save`` makes a tensor of a storage.

    The function is that of ``Tensor.__reduce_ex__``, by whose name every file has it; that of dtypes which came later
    takes an untyped storage.

    Args:
        storage: stands for the storage.
        shape: of the tensor.
        stride: of the tensor, which begins with the storage.
        dtype: of an untyped storage; None for a typed one.
    """
    function: Any = torch.empty(0, dtype=dtype or torch.float32).__reduce_ex__(2)[0]  # type: ignore[no-untyped-call]
    return function, (storage, 0, shape, stride, False, OrderedDict(), *(() if dtype is None else (dtype,)))
