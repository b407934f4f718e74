"""How do a model's initial weights come into being without any rank ever holding the whole model?

Under :class:`DeferredInit` construction runs eagerly, so values read, shapes and the random stream are those of
ordinary construction. Two things differ: every operation is logged, and ``nn.Parameter(tensor)`` becomes a *mirror*, a
meta tensor that names a storage in the log. Real memory behind mirrors is a bounded cache; what was evicted is computed
again from the log. :meth:`DeferredInit.replay` gives the finished parameters, one at a time.

The log speaks of storages, not of tensors: two tensors alias each other exactly when they share a storage, views
included, and ``x.data = y`` just points x at another one. A storage is *tracked* when logged operations alone made its
bytes. All others are *foreign* (``torch.from_numpy``, a loaded file, a tensor made earlier): operations on them run as
usual, and their values enter the log where a tracked storage reads them. A parameter over foreign memory stays real,
as does everything that is not a parameter. So what cannot be logged costs memory, and is never wrong.

This module knows nothing of meshes: whatever ``torch.distributed`` does to a mirror happens to a plain meta tensor.
The same idea with another execution: torchdistx ``deferred_init`` (records autograd-free ops, fake CPU tensors).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.parallel.oplog import Log, View, unseen
from lightning_shardckpt.parallel.recorder import Facade, Recorder

_FOREIGN = "is on the meta device, but was not made by this deferred context"


@dataclass(frozen=True, slots=True)
class _Registered:
    parameter: nn.Parameter
    view: View
    version: int


class DeferredInit:
    """A context in which modules are built exactly as without it, but their parameters take no memory.

    Inside, new parameters look and act like CPU parameters. Afterwards they are meta tensors, to be parallelised like
    any others; parallelising them inside works as well, if it comes after their initialisation.

    >>> deferred = DeferredInit()
    >>> with deferred:
    ...     layer = nn.Linear(2, 3)
    >>> layer.weight.is_meta
    True
    >>> [(name, tuple(full.shape)) for module, name, full in deferred.replay(layer)]
    [('weight', (3, 2)), ('bias', (3,))]

    Real memory used inside: 64 MiB, or three times the largest tensor, beyond what the code itself holds.
    Not reentrant; only the entering thread is affected, except that ``nn.Parameter.__new__`` and
    ``nn.Module.__setstate__`` are wrapped for all, and pass other threads on.
    """

    def __init__(self) -> None:
        self._log = Log()
        self._parameters: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()
        self._registered: WeakKeyDictionary[nn.Module, dict[str, _Registered]] = WeakKeyDictionary()
        self._base: set[FrameType] = set()
        self._undo = ExitStack()

    def __enter__(self) -> DeferredInit:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._base.add(frame)
            frame = frame.f_back
        with ExitStack() as undo:
            undo.callback(self._finish)
            undo.callback(self._wrap_parameter())
            undo.callback(self._wrap_setstate())
            undo.callback(register_module_parameter_registration_hook(self._remember).remove)
            undo.enter_context(Recorder(self._log, self._in_distributed))
            undo.enter_context(Facade(self._log, self._in_distributed))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, traceback)

    def pending(self, root: nn.Module) -> list[str]:
        """Returns the FQNs of the parameters of `root` that are on the meta device, tied ones under each name."""
        return [fqn for fqn, _, _, _ in _meta_parameters(root)]

    def knows(self, module: nn.Module, name: str) -> bool:
        """Returns whether the parameter of that name of `module` was made in this context."""
        return name in self._registered.get(module, {})

    def replay(
        self, root: nn.Module, *, skip_foreign: bool = False, skip: Collection[tuple[int, str]] = ()
    ) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Returns (owner, name, full real tensor) for each meta parameter of `root`; also makes its buffers real.

        What to compute is decided by this call, and each tensor is computed when the iteration comes to it: `root` may
        be parallelised before, between or after. Tied parameters follow each other, with the same tensor object.
        The order is that of `root.named_parameters`. A tensor is freed once the caller drops it.
        `skip_foreign` leaves out meta parameters that were not made in this context, instead of raising; `skip` those
        of which (id of the module, name) is in it: they are not computed.

        Raises:
            StateError: some parameters or buffers were not made in this context, or changed since; before any replay.
        """
        with unseen():
            self.materialize_buffers(root)
            slots: dict[View, list[tuple[nn.Module, str]]] = {}
            dtypes: dict[View, torch.dtype] = {}
            unknown = []
            for fqn, module, name, parameter in _meta_parameters(root):
                if (id(module), name) in skip:
                    continue
                view = self._origin(module, name, parameter)
                if view is _FOREIGN and skip_foreign:
                    continue
                if isinstance(view, str):
                    unknown.append(f"  {fqn}  {view}")
                else:
                    slots.setdefault(view, []).append((module, name))
                    dtypes[view] = parameter.dtype
        if unknown:
            raise StateError(
                f"cannot replay the first values of {len(unknown)} parameters:\n" + "\n".join(unknown) + "\n"
                "Build and initialise them inside the deferred context and without device='meta', or pass "
                "defer_init=False."
            )
        return self._values(slots, dtypes)

    def materialize_buffers(self, root: nn.Module) -> None:
        """Makes buffers and tensor attributes real that were computed from parameters; the others are real already."""
        done: dict[int, torch.Tensor] = {}
        with unseen():
            for module in root.modules():
                for attributes in (module._buffers, module.__dict__):
                    for name, value in list(attributes.items()):
                        if type(value) is torch.Tensor and self._log.is_mirror(value):
                            if id(value) not in done:
                                done[id(value)] = self._log.real(value).clone().requires_grad_(value.requires_grad)
                            attributes[name] = done[id(value)]
            self._log.cache.clear()

    def _values(
        self, slots: dict[View, list[tuple[nn.Module, str]]], dtypes: dict[View, torch.dtype]
    ) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for view, places in slots.items():
            with unseen():
                full = view.on(self._log.run(view.storage, len(self._log.operations))).to(dtypes[view])
            for module, name in places:
                yield module, name, full
            del full

    def _origin(self, module: nn.Module, name: str, parameter: torch.Tensor) -> View | str:
        """Returns what the meta `parameter` stands for, or why that is not known."""
        known = self._registered.get(module, {}).get(name)
        if known is not None and known.parameter._version != known.version:
            return "was changed in place after the deferred context ended"
        storage = self._log.find(parameter)
        if storage is not None:
            return View.of(parameter, storage)
        if known is None:
            return _FOREIGN
        if known.view.shape != tuple(parameter.shape):
            return f"has shape {tuple(parameter.shape)}, but was built with {known.view.shape}"
        if type(parameter) is nn.Parameter and parameter.dtype == known.view.dtype:
            return "was replaced by another meta tensor after it was registered"
        return known.view

    def _remember(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        with unseen():
            if self._log.is_mirror(parameter):
                self._parameters.setdefault(module, {})[name] = parameter  # type: ignore[assignment]

    def _finish(self) -> None:
        for module, parameters in self._parameters.items():
            self._registered[module] = {
                name: _Registered(p, View.of(p, storage), p._version)
                for name, p in parameters.items()
                if (storage := self._log.find(p)) is not None
            }
        self._parameters.clear()
        self._log.cache.clear()
        self._base.clear()

    def _in_distributed(self) -> bool:
        """Whether code of ``torch.distributed`` is running: it sees mirrors as the meta tensors that they are."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame not in self._base:
            if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
                return True
            frame = frame.f_back
        return False

    def _wrap_parameter(self) -> Callable[[], None]:
        original, thread = nn.Parameter.__new__, threading.get_ident()

        def new(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> nn.Parameter:
            if threading.get_ident() == thread and type(data) in (torch.Tensor, nn.Parameter):
                with unseen():
                    storage = self._log.find(data)
                    if storage is not None and data.device.type == "cpu":
                        self._log.keep(storage, data.untyped_storage())
                        data = self._log.mirror(data, storage)
            return original(cls, data, requires_grad)

        nn.Parameter.__new__ = new  # type: ignore[method-assign,assignment]
        return lambda: setattr(nn.Parameter, "__new__", staticmethod(original))

    def _wrap_setstate(self) -> Callable[[], None]:
        """Copies made by ``copy.deepcopy`` do not register their parameters."""
        original, thread = nn.Module.__setstate__, threading.get_ident()

        def setstate(module: nn.Module, state: dict[str, Any]) -> None:
            original(module, state)  # type: ignore[no-untyped-call]
            if threading.get_ident() == thread:
                for name, parameter in module._parameters.items():
                    self._remember(module, name, parameter)

        nn.Module.__setstate__ = setstate  # type: ignore[method-assign]
        return lambda: setattr(nn.Module, "__setstate__", original)


def _meta_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                yield f"{prefix}.{name}" if prefix else name, module, name, parameter
