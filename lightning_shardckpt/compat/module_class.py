"""Change what live modules, and the classes of modules and parameters, do: mixed-in classes, hooks, constructors.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn


def mix_in(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put ``mixin`` in front of the class of one module, as FSDP does; its name and its module stay.

    Relies on ``__class__`` being assignable for classes of the same memory layout.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def mix_out(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Undo `mix_in`, if nothing was mixed in after it."""
    first, *rest = type(module).__bases__
    if first is mixin:
        (module.__class__,) = rest


def intercept_calls(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let a call of one module be ``call(original, *args, **kwargs)``, with hooks inside. Its class stays.

    Copies of the module are without it.

    Relies on ``nn.Module.__call__`` asking the instance for ``_compiled_call_impl``, which ``module.compile`` sets; a
    class with a ``__call__`` of its own gets another class in its place.
    """
    if type(module).__call__ is nn.Module.__call__:
        original = module._compiled_call_impl or _OwnCall(module)
        module.__dict__["_compiled_call_impl"] = partial(call, original)
    else:
        mix_in(module, _Intercepted)
        module.__dict__["_shardckpt_call"] = call


def compiled_call(module: nn.Module) -> Any:
    """What a call of the module runs in place of its own, as ``module.compile`` and `intercept_calls` put it; or None.

    Relies on ``_compiled_call_impl``.
    """
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile`` was called; `intercept_calls` does not count, before or after it.

    Relies on ``_compiled_call_impl``.
    """
    call: Any = module._compiled_call_impl
    while isinstance(call, partial):
        call = call.args[0]
    return call is not None and not isinstance(call, _OwnCall)


class _OwnCall:
    """What a module does when it is called; does not keep it alive, as the module keeps this."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # somebody calls it
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's


class _Intercepted(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_shardckpt_call"](super().__call__, *args, **kwargs)


def withhold_state(module: nn.Module, asked: Callable[[], None] = lambda: None) -> None:
    """Let a module neither give nor take any state, and stay on its device.

    Relies on ``state_dict``, ``load_state_dict`` and ``to`` asking the instances inside for these methods.

    Args:
        asked: is called when somebody asks for the state of this module alone, not of one that it is in.
    """

    def save(destination: Any, prefix: str, keep_vars: bool) -> None:
        if not prefix:
            asked()

    module.__dict__["_save_to_state_dict"] = save
    module.__dict__["_load_from_state_dict"] = _nothing
    module.__dict__["_apply"] = _Itself(module)


def withholds_state(module: nn.Module) -> bool:
    """Return whether `withhold_state` was called for a module."""
    return isinstance(module.__dict__.get("_apply"), _Itself)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Itself:
    """Returns its module, in a copy of it the copy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module | None:
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Itself:
        module = self._module()
        assert module is not None  # it is being copied
        return _Itself(memo.get(id(module), module))


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own children by name, in order of registration, to be read and assigned."""
    return module._modules


def unregister_tensors(module: nn.Module) -> None:
    """Make parameters and buffers of a module ordinary attributes."""
    for registered in (module._parameters, module._buffers):
        for name, value in list(registered.items()):
            if value is not None:
                del registered[name]
                module.__dict__[name] = value
    module._non_persistent_buffers_set.clear()


def convert_tensors(root: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by what ``convert`` makes of it, as ``to`` does. Ties are broken."""
    root._apply(convert)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run after the module's own forward."""
    return bool(module._forward_hooks)


def result_hooks(module: nn.Module) -> frozenset[int]:
    """The ids of the handles of a module's hooks that see results or gradients: forward, backward, backward-pre."""
    return frozenset((*module._forward_hooks, *module._backward_hooks, *module._backward_pre_hooks))


def argument_hooks(module: nn.Module) -> frozenset[int]:
    """The ids of the handles of a module's hooks that see its arguments: those before its forward."""
    return frozenset(module._forward_pre_hooks)


def keep_hooks(module: nn.Module, kept: Container[int]) -> None:
    """Remove all hooks of a module but those whose handles have these ids.

    Relies on the dicts of hooks being attributes with ``_hooks`` in their names.
    """
    for name, hooks in vars(module).items():
        if name.startswith("_") and "_hooks" in name and isinstance(hooks, dict):
            for number in [number for number in hooks if number not in kept]:
                del hooks[number]


def any_global_hook() -> bool:
    """Return whether there is a hook of all modules, as ``register_module_forward_hook`` makes."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]  # torch's


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Inside, hooks of all modules don't run.

    Relies on the dicts of ``torch.nn.modules.module`` that have them.
    """
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    hooks = [getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds]
    before = [dict(of) for of in hooks]
    for of in hooks:
        of.clear()
    try:
        yield
    finally:
        for of, were in zip(hooks, before, strict=True):
            of.update(were)


def clear_hooks(module: nn.Module) -> None:
    """Remove all hooks of a module: of forward, backward and state dicts."""
    keep_hooks(module, ())


@contextmanager
def parameters_made_of(replace: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``nn.Parameter(data)`` in this thread becomes ``nn.Parameter(replace(data))``.

    Replaces ``nn.Parameter.__new__`` for all threads, and passes the others on.
    """
    own, original, thread = vars(nn.Parameter)["__new__"], nn.Parameter.__new__, threading.get_ident()

    def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        return original(cls, replace(data) if threading.get_ident() == thread else data, requires_grad)

    nn.Parameter.__new__ = new  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Parameter.__new__ = own  # type: ignore[method-assign]


@contextmanager
def after_unpickling(call: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, ``call`` gets each module that this thread makes by copy.deepcopy or unpickling, which register nothing.

    Replaces ``nn.Module.__setstate__`` for all threads, and passes the others on.
    """
    original, thread = nn.Module.__setstate__, threading.get_ident()

    def setstate(module: nn.Module, state: dict[str, Any]) -> None:
        original(module, state)  # type: ignore[no-untyped-call]
        if threading.get_ident() == thread:
            call(module)

    nn.Module.__setstate__ = setstate  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setstate__ = original  # type: ignore[method-assign]
