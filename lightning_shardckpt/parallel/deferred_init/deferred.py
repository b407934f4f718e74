"""Modules that are built without memory for their parameters, whose initial values are computed later, bit for bit.

Under :class:`DeferredInit` construction runs eagerly, so values, shapes and the random stream are as in ordinary
construction. Two things differ: every operation is logged, and ``nn.Parameter(tensor)`` becomes a *mirror*, a meta
tensor that stands for a storage in the log. A bounded cache holds real memory of mirrors; evicted memory is recomputed
from the log. :meth:`DeferredInit.replay` returns the finished parameters, one at a time.

The log refers to storages, not to tensors: two tensors alias each other exactly if they share a storage, views
included, and ``x.data = y`` only gives x another storage. A storage is *tracked* if its bytes result from logged
operations alone. All others are *foreign* (``torch.from_numpy``, a loaded file, a tensor made earlier): operations on
them run as usual, and their values are logged when a tracked storage reads them. Parameters in foreign memory stay
real, and so do all tensors that are no parameters. So an operation that cannot be logged costs memory, but is correct.

Must not know meshes: for ``torch.distributed`` a mirror is a plain meta tensor. torchdistx's ``deferred_init`` has the
same idea with another execution (it records operations without autograd on fake CPU tensors).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_shardckpt.compat.torch_modules import (
    after_unpickling,
    buffer_slots,
    parameter_slots,
    replace_parameter_data,
)
from lightning_shardckpt.compat.torch_tensors import below_modes, version_of, without_torch_function
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.parallel.deferred_init.op_log import Log, TrackedView
from lightning_shardckpt.parallel.deferred_init.recorder import SHOWN, Facade, Recorder
from lightning_shardckpt.parallel.sharding.references import replace_in_attributes
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of
from lightning_shardckpt.system.tuning import TUNING, Tuning

_LARGEST = 10_000  # items of a container that is searched for tensors
_FOREIGN = "is on the meta device, but was not made by this deferred context"


@dataclass(frozen=True, slots=True)
class _Registered:
    parameter: nn.Parameter
    view: TrackedView
    version: int


class DeferredInit:
    """A context in which modules are built exactly as without it, but their parameters use no memory.

    Inside, new parameters act like CPU parameters. Afterwards they are meta tensors, which can be parallelized. They
    can be parallelized inside, too, after their initialization.

    >>> deferred = DeferredInit()
    >>> with deferred:
    ...     layer = nn.Linear(2, 3)
    >>> layer.weight.is_meta
    True
    >>> [(name, tuple(full.shape)) for module, name, full in deferred.replay(layer)]
    [('weight', (3, 2)), ('bias', (3,))]

    Inside, it uses 64 MiB, or three times the size of the largest tensor, beyond the memory of the code itself.
    It can be entered again, but not inside itself. It affects only the entering thread; the wrappers of
    ``nn.Parameter.__new__`` and ``nn.Module.__setstate__`` do nothing in other threads.

    Args:
        tuning: sizes of the cache.
        guards: after the context, until `settle`, parameters raise for every operation.
    """

    def __init__(self, tuning: Tuning = TUNING, *, guards: bool = False) -> None:
        self._log = Log(tuning)
        self._guards, self._settled = guards, WeakSet[nn.Module]()
        self._parameters: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()
        self._registered: WeakKeyDictionary[nn.Module, dict[str, _Registered]] = WeakKeyDictionary()
        self._base: set[FrameType] = set()
        self._undo = ExitStack()

    def __enter__(self) -> DeferredInit:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._base.add(frame)
            frame = frame.f_back
        for module, slots in self._registered.items() if self._guards else ():
            if module not in self._settled:
                self._parameters[module] = {name: one.parameter for name, one in slots.items()}
                _make_plain(self._parameters[module].values())
        with ExitStack() as undo:
            undo.callback(self._finish)
            undo.enter_context(replace_parameter_data(self._mirrored))
            undo.enter_context(after_unpickling(self._remember_all))
            undo.callback(register_module_parameter_registration_hook(self._remember).remove)
            undo.enter_context(Recorder(self._log, self._in_distributed))
            undo.enter_context(Facade(self._log, self._in_distributed))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, traceback)

    def settle(self, root: nn.Module) -> None:
        """Make the parameters of ``root`` plain meta tensors, known by their current owners, and its buffers real."""
        known = {id(one.parameter): one for slots in self._registered.values() for one in slots.values()}
        self._settled.update(root.modules())
        for module in root.modules():
            for name, parameter in parameter_slots(module).items():
                if parameter is not None:
                    _make_plain([parameter])
                    if id(parameter) in known:
                        self._registered.setdefault(module, {})[name] = known[id(parameter)]
        self.materialize_buffers(root)

    def knows(self, module: nn.Module, name: str) -> bool:
        """Return True if a parameter of ``module`` was made in this context."""
        return name in self._registered.get(module, {})

    def take(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Set the value of a meta parameter of ``module`` to a tensor made in this context. Call it inside."""
        parameter: Any = parameter_slots(module)[name]
        self._remember(module, name, value)  # type: ignore[arg-type]  # acts as a parameter
        with below_modes():
            if type(parameter) is nn.Parameter and self._log.is_mirror(value):
                parameter.data = value.detach()

    def is_written(self, tensor: Tensor) -> bool:
        """Return True if a tensor made in this context was written to since."""
        with below_modes():
            storage = self._log.find(tensor)
            return storage is None or len(storage.writers) > 1

    def replay(
        self, root: nn.Module, *, skip: Collection[tuple[int, str]] = ()
    ) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Compute (owner, name, full real tensor) for each meta parameter of ``root``, and make its buffers real.

        The call selects the tensors, and each is computed when the iterator reaches it, so ``root`` may be parallelized
        before, between or after. The order is that of ``root.named_parameters``, with tied parameters next to each
        other, as the same tensor. A tensor is freed when the caller drops it.

        Args:
            root: the module that was built, or a part of it.
            skip: (id of the module, name) of parameters that are not computed.

        Raises:
            StateError: if parameters were not made in this context, or have changed since. Nothing is computed then.
        """
        with below_modes():
            self.materialize_buffers(root)
            slots: dict[TrackedView, list[tuple[nn.Module, str]]] = {}
            dtypes: dict[TrackedView, torch.dtype] = {}
            unknown = []
            for fqn, module, name, parameter in _meta_parameters(root):
                if (id(module), name) in skip:
                    continue
                view = self._origin(module, name, parameter)
                if isinstance(view, str):
                    unknown.append(f"  {fqn}  {view}")
                else:
                    slots.setdefault(view, []).append((module, name))
                    dtypes[view] = parameter.dtype
        if unknown:
            raise StateError(
                f"cannot replay the first values of {len(unknown)} parameters:\n" + "\n".join(unknown) + "\n"
                "Build and initialise them inside the deferred context and without device='meta', or in __init__."
            )
        return self._values(slots, dtypes)

    def materialize_buffers(self, root: nn.Module) -> None:
        """Make buffers and tensors in attributes real that were computed from parameters; all others are real."""
        done: dict[int, Tensor] = {}

        def real(value: Any) -> Any:
            if type(value) is not Tensor or not self._log.is_mirror(value):
                return value
            if id(value) not in done:
                done[id(value)] = self._log.real(value).clone().requires_grad_(value.requires_grad)
            return done[id(value)]

        with below_modes():
            for module in root.modules():
                slots = buffer_slots(module)
                for name, buffer in [*slots.items()]:
                    if (new := real(buffer)) is not buffer:  # modules of torch.jit allow no assignment
                        slots[name] = new
            replace_in_attributes(root, real, _LARGEST)
            self._log.cache.clear()

    def _values(
        self, slots: dict[TrackedView, list[tuple[nn.Module, str]]], dtypes: dict[TrackedView, torch.dtype]
    ) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for view, places in slots.items():
            with below_modes():
                full = view.on(self._log.run(view.storage, len(self._log.operations))).to(dtypes[view])
            for module, name in places:
                yield module, name, full
            del full

    def _origin(self, module: nn.Module, name: str, parameter: Tensor) -> TrackedView | str:
        """Return the tracked view of a meta parameter, or the reason why it is unknown."""
        known = self._registered.get(module, {}).get(name)
        if known is not None and version_of(known.parameter) != known.version:
            return "was changed in place after the deferred context ended"
        storage = self._log.find(parameter)
        if storage is not None:
            return TrackedView.of(parameter, storage)
        if known is None:
            return _FOREIGN
        if known.view.shape != tuple(parameter.shape):
            return f"has shape {tuple(parameter.shape)}, but was built with {known.view.shape}"
        if type(parameter) is nn.Parameter and parameter.dtype == known.view.dtype:
            return "was replaced by another meta tensor after it was registered"
        return known.view

    def _remember(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        with below_modes():
            if self._log.is_mirror(parameter):
                self._parameters.setdefault(module, {})[name] = parameter  # type: ignore[assignment]

    def _finish(self) -> None:
        for module, parameters in self._parameters.items():
            self._registered.setdefault(module, {}).update(
                (name, _Registered(p, TrackedView.of(p, storage), version_of(p)))
                for name, p in parameters.items()
                if (storage := self._log.find(p)) is not None
            )
        guarded = [of for module, of in self._parameters.items() if self._guards and module not in self._settled]
        for parameter in [parameter for of in guarded for parameter in of.values()]:
            if type(parameter) is nn.Parameter and parameter.is_meta:
                parameter.__class__ = _Unfilled
        self._parameters.clear()
        self._log.cache.clear()
        self._base.clear()

    def _in_distributed(self) -> bool:
        """Return True if code of ``torch.distributed`` is running, which must see mirrors as meta tensors."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame not in self._base:
            if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
                return True
            frame = frame.f_back
        return False

    def _mirrored(self, data: Any) -> Any:
        """Return a mirror instead of a parameter's ``data`` if its storage is tracked; else ``data``."""
        if type(data) not in (Tensor, nn.Parameter):
            return data
        with below_modes():
            storage = self._log.find(data)
            if storage is None or data.device.type != "cpu":
                return data
            self._log.keep(storage, data.untyped_storage())
            return self._log.mirror(data, storage)

    def _remember_all(self, module: nn.Module) -> None:
        for name, parameter in parameter_slots(module).items():
            self._remember(module, name, parameter)


def _meta_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in root.named_modules():
        for name, parameter in parameter_slots(module).items():
            if parameter is not None and parameter.device.type == "meta":
                yield f"{prefix}.{name}" if prefix else name, module, name, parameter


# ── after the context ─────────────────────────────────────────────────────────────────────────────────────────────


class _Unfilled(nn.Parameter):
    """A parameter between the context and `DeferredInit.settle`: changes of a plain meta tensor would be lost."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SHOWN:
            return SHOWN[func]
        if kind_of(func) not in (Kind.METADATA, Kind.TEXT) and func not in _OF_PRECISION:
            raise StateError(
                f"{name_of(func)} of a parameter that init_module(empty_init=True) has built: such parameters have no "
                "memory before fabric.setup. Initialise them inside the context, in the constructor or after it; load "
                "and save after fabric.setup."
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


_data: Any = Tensor.data
_grad: Any = Tensor.grad
_OF_PRECISION = {Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, _data.__set__, _grad.__get__}
"""By which Fabric changes the dtype of a module in ``fabric.setup``; `DeferredInit.replay` gives values in it."""


def _make_plain(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if isinstance(parameter, _Unfilled):
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # back to what it was
