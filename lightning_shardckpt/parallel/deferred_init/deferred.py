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
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_shardckpt.compat.pytree import tree_leaves
from lightning_shardckpt.compat.torch_modules import (
    after_unpickling,
    buffer_slots,
    parameter_slots,
    replace_parameter_data,
)
from lightning_shardckpt.compat.torch_tensors import below_modes, version_of, without_torch_function
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.parallel.deferred_init.op_log import Log, TrackedView
from lightning_shardckpt.parallel.deferred_init.recorder import Facade, Recorder
from lightning_shardckpt.parallel.sharding.references import replace_in_attributes
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
        follows: after the context, until `settle`, parameters still act like CPU parameters, and operations are logged.
    """

    def __init__(self, tuning: Tuning = TUNING, *, follows: bool = False) -> None:
        self._log = Log(tuning)
        self._follows, self._is_entered = follows, False
        self.random_digest = 0
        """A digest of the states of random generators at the operations on parameters after the context."""
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
            undo.enter_context(replace_parameter_data(self._mirrored))
            undo.enter_context(after_unpickling(self._remember_all))
            undo.callback(register_module_parameter_registration_hook(self._remember).remove)
            undo.enter_context(Recorder(self._log, self._in_distributed))
            undo.enter_context(Facade(self._log, self._in_distributed))
            self._undo = undo.pop_all()
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, traceback)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Log operations on parameters after the context."""
        if self._is_entered:
            yield
            return
        first = len(self._log.operations)
        with Recorder(self._log, self._in_distributed), Facade(self._log, self._in_distributed):
            yield
        for operation in self._log.operations[first:]:
            if operation.random is not None:
                self.random_digest = zlib.crc32(operation.random[1].numpy().tobytes(), self.random_digest)

    def settle(self, root: nn.Module) -> None:
        """Make the parameters of ``root`` plain meta tensors, known by their current owners, and its buffers real."""
        known = {id(one.parameter): one for slots in self._registered.values() for one in slots.values()}
        for module in root.modules():
            for name, parameter in parameter_slots(module).items():
                if parameter is not None:
                    _take_back(parameter)
                    if id(parameter) in known:
                        self._registered.setdefault(module, {})[name] = known[id(parameter)]
        self.materialize_buffers(root)

    def pending(self, root: nn.Module) -> list[str]:
        """Return the FQNs of the parameters of ``root`` on the meta device; tied parameters under each name."""
        return [fqn for fqn, _, _, _ in _meta_parameters(root)]

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

    def writes(self, tensor: Tensor) -> int:
        """Return the number of known writes to a tensor since it was made."""
        with below_modes():
            storage, noted = self._log.find(tensor), self._log.find_meta(tensor)
            if storage is not None:
                return len(storage.writers) - 1
            return max(version_of(tensor), noted.writes if noted is not None else 0)

    def constant(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that computes a meta tensor that was made inside from a constant and not written to."""
        noted = self._log.find_meta(tensor)
        return noted.value if noted is not None and not noted.writes else None

    def is_equal(self, tensor: Tensor, other: Tensor) -> bool:
        """Return True if a tensor made inside has the values of ``other``."""
        with below_modes():
            real = self._log.real(tensor) if self._log.is_mirror(tensor) else tensor
            return torch.equal(real, other.to(real.dtype).expand_as(real))

    def is_defined(self, tensor: Tensor) -> bool:
        """Return True if no element of ``tensor`` is known to depend on uninitialized memory."""
        with below_modes():
            return self._log.is_defined(tensor)

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
                "Build and initialise them inside the deferred context and without device='meta', or pass "
                "defer_init=False."
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
        if known is not None and version_of(known.parameter) != known.version and not self._follows:
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
        if self._follows:
            _release({p for of in self._parameters.values() for p in of.values()}, self._following, self._log)
        self._parameters.clear()
        self._log.cache.clear()
        self._base.clear()
        self._is_entered = False

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

# Fabric scripts build a module in ``init_module(empty_init=True)``, and initialize it in place afterwards. On plain
# meta tensors that would have no effect, without an error. So torch functions on these parameters run inside the
# context.

Recording = Callable[[], AbstractContextManager[None]]
_PLACE = "_outside"
"""The attribute of a tensor that holds the recording context and the log."""


def _release(tensors: Iterable[Tensor], recording: Recording, log: Log) -> None:
    """Run later operations on deferred tensors, and on tensors derived from them, inside ``recording()``."""
    for tensor in tensors:
        tensor.__dict__[_PLACE] = recording, log
        tensor.__class__ = _OutsideParameter if isinstance(tensor, nn.Parameter) else _OutsideTensor


def _take_back(tensor: Tensor) -> None:
    """Undo `_release` for one tensor."""
    if isinstance(tensor, _OutsideParameter | _OutsideTensor):
        del tensor.__dict__[_PLACE]
        _make_plain(tensor)


def _make_plain(tensor: Tensor) -> None:
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor


def _inside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, _OutsideParameter | _OutsideTensor)]
    with without_torch_function():
        recording, log = tensors[0].__dict__[_PLACE]
        for tensor in tensors:
            _make_plain(tensor)
        try:
            with recording():
                result = func(*args, **(kwargs or {}))
        except StateError as error:
            raise StateError(
                f"{error}. Parameters of init_module(empty_init=True) have no memory before fabric.setup: load and "
                "save after it."
            ) from None
        finally:
            _release(tensors, recording, log)

        _release([x for x in tree_leaves(result) if type(x) is Tensor and log.is_mirror(x)], recording, log)
        return result


class _OutsideTensor(Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _inside(func, args, kwargs)


class _OutsideParameter(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _inside(func, args, kwargs)
