"""Tensors on the meta device while modules are built or initialised, seen by two torch modes.

In-place writes to them are counted. Some of them are stand-ins: they show the device of a tensor with values, mix with
tensors that have memory, and draw as many random numbers. Code that reads their values fails with torch's own error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Known:
    """The storage of a tensor, which keeps its id, the writes to it, and the device that it shows."""

    storage: torch.UntypedStorage
    writes: int = 0
    device: torch.device | None = None


class MetaTensors:
    """What is known of tensors on the meta device, by their storages.

    Attributes:
        touched: ids of the storages that operations have read or written, since the caller emptied it.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self.touched = set[int]()

    def know(self, tensor: Tensor, device: torch.device | None = None) -> None:
        """Count the writes to a tensor from now on, and let it stand for one on ``device``, if that is given."""
        known = self._known.setdefault(memory_id(tensor), _Known(tensor.untyped_storage()))
        known.device = known.device or device

    def count(self, tensor: Tensor) -> None:
        """Count a write to a tensor."""
        self.know(tensor)
        self._known[memory_id(tensor)].writes += 1

    def writes(self, tensor: Tensor) -> int | None:
        """Return the number of writes to a tensor; None for one that is not known."""
        known = self._find(tensor)
        return None if known is None else known.writes

    def device(self, tensor: Any) -> torch.device | None:
        """Return the device that a tensor shows; None for tensors that stand for nothing."""
        known = self._find(tensor) if isinstance(tensor, Tensor) else None
        return None if known is None else known.device

    def _find(self, tensor: Tensor) -> _Known | None:
        return self._known.get(memory_id(tensor)) if _is_without(tensor) else None

    def make_stand_in(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory that stands for ``tensor``."""
        made = torch.empty_like(tensor, device="meta")
        self.know(made, tensor.device)
        return made

    def drop_memory(self, parameter: nn.Parameter) -> None:
        """Turn a parameter into a stand-in without memory, the same object, if torch can do that.

        It can't for objects with weak references. Other classes than ``nn.Parameter`` keep their memory, too.
        """
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_meta:
            return
        with below_functions():
            meta = nn.Parameter(self.make_stand_in(parameter), parameter.requires_grad)
            meta.__dict__.update(vars(parameter))
            try:
                torch.utils.swap_tensors(parameter, meta)  # type: ignore[no-untyped-call]
            except RuntimeError:
                return

    @contextmanager
    def watched(self, *, draws: bool) -> Iterator[None]:
        """Inside, count writes, and let stand-ins act as tensors with values; what is computed from them is one, too.

        Args:
            draws: whether an operation on stand-ins draws the random numbers that it would draw for values.
        """
        with _Operations(self, draws), _Shown(self, draws):
            yield


def _is_without(tensor: Tensor) -> bool:
    return not dispatches(type(tensor)) and tensor.layout is torch.strided and tensor.device.type == "meta"


class _Operations(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    def __init__(self, tensors: MetaTensors, draws: bool) -> None:
        super().__init__()
        self._tensors, self._draws = tensors, draws

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
            self._tensors.count(tensor)
        self._tensors.touched.update(map(memory_id, without))
        shown = next((device for t in without if (device := self._tensors.device(t)) is not None), None)
        if shown is None:
            return func(*args, **kwargs)
        if any(not t.is_meta for t in changed):
            raise StateError(f"{func} would write values of a tensor without memory to one with memory")
        if self._draws and torch.Tag.nondeterministic_seeded in func.tags:  # on ones, which are dropped
            real = [torch.ones_like(t, device=shown) if isinstance(t, Tensor) and t.is_meta else t for t in leaves]
            real_args, real_kwargs = tree_unflatten(real, spec)
            func(*real_args, **real_kwargs)
        leaves = [t.to("meta") if isinstance(t, Tensor) and not t.is_meta else t for t in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        for tensor in filter(_is_without, _tensors(result)):
            self._tensors.know(tensor, shown)
        return result


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

    def __init__(self, tensors: MetaTensors, draws: bool) -> None:
        super().__init__()
        self._tensors, self._draws = tensors, draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (_DEVICE, _IS_META, _IS_CPU):
            tensor, frame = args[0], sys._getframe(1)
            with below_functions():
                device, is_without = self._tensors.device(tensor), _is_without(tensor)
            if func == _IS_META and is_without and frame.f_globals.get("__name__") == "torch.nn.init":
                self._initialize(tensor, device, frame)
                return True
            if device is not None:
                return {_DEVICE: device, _IS_META: False, _IS_CPU: device.type == "cpu"}[func]
        elif func == _SET_DATA:
            with below_functions():
                if self._tensors.device(args[0]) is not None and not args[1].is_meta:
                    args = (args[0], self._tensors.make_stand_in(args[1]))
        return func(*args, **(kwargs or {}))

    def _initialize(self, tensor: Tensor, device: torch.device | None, frame: FrameType) -> None:
        """Count a function of ``torch.nn.init``, which has asked for the device, and draw its random numbers."""
        self._tensors.count(tensor)
        self._tensors.touched.add(memory_id(tensor))
        if self._draws and device is not None:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            real = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            arguments = {name: frame.f_locals[name] for name in names}
            frame.f_globals[code.co_name](**{n: real if value is tensor else value for n, value in arguments.items()})
