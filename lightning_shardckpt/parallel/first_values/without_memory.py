"""Operations on tensors without memory: two torch modes that run while modules are built or initialised.

`Writes` counts in-place writes to tensors on the meta device. `stand_ins` makes some of these tensors act as what they
stand for, tensors with values: they show another device, mix with tensors that have memory, and draw as many random
numbers. Code that reads their values fails with torch's own error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.pytree import tree_flatten, tree_unflatten
from lightning_shardckpt.compat.torch_tensors import DispatchMode, Overload, below_functions, dispatches, memory_id
from lightning_shardckpt.compat.torch_tensors import written_arguments as written
from lightning_shardckpt.errors import StateError

_DEVICE: Any = Tensor.device.__get__
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class Writes:
    """The number of in-place writes to each tensor on the meta device, by its storage."""

    def __init__(self) -> None:
        self._counts: dict[int, list[Any]] = {}  # with the storage, which keeps its id

    def add(self, tensor: Tensor, number: int = 1) -> None:
        """Count writes to a tensor; 0 makes it known."""
        self._counts.setdefault(memory_id(tensor), [tensor.untyped_storage(), 0])[1] += number

    def of(self, tensor: Tensor) -> int | None:
        """Return the number of writes; None for a tensor that is not known."""
        found = self._counts.get(memory_id(tensor)) if _is_without(tensor) else None
        return None if found is None else int(found[1])


class StandIns:
    """The tensors on the meta device that stand for tensors with values, and all that is computed from them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, torch.device]] = {}  # by id of the storage, which is kept

    def add(self, tensor: Tensor, device: torch.device) -> None:
        """Let a tensor stand for one on ``device``."""
        self._known.setdefault(memory_id(tensor), (tensor.untyped_storage(), device))

    def device(self, tensor: Any) -> torch.device | None:
        """Return the device that a tensor shows; None for tensors that stand for nothing."""
        if not isinstance(tensor, Tensor) or not _is_without(tensor):
            return None
        found = self._known.get(memory_id(tensor))
        return None if found is None else found[1]


def _is_without(tensor: Tensor) -> bool:
    return not dispatches(type(tensor)) and tensor.layout is torch.strided and tensor.device.type == "meta"


@contextmanager
def watch(
    writes: Writes, stand_ins: StandIns, *, draws: bool, touched: Callable[[Iterable[int]], None] | None = None
) -> Iterator[None]:
    """Inside, count writes to tensors on the meta device, and let ``stand_ins`` act as tensors with values.

    Args:
        writes: gets the counts.
        stand_ins: the tensors; what is computed from them is added.
        draws: whether an operation on stand-ins draws the random numbers that it would draw for values.
        touched: is called with the ids of the storages without memory that an operation reads or writes.
    """
    with _Operations(writes, stand_ins, draws, touched), _Shown(writes, stand_ins, draws, touched):
        yield


class _Operations(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    def __init__(
        self, writes: Writes, stand_ins: StandIns, draws: bool, touched: Callable[[Iterable[int]], None] | None
    ) -> None:
        super().__init__()
        self._writes, self._stand_ins, self._draws, self._touched = writes, stand_ins, draws, touched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(dispatches, types)):
            with below_functions():
                _refuse_changes_of_shards(func, args, kwargs)
            return func(*args, **kwargs)
        with below_functions():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = _tensors(written(func, args, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        without = [t for t in leaves if isinstance(t, Tensor) and _is_without(t)]
        for tensor in filter(_is_without, changed):
            self._writes.add(tensor)
        if self._touched is not None:
            self._touched(map(memory_id, without))
        shown = next((device for t in without if (device := self._stand_ins.device(t)) is not None), None)
        if shown is None:
            return func(*args, **kwargs)
        if any(not t.is_meta for t in changed):
            raise StateError(f"{func} would write values of a tensor without memory to one with memory")
        if self._draws and torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(func, leaves, spec, shown)
        leaves = [t.to("meta") if isinstance(t, Tensor) and not t.is_meta else t for t in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        for tensor in filter(_is_without, _tensors(result)):
            self._stand_ins.add(tensor, shown)
        return result

    def _draw(self, func: Overload, leaves: list[Any], spec: Any, device: torch.device) -> None:
        """Draw the random numbers of ``func``, on tensors of ones that are dropped."""
        real = [torch.ones_like(t, device=device) if isinstance(t, Tensor) and t.is_meta else t for t in leaves]
        args, kwargs = tree_unflatten(real, spec)
        func(*args, **kwargs)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _refuse_changes_of_shards(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tensor in _tensors(written(func, args, kwargs)):
        if tensor.device.type == "meta":
            raise StateError(
                f"cannot run {func} on a parameter of shape {tuple(tensor.shape)} that was parallelised: initialise "
                "parameters before parallelising them"
            )


class _Shown(TorchFunctionMode):
    """Shows the device of the tensor that a stand-in stands for, where no operation is dispatched.

    Functions of ``torch.nn.init`` that depend on values do nothing for tensors on the meta device. They count as one
    write, and draw for stand-ins the random numbers that they draw for values.
    """

    def __init__(
        self, writes: Writes, stand_ins: StandIns, draws: bool, touched: Callable[[Iterable[int]], None] | None
    ) -> None:
        super().__init__()
        self._writes, self._stand_ins, self._draws, self._touched = writes, stand_ins, draws, touched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (_DEVICE, _IS_META, _IS_CPU):
            tensor, frame = args[0], sys._getframe(1)
            with below_functions():
                device, is_without = self._stand_ins.device(tensor), _is_without(tensor)
            if func == _IS_META and is_without and frame.f_globals.get("__name__") == "torch.nn.init":
                self._initialize(tensor, device, frame)
                return True
            if device is not None:
                return {_DEVICE: device, _IS_META: False, _IS_CPU: device.type == "cpu"}[func]
        elif func == _SET_DATA:
            with below_functions():
                if self._stand_ins.device(args[0]) is not None and not args[1].is_meta:
                    args = (args[0], _stand_in(args[1], self._stand_ins, args[1].device))
        return func(*args, **(kwargs or {}))

    def _initialize(self, tensor: Tensor, device: torch.device | None, frame: FrameType) -> None:
        """Count a function of ``torch.nn.init``, which has asked for the device, and draw its random numbers."""
        self._writes.add(tensor)
        if self._touched is not None:
            self._touched([memory_id(tensor)])
        if self._draws and device is not None:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            real = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            arguments = {name: frame.f_locals[name] for name in names}
            frame.f_globals[code.co_name](**{n: real if value is tensor else value for n, value in arguments.items()})


def _stand_in(tensor: Tensor, stand_ins: StandIns, device: torch.device) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    stand_ins.add(made, device)
    return made


def drop_memory(parameter: nn.Parameter, stand_ins: StandIns) -> bool:
    """Turn a parameter into a stand-in without memory, the same object; return False if torch can't do that.

    It can't for objects with weak references. Other classes than ``nn.Parameter`` keep their memory, too.
    """
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_meta:
        return False
    with below_functions():
        device = parameter.device
        meta = nn.Parameter(_stand_in(parameter, stand_ins, device), parameter.requires_grad)
        meta.__dict__.update(vars(parameter))
        try:
            torch.utils.swap_tensors(parameter, meta)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False
    return True
