"""Private names of tensors: dispatch, parameters, hooks, versions, schemas, memory, files, and trees of them.

Checked with torch 2.12 to 2.15. DTensor, whose import is slow, has its own module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec as TreeSpec

# ── functions and hooks ───────────────────────────────────────────────────────────────────────────────────────────────


L = TypeVar("L", bound=Tensor)
T = TypeVar("T")

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context that disables ``__torch_function__`` of subclasses in this thread, so that they act as Tensors."""

with_torch_function = torch._C._EnableTorchFunction
"""A context that enables ``__torch_function__`` again inside of `without_torch_function`."""

NO_TORCH_FUNCTION: Any = nn.Parameter.__torch_function__
"""The ``__torch_function__`` of a class whose functions act as on Tensors, and return Tensors."""


def mark_as_parameter(tensor: Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor of another class."""
    tensor._is_param = True


def gradient_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """Return the hooks of ``register_hook`` by id of their handle, in the dict that the handles use; or None."""
    return leaf._backward_hooks


def accumulation_hooks(leaf: Tensor) -> dict[int, Any] | None:
    """Return the hooks of ``register_post_accumulate_grad_hook``, like `gradient_hooks`."""
    return leaf._post_accumulate_grad_hooks


def with_hooks(leaves: Iterable[L]) -> list[L]:
    """Return the leaves that have hooks of either kind. Fast, since it is called several times in a step."""
    with without_torch_function():
        return [leaf for leaf in leaves if leaf._backward_hooks or leaf._post_accumulate_grad_hooks]


def set_gradient_hooks(leaf: Tensor, hooks: dict[int, Any]) -> None:
    """Set the gradient hooks of a leaf to a dict that another tensor's handles may share."""
    leaf._backward_hooks = hooks


def set_accumulation_hooks(leaf: Tensor, hooks: dict[int, Any]) -> None:
    """Set the post-accumulate-grad hooks of a leaf, like `set_gradient_hooks`."""
    leaf._post_accumulate_grad_hooks = hooks


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor: its in-place changes, also by views, but not by ``data``."""
    return tensor._version if type(tensor) is Tensor else versions_of([tensor])[0]


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the versions of several tensors, as `version_of`."""
    with without_torch_function():
        return [tensor._version for tensor in tensors]


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which changes of ``tensor`` do not increase its version, which autograd checks."""
    return _unsafe_preserve_version_counter(tensor)


def in_functional_transform() -> bool:
    """Return whether a transform of ``torch.func``, such as ``vmap``, is active, which hides subclasses."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def memory_id(tensor: Tensor) -> int:
    """Return an id of a plain strided tensor's storage, also on the meta device; unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def shares_memory(tensor: Tensor) -> bool:
    """Return whether other tensors share its memory: views, also of inference mode, ``data`` and ``detach()``."""
    return tensor._base is not None or storage_uses(tensor.untyped_storage()) > 2  # the tensor and this object


def viewed_tensor(view: Tensor) -> Tensor | None:
    """Return the tensor of which another is a view for autograd; None for other tensors."""
    return view._base


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors over a storage, and of storage objects."""
    return int(torch._C._storage_Use_Count(storage._cdata))


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import torch.compile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch._dynamo: a second, and 60 MB


class copies_are_views(DispatchMode):  # type: ignore[no-untyped-call]  # a context, as torch.no_grad
    """Makes clones views, so that a result on the meta device tells the tensor and the part of it that it copies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


without_modes = _disable_current_modes
"""A context without dispatch modes, such as that of selective checkpointing, which keeps results in order."""


@contextmanager
def below_functions() -> Iterator[None]:
    """Inside, no ``__torch_function__`` of modes and subclasses is called, and no autograd history is recorded."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def dispatches(kind: type[Any]) -> bool:
    """Return whether a tensor class has a ``__torch_dispatch__``, like DTensor and unlike Parameter."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, from its schema; None for omitted arguments."""
    passed: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    return [
        passed.get(argument.name, passed.get(position))
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def fake_tensors() -> Callable[[Sequence[int], torch.dtype], Tensor]:
    """Return a function that makes contiguous tensors of the CPU without memory.

    Under ``torch.serialization.skip_data(materialize_fake_tensors=True)``, ``torch.save`` writes them as real ones, and
    leaves room for their bytes. The first call takes a second.
    """
    from torch._subclasses import fake_tensor

    mode, cpu = fake_tensor.FakeTensorMode(), torch.device("cpu")

    def make(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return fake_tensor.FakeTensor(mode, meta, cpu)  # four times as fast as torch.empty in the mode

    return make


# ``torch.utils._pytree`` has no public name. Any object but nested lists, tuples, dicts, named tuples and registered
# classes is a leaf, ``None`` included; transformers registers its outputs and caches. A user's dataclass with tensors
# is registered when it is first flattened, and is a leaf of other functions until then.

tree_leaves, tree_map, tree_unflatten = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_unflatten
_registered: set[type] = set()


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of nested containers, and their structure."""
    leaves, spec = _pytree.tree_flatten(tree)
    new = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(type(leaf)) and _holds_tensors(leaf)}
    for kind in new:
        _register(kind)
    return tree_flatten(tree) if new else (leaves, spec)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of a call's arguments, as of ``tree_flatten((args, kwargs))``, and a key of their structure."""
    leaves = [*args, *kwargs.values()]
    if all(isinstance(leaf, Tensor) or type(leaf) in (int, float, str, bool, type(None)) for leaf in leaves):
        return leaves, (len(args), *kwargs)
    return tree_flatten((tuple(args), dict(kwargs)))


def _holds_tensors(leaf: Any) -> bool:
    if type(leaf).__module__.startswith(("lightning_shardckpt.", "torch.")):
        return False
    values = [getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    return any(isinstance(value, Tensor) for value in tree_flatten(values)[0])


def _register(kind: type) -> None:
    if kind in _registered:  # by the check of a dataclass that contains it
        return
    _registered.add(kind)
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def unflatten(values: Any, context: None) -> Any:
        new: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # it may be frozen
        return new

    _pytree.register_pytree_node(kind, flatten, unflatten)


def map_tensors(change: Callable[[Tensor], Tensor], tree: T) -> T:
    """Return ``tree`` with every tensor in it replaced by the result of ``change``; itself if none changed."""
    if isinstance(tree, Tensor):
        return change(tree)  # type: ignore[return-value]  # a tensor, too
    leaves, spec = _pytree.tree_flatten(tree)
    changed = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return tree if is_same else tree_unflatten(changed, spec)
