"""Two torch modes that run operations on deferred tensors in real memory, and log them.

`Recorder` handles all dispatched operations. `Facade` handles the rest: attributes such as ``device``, and methods that
leave torch, such as ``numpy``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.pytree import tree_flatten, tree_unflatten
from lightning_shardckpt.compat.torch_tensors import (
    DispatchMode,
    Overload,
    below_modes,
    dispatches,
    is_in_place,
    storage_id,
    written_arguments,
)
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.parallel.deferred_init.op_log import (
    ALTERNATIVE,
    Constant,
    Log,
    Operation,
    TrackedStorage,
    TrackedView,
    aten,
)

_OVERWRITING = {aten.normal_, aten.uniform_, aten.zero_, aten.fill_, aten.copy_}


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Runs every operation in real memory, and logs operations that create or write tracked storages."""

    def __init__(self, log: Log, in_distributed: Callable[[], bool]) -> None:
        super().__init__()
        self._log = log
        self._in_distributed = in_distributed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(dispatches, types)) or self._in_distributed():
            with below_modes():
                self._check_unlogged(func, args, kwargs)
            return func(*args, **kwargs)
        with below_modes():
            return self._run(func, args, kwargs)

    def _check_unlogged(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collective = "c10d" in func.namespace
        written = _written(func, args, kwargs)
        for tensor in _tensors((args, kwargs)):
            if not (collective or id(tensor) in written):
                continue
            plain = type(tensor) in (torch.Tensor, nn.Parameter)
            if tensor.device.type == "meta" and (self._log.find(tensor) or not plain):
                raise StateError(
                    f"cannot run {func} on a deferred tensor of shape {tuple(tensor.shape)} that was parallelised or "
                    f"is in a collective: initialise parameters before parallelising them, or {ALTERNATIVE}"
                )
            self._log.escape(tensor, str(func))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        log = self._log
        if func is aten.scalar_tensor.default:  # torch makes the 1 of ``mirror[0] = 1`` on the mirror's device
            kwargs = kwargs | {"device": torch.device("cpu")}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        storages = {id(t): log.find(t) for t in tensors}
        foreign = [t for t in tensors if storages[id(t)] is None and t.device.type != "meta"]
        if foreign and len(foreign) == len(tensors):
            result = func(*args, **kwargs)
            # torch.tensor() and torch.from_numpy() both end here; only the latter borrows memory: not resizable
            fresh = func is aten.lift_fresh.default and result.untyped_storage().resizable()
            return log.constant(result) if fresh else result
        written = _written(func, args, kwargs)
        meta = [t for t in tensors if storages[id(t)] is None and t.device.type == "meta" and id(t) not in written]
        if meta and any(storages.values()):
            raise StateError(f"cannot run {func}: one of its inputs was made on the meta device; {ALTERNATIVE}")
        overwritten = _overwritten(func, leaves, storages)
        inputs = [_to_input(x, storages) for x in leaves]
        real = {
            id(t): log.real(t, overwritten=storages[id(t)] is overwritten)
            for t in tensors
            if storages[id(t)] and t.device.type == "meta"
        }
        run_args, run_kwargs = tree_unflatten([real.get(id(x), x) for x in leaves], spec)
        generator = next((x for x in leaves if isinstance(x, torch.Generator)), torch.default_generator)
        state = generator.get_state()
        result = func(*run_args, **run_kwargs)
        random = None if torch.equal(state, generator.get_state()) else (generator, state)

        outputs, out_spec = tree_flatten(result)
        created = self._track_new(outputs, foreign)
        writes = {storage for t in tensors if id(t) in written and (storage := storages[id(t)])}
        if (created or writes) and func.overloadpacket is not aten.set_:
            if any(id(t) in written for t in foreign):
                raise StateError(f"cannot log {func}: it also writes to a tensor made elsewhere; {ALTERNATIVE}")
            touched = frozenset(storage for storage in storages.values() if storage)
            log.append(
                Operation(func, inputs, spec, touched, overwritten, created, random, torch.get_default_dtype()), writes
            )
        self._follow(tensors, real)
        return tree_unflatten(list(self._outputs(outputs, tensors, real)), out_spec)

    def _track_new(self, outputs: list[Any], foreign: list[torch.Tensor]) -> tuple[tuple[int, TrackedStorage], ...]:
        known = {storage_id(t.untyped_storage()) for t in foreign if t.layout is torch.strided}
        created = []
        for position, x in enumerate(outputs):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.layout is torch.strided:
                memory = x.untyped_storage()
                if not x.is_quantized and storage_id(memory) not in known and self._log.find(x) is None:
                    storage = TrackedStorage(memory.nbytes(), [])
                    self._log.track(storage, memory)
                    created.append((position, storage))
        return tuple(created)

    def _follow(self, tensors: list[torch.Tensor], real: dict[int, torch.Tensor]) -> None:
        """Give mirrors the new geometry of their real tensors, as after ``t_`` or ``resize_``."""
        for t in tensors:
            if id(t) in real:
                mine, theirs = self._log.find(t), self._log.find(real[id(t)])
                if theirs is None:
                    raise StateError(f"cannot point a deferred tensor at memory made elsewhere; {ALTERNATIVE}")
                if mine is not theirs or TrackedView.of(t, theirs) != TrackedView.of(real[id(t)], theirs):
                    t.set_(self._log.mirror(real[id(t)], theirs))  # type: ignore[call-overload]

    def _outputs(self, outputs: list[Any], tensors: list[torch.Tensor], real: dict[int, torch.Tensor]) -> Iterator[Any]:
        """Yield outputs with mirrors for real tensors of mirrors; returned inputs are the same objects."""
        originals = {id(real.get(id(t), t)): t for t in tensors}
        held = {storage_id(t.untyped_storage()) for t in tensors if id(t) not in real and t.layout is torch.strided}
        for x in outputs:
            if id(x) in originals:
                yield originals[id(x)]
            elif real and isinstance(x, torch.Tensor) and (storage := self._log.find(x)):
                memory = x.untyped_storage()
                self._log.keep(storage, memory)
                yield x if storage_id(memory) in held else self._log.mirror(x, storage)
            else:
                yield x


def _tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def _written(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that ``func`` writes to."""
    return {id(t) for t in _tensors(written_arguments(func, args, kwargs))}


def _overwritten(func: Any, leaves: list[Any], storages: dict[int, TrackedStorage | None]) -> TrackedStorage | None:
    """Return the storage that ``func`` certainly overwrites completely, without reading it; None without one."""
    if func.overloadpacket not in _OVERWRITING or not is_in_place(func):
        return None
    target, *others = [x for x in leaves if isinstance(x, torch.Tensor)]
    storage = storages[id(target)]
    if storage is None or any(storages[id(t)] is storage for t in others) or not target.is_contiguous():
        return None
    whole = target.numel() * target.element_size() == storage.nbytes == target.untyped_storage().nbytes()
    return storage if whole else None


def _to_input(x: object, storages: dict[int, TrackedStorage | None]) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    storage = storages[id(x)]
    if storage is not None:
        return TrackedView.of(x, storage)
    return x if x.device.type == "meta" else Constant.of(x)


_Tensor = torch.Tensor
SHOWN: dict[Any, Any] = {
    _Tensor.device.__get__: torch.device("cpu"),
    _Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    _Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_SET_DATA: Any = _Tensor.data.__set__  # type: ignore[attr-defined]
_ON_REAL: set[Any] = {
    _Tensor.to, _Tensor.cpu, _Tensor.type, _Tensor.tolist, _Tensor.__repr__, _Tensor.get_device, _Tensor.new_tensor,
}  # fmt: skip
_INDEXING: set[Any] = {_Tensor.__getitem__, _Tensor.__setitem__}
_TO_NUMPY: set[Any] = {_Tensor.numpy, _Tensor.__array__}
_ESCAPES: set[Any] = _TO_NUMPY | {
    _Tensor.data_ptr, _Tensor.untyped_storage, _Tensor.storage,
    _Tensor.share_memory_, _Tensor.__dlpack__, _Tensor.__dlpack_device__,
}  # fmt: skip


def _makes_tensors(index: Any) -> bool:
    """Return True if torch converts an index, such as a list or array, to tensors on the indexed tensor's device."""
    parts = index if isinstance(index, tuple) else (index,)
    return not all(isinstance(part, int | slice | torch.Tensor | type(None) | type(...)) for part in parts)


class Facade(TorchFunctionMode):
    """Makes a mirror look like the CPU tensor that it stands for, where no operation is dispatched.

    Otherwise ``nn.init.orthogonal_`` and others would silently skip mirrors, since they check ``is_meta``.
    """

    def __init__(self, log: Log, in_distributed: Callable[[], bool]) -> None:
        super().__init__()
        self._log = log
        self._in_distributed = in_distributed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        indexes = func in _INDEXING and _makes_tensors(args[1])
        special = func in SHOWN or func in _ON_REAL or func in _ESCAPES or func == _SET_DATA or indexes
        if not special or self._in_distributed():
            return func(*args, **kwargs)
        log = self._log
        with below_modes():
            tracked = log.find(args[0]) is not None
            mirror = log.is_mirror(args[0])
            if func == _SET_DATA:
                return self._set_data(*args)
            if tracked and not mirror and func in _ESCAPES:
                log.escape(args[0], func.__name__)
            if mirror and func in SHOWN:
                return SHOWN[func]
            if mirror and func in _TO_NUMPY:
                array = func(log.real(args[0]).clone(), *args[1:], **kwargs)
                array.flags.writeable = False  # writes to it would be lost
                return array
            if mirror and func in _ESCAPES:
                raise StateError(f"cannot log the use of Tensor.{func.__name__} of a parameter: {ALTERNATIVE}")
            real = log.real(args[0]) if mirror else args[0]
        return self._on_real(func, args[0], real, args[1:], kwargs) if mirror else func(*args, **kwargs)

    def _on_real(
        self, func: Any, mirror: torch.Tensor, real: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``func`` on ``real``; return the mirror if the result is ``real``, as for ``x.to("cpu")``."""
        result = func(real, *rest, **kwargs)
        if result is real:
            return mirror
        with below_modes():
            storage = self._log.find(result) if isinstance(result, torch.Tensor) else None
            return self._log.mirror(result, storage) if storage else result

    def _set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        log = self._log
        storage = log.find(value)
        if log.is_mirror(target) and not log.is_mirror(value):
            if storage is None:  # foreign: from here on the parameter is real
                _SET_DATA(torch.empty(0), value)
                torch.utils.swap_tensors(target, type(target)(value))  # type: ignore[no-untyped-call]
                return
            log.keep(storage, value.untyped_storage())
            value = log.mirror(value, storage)
        elif log.is_mirror(value) and not log.is_mirror(target):
            value = log.real(value)
        _SET_DATA(target, value)
