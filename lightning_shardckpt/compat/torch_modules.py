"""Private names of modules and optimizers: calls, hooks, registered tensors, load hooks, copies, and torch.compile.

Checked with torch 2.12 to 2.15 and Python 3.11 to 3.14."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# ── calls, hooks and constructors ─────────────────────────────────────────────────────────────────────────────────────


def mix_in(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put ``mixin`` before the class of one module, as FSDP does, under the same class name and ``__module__``."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def intercept_calls(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replace the call of one module by ``call(original, *args, **kwargs)``, with hooks inside of ``original``.

    Copies of the module are not intercepted. Relies on ``nn.Module.__call__`` reading ``_compiled_call_impl`` of the
    instance, which ``module.compile`` sets. A module whose class overrides ``__call__`` gets another class.
    """
    if type(module).__call__ is nn.Module.__call__:
        original = module._compiled_call_impl or _WeakMethod(module, nn.Module._call_impl)
        module.__dict__["_compiled_call_impl"] = partial(call, original)
    else:
        mix_in(module, _Intercepted)
        module.__dict__["_shardckpt_call"] = call


def compiled_call(module: nn.Module) -> Any:
    """Return the replacement of the module's call by ``module.compile`` or `intercept_calls`; None without one."""
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile`` was called; `intercept_calls` does not count, before or after it."""
    call: Any = module._compiled_call_impl
    while isinstance(call, partial):
        call = call.args[0]
    return call is not None and not isinstance(call, _WeakMethod)


class _WeakMethod:
    """A method for an attribute of its module, which it does not keep alive."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = ref(module), function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), *args, **kwargs)


class _Intercepted(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_shardckpt_call"](super().__call__, *args, **kwargs)


def withhold_state(module: nn.Module, asked: Callable[[], object]) -> None:
    """Make a module neither save nor load state, and stay on its device, by methods of the instance.

    ``asked`` is called on ``state_dict`` of this module itself, but not of a module that contains it.
    """
    module.__dict__["_save_to_state_dict"] = lambda destination, prefix, keep_vars: prefix or asked()
    module.__dict__["_load_from_state_dict"] = lambda *args, **kwargs: None
    module.__dict__["_apply"] = _WeakMethod(module, lambda itself, *args, **kwargs: itself)


def withholds_state(module: nn.Module) -> bool:
    """Return whether `withhold_state` was called for a module."""
    return isinstance(module.__dict__.get("_apply"), _WeakMethod)


def reset_method(module: nn.Module) -> Callable[..., Any] | None:
    """Return the method by which a module initializes its parameters, or None; that of some of torch is private."""
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, methods), None)


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the mutable dict of a module's own children."""
    return module._modules


def unregister_tensors(module: nn.Module) -> None:
    """Turn parameters and buffers of a module into ordinary attributes."""
    for registered in (module._parameters, module._buffers):
        for name, value in list(registered.items()):
            if value is not None:
                del registered[name]
                module.__dict__[name] = value
    module._non_persistent_buffers_set.clear()


def copy_modules(root: nn.Module, convert: Callable[[Tensor], Tensor]) -> dict[nn.Module, nn.Module]:
    """Return copies of all modules of ``root``, by module, with the same attributes, and converted tensors."""
    copies = {module: object.__new__(type(module)) for module in root.modules()}
    for module, copied in copies.items():
        copied.__dict__.update(vars(module))
        for name in ("_parameters", "_buffers"):
            tensors = vars(module)[name].items()
            copied.__dict__[name] = {key: None if tensor is None else convert(tensor) for key, tensor in tensors}
        children = module._modules.items()
        copied.__dict__["_modules"] = {key: None if child is None else copies[child] for key, child in children}
    return copies


def convert_tensors(root: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by the result of ``convert``, like ``to``. Ties are broken."""
    root._apply(convert)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def result_hooks(module: nn.Module) -> frozenset[int]:
    """Return the handle ids of a module's hooks that get results or gradients: forward, backward, backward-pre."""
    return frozenset((*module._forward_hooks, *module._backward_hooks, *module._backward_pre_hooks))


def argument_hooks(module: nn.Module) -> frozenset[int]:
    """Return the handle ids of a module's forward-pre hooks, which get its arguments."""
    return frozenset(module._forward_pre_hooks)


def keep_hooks(module: nn.Module, kept: Container[int] = ()) -> None:
    """Remove all hooks of a module, also of state dicts, except those with these handle ids, from dicts by name."""
    for name, hooks in vars(module).items():
        if name.startswith("_") and "_hooks" in name and isinstance(hooks, dict):
            for number in [number for number in hooks if number not in kept]:
                del hooks[number]


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Inside, disable the global hooks of ``torch.nn.modules.module``."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    undo = replace_attributes(torch.nn.modules.module, **{f"_global_{kind}_hooks": {} for kind in kinds})
    try:
        yield
    finally:
        undo()


# ── registered tensors ────────────────────────────────────────────────────────────────────────────────────────────────


BatchNorm = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
NormWithStatistics = (*BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mutable dict of a module's own parameters."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the mutable dict of a module's own buffers."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own buffers that are not in its state dict."""
    return frozenset(module._non_persistent_buffers_set)


def refresh_flat_weights(modules: Iterable[nn.Module]) -> list[tuple[nn.RNNBase, list[Tensor | None]]]:
    """Update the list of weights that recurrent modules keep beside their registered parameters, which it keeps alive.

    Returns:
        The recurrent modules among ``modules`` with their previous lists, for `restore_flat_weights`.
    """
    before = [(m, m.__dict__["_flat_weights"]) for m in modules if isinstance(m, nn.RNNBase)]
    for module, _ in before:
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in module._flat_weights_names]
    return before


def restore_flat_weights(before: Iterable[tuple[nn.RNNBase, list[Tensor | None]]]) -> None:
    """Undo `refresh_flat_weights`."""
    for module, weights in before:
        module.__dict__["_flat_weights"] = weights


# ── load hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def pre_load_origins(module: nn.Module) -> set[str]:
    """Return the origins, "user" or "library", of load pre-hooks and an overridden ``_load_from_state_dict``.

    Functions of torch.distributed, which only order its own shards, are left out. Functions of torch, transformers
    (5.x) and PEFT (0.21) act only if stored names or shapes differ from the module's, to load older files.
    """
    hooks = [vars(hook).get("hook") for hook in module._load_state_dict_pre_hooks.values()]
    load = module.__dict__.get("_load_from_state_dict", type(module)._load_from_state_dict)
    return set(_origins(hooks if load is nn.Module._load_from_state_dict else [*hooks, load]))


def has_post_load_hooks(module: nn.Module) -> bool:
    """Return True if a module has load post-hooks other than those of torch.distributed."""
    return any(_origins(module._load_state_dict_post_hooks.values()))


def has_own_load(module: nn.Module) -> bool:
    """Return whether the user's class overrides ``load_state_dict``, which runs for a root module."""
    return "user" in _origins([type(module).load_state_dict])


def _origins(functions: Any) -> Iterator[str]:
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        package = getattr(function, "__module__", None) or type(function).__module__
        if not package.startswith(("torch.distributed.", "lightning_shardckpt.")):
            yield "library" if package.startswith(("torch.", "transformers.", "peft.")) else "user"


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether ``state_dict()`` is overridden or has post hooks, and may have other entries than torch's."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(hooks)


def has_load_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``load_state_dict`` has hooks, whose dicts an optimizer that wraps another may lack."""
    kinds = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, kind, None) for kind in kinds)


def on_deepcopy(callback: Callable[[nn.Parameter, nn.Parameter], None]) -> Callable[[], None]:
    """Call a function with each ``nn.Parameter`` that is deep-copied, and its copy; return the undo. One at a time.

    Relies on ``copy._deepcopy_dispatch``, which is looked up before a class's ``__deepcopy__``.
    """
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]  # private

    def copy_parameter(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = parameter.__deepcopy__(memo)  # type: ignore[no-untyped-call]  # torch's
        callback(parameter, copied)
        return copied

    dispatch[nn.Parameter] = copy_parameter
    return lambda: dispatch.pop(nn.Parameter)


# ── torch.compile ─────────────────────────────────────────────────────────────────────────────────────────────────────


set_frame_callback: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets this thread's callback for frames of Python, or None; returns the previous callback, which it accepts later.

While a compiled function runs, the callback compiles the functions that it calls.
"""


def skip_folders(folders: Iterable[str]) -> None:
    """Make torch.compile run functions of these folders uncompiled; functions that they call are compiled.

    Does nothing while ``torch._dynamo`` is not imported, which is slow, and without which nothing is compiled.
    """
    rules = getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)
    if rules is not None and (missing := [folder for folder in folders if folder not in rules.SKIP_DIRS]):
        rules.SKIP_DIRS.extend(missing)
        rules._recompile_re()


def run_eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run eagerly, and nothing is compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def has_compiled(root: nn.Module) -> bool:
    """Return whether ``root``, or a module inside it, is compiled, in place or by a wrapper."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(is_compiled(m) or compiled_from(m) is not None for m in root.modules())


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of ``torch.compile(module)``; None for other modules."""
    original: Any = module._orig_mod if type(module).__name__ == "OptimizedModule" else None  # no slow import
    return original  # type: ignore[no-any-return]  # a module


# ── attributes of others ──────────────────────────────────────────────────────────────────────────────────────────────


def replace_attributes(owner: object, **attributes: Any) -> Callable[[], None]:
    """Set attributes of an object, module or class; return the undo, which may be called again."""
    before = {name: value for name, value in vars(owner).items() if name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)

    def undo() -> None:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)  # uncovers that of the class

    return undo


def fabric_original(module: nn.Module) -> nn.Module | None:
    """Return the user's module in a ``_FabricModule`` from Fabric's ``setup``; None for other modules."""
    return module._modules.get("_original_module")


def loader_of_fabric(value: object) -> object:
    """Return the user's loader in a loader from Fabric's ``setup_dataloaders``; other objects unchanged."""
    return value._dataloader if type(value).__name__ == "_FabricDataLoader" else value  # type: ignore[attr-defined]
