"""Change what live modules do, read what is registered in them, and see through torch.compile.

Checked with torch 2.12 to 2.15 and Python 3.11 to 3.14."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

# ── calls, hooks and constructors ─────────────────────────────────────────────────────────────────────────────────────


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


def is_loading() -> bool:
    """Return whether this is called by ``load_state_dict``, as it gives a module its values.

    Relies on ``_load_from_state_dict`` doing so, which classes extend.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not nn.Module._load_from_state_dict.__code__:
        frame = frame.f_back
    return frame.f_back is not None


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


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run after the module's own forward."""
    return list(module._forward_hooks.values())


def other_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before the module's own forward, and before and after its backward."""
    return [*module._forward_pre_hooks.values(), *module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def result_hooks(module: nn.Module) -> frozenset[int]:
    """The ids of the handles of a module's hooks that see results or gradients: forward, backward, backward-pre."""
    return frozenset((*module._forward_hooks, *module._backward_hooks, *module._backward_pre_hooks))


def argument_hooks(module: nn.Module) -> frozenset[int]:
    """The ids of the handles of a module's hooks that see its arguments: those before its forward."""
    return frozenset(module._forward_pre_hooks)


def change_hooks(module: nn.Module, numbers: Container[int], change: Callable[[Any], Any]) -> None:
    """Change those hooks before and after a module's own forward whose handles have these ids."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number in [number for number in hooks if number in numbers]:
            hooks[number] = change(hooks[number])


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
    return any(_global_hooks())


def _global_hooks() -> list[dict[int, Any]]:
    """Return the dicts of ``torch.nn.modules.module`` that have the hooks of all modules."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return [getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds]


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Inside, hooks of all modules don't run."""
    hooks = _global_hooks()
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


# ── what is registered ────────────────────────────────────────────────────────────────────────────────────────────────


BatchNorm = _BatchNorm
"""What every batch norm derives from, synchronized and lazy ones included."""

NormWithStatistics = _NormBase
"""What every norm with running statistics derives from: batch and instance norms."""


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by name, in order of registration, to be read and assigned."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, in order of registration, to be read and assigned."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """The names of the module's own buffers that are not in its state dict."""
    return frozenset(module._non_persistent_buffers_set)


def refresh_flat_weights(modules: Iterable[nn.Module]) -> list[tuple[nn.RNNBase, list[Tensor | None]]]:
    """Let recurrent modules have no parameters but those of their slots: they keep them in a list besides.

    Their forward makes the list anew when it finds others in the slots, and keeps them alive with it.

    Returns:
        The recurrent ones among ``modules``, each with its list of before, for `restore_flat_weights`.
    """
    before = [(m, m.__dict__["_flat_weights"]) for m in modules if isinstance(m, nn.RNNBase)]
    for module, _ in before:
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in module._flat_weights_names]
    return before


def restore_flat_weights(before: Iterable[tuple[nn.RNNBase, list[Tensor | None]]]) -> None:
    """Undo `refresh_flat_weights`."""
    for module, weights in before:
        module.__dict__["_flat_weights"] = weights


# ── code that runs when a state dict is loaded ────────────────────────────────────────────────────────────────────────


_LIBRARIES = ("torch.", "transformers.", "peft.")


def code_before(module: nn.Module) -> set[str]:
    """Return where the functions come from that get the state dict before it is in the module, or load it themselves.

    Each is "user" or "library"; functions of torch.distributed, which only put its own shards in order, are left out.
    Those of torch, transformers (5.x) and PEFT (0.21) do something only where other names or shapes are stored than the
    module has: they make files of earlier versions fit.
    """
    found = [vars(hook).get("hook") for hook in module._load_state_dict_pre_hooks.values()]
    load = module.__dict__.get("_load_from_state_dict", type(module)._load_from_state_dict)
    return set(_origins([*found, *([] if load is nn.Module._load_from_state_dict else [load])]))


def has_code_after(module: nn.Module) -> bool:
    """Return whether hooks run when the module is loaded, other than those of torch.distributed."""
    return any(_origins(module._load_state_dict_post_hooks.values()))


def has_own_load(module: nn.Module) -> bool:
    """Return whether its class has a ``load_state_dict`` of its own, which runs where it is the root."""
    return "user" in _origins([type(module).load_state_dict])


def _origins(functions: Any) -> Iterator[str]:
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        package = getattr(function, "__module__", None) or type(function).__module__
        if not package.startswith(("torch.distributed.", "lightning_shardckpt.")):
            yield "library" if package.startswith(_LIBRARIES) else "user"


# ── copies ────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── torch.compile ─────────────────────────────────────────────────────────────────────────────────────────────────────


set_frame_callback: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Set what looks at the frames of Python in this thread, None for nothing; returns what did before.

While a compiled function runs, that is what compiles the functions that it calls. Relies on the callback being a state
of the thread, and on its return value being accepted as an argument later.
"""


def skip_folders(folders: Iterable[str]) -> None:
    """Let torch.compile run functions of these folders as they are; it compiles what they call.

    Does nothing while ``torch._dynamo`` is not imported, which takes long, and without which nothing is compiled.
    Relies on ``trace_rules.SKIP_DIRS``, and on the regular expression that is made of it.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    known = dynamo.trace_rules.SKIP_DIRS
    missing = [folder for folder in folders if folder not in known]
    if missing:
        known.extend(missing)
        dynamo.trace_rules._recompile_re()


def not_compiled() -> AbstractContextManager[Any]:
    """A context in which compiled functions run as they were, and nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def has_compiled(root: nn.Module) -> bool:
    """Return whether ``root``, or a module inside it, is compiled, in place or by a wrapper."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(is_compiled(m) or compiled_from(m) is not None for m in root.modules())


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` wrapped to make this one; None if it made none of it.

    Relies on the class name, so that ``torch._dynamo`` need not be imported to ask.
    """
    if type(module).__name__ != "OptimizedModule":
        return None
    found = module._orig_mod
    assert isinstance(found, nn.Module)
    return found
