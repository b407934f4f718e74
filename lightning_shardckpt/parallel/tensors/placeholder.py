"""Tensors that have a shape, but no value here: what a pipeline stage computes with outside of its own layers.

Every stage of a pipeline runs the user's own step. Modules of other stages are there as copies, whose weights are
:class:`Placeholder`: they have a shape, a dtype and a device, but no value. Whatever is computed from one
is unknown, too; when the real activation arrives, the object itself becomes an ordinary tensor. Code that needs a value
it cannot have (control flow, ``item``, writing into state) is told so at that very line.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.pytree import tree_leaves, tree_map
from lightning_shardckpt.compat.torch_tensors import (
    in_functional_transform,
    mark_as_parameter,
    shares_memory,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.graph_entry import GraphEntry, enter

_HERE = frozenset({"device", "is_cuda", "is_cpu", "is_meta", "get_device", "is_leaf", "grad_fn"})
_HERE |= {"requires_grad", "requires_grad_", "_is_param", "__hash__"}
_GEOMETRY = frozenset(
    {"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "layout", "stride", "is_contiguous"}
    | {"is_floating_point", "is_complex", "element_size", "itemsize"}
)
_VALUES = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"}
    | {"__format__", "__contains__", "__reduce_ex__", "is_nonzero", "equal", "allclose", "backward"}
)
_FACTORIES = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
)
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")
)
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_COPIES = frozenset({"new_tensor", "new_full", "full_like"})  # with an unknown value: the C++ code reads the memory
_MOVES = frozenset({"cpu", "cuda"})

_IN_STAGE_RUN: ContextVar[bool] = ContextVar("_IN_STAGE_RUN", default=False)


@contextmanager
def in_stage_run() -> Iterator[None]:
    """Inside, a fresh tensor may become unknown; what is computed between steps is kept, and must not."""
    token = _IN_STAGE_RUN.set(True)
    try:
        yield
    finally:
        _IN_STAGE_RUN.reset(token)


class Placeholder(Tensor):
    """A tensor whose value is on another pipeline stage.

    Its memory is one element, expanded to the shape. Results of any torch function on it are unknown; shapes come from
    running the function on the meta device. Shapes under autocast are right, dtypes may not be.

    Attributes:
        origin: what it is the value of, for messages.
        geometry: a meta tensor with its shape, strides and dtype.
        has_gradient: of a parameter of another stage: whether it has a gradient there.
        is_elsewhere: tells code that knows nothing of pipelines that there is nothing to save or to load.
    """

    origin: str
    is_elsewhere = True
    has_gradient = False
    geometry: Tensor

    @classmethod
    def of(cls, meta: Tensor, origin: str, device: torch.device) -> Placeholder:
        """An unknown tensor with the shape, strides and dtype of ``meta``."""
        with without_torch_function():
            found: Any = _one_element(meta, device)
            found.__class__ = cls
            # Its own: a change of shape in place, or a search by identity, must not reach others of this kind.
            own = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="meta")
            found.origin, found.geometry = origin, own
        return found  # type: ignore[no-any-return]  # it has become one

    @classmethod
    def like(cls, tensor: Tensor, origin: str, device: torch.device) -> Placeholder:
        """An unknown tensor with the (global) shape and dtype of a real one; of a parameter, an unknown parameter."""
        found = cls.of(_as_meta(tensor), origin, device)
        if isinstance(tensor, nn.Parameter):
            notes = {} if isinstance(tensor, Placeholder) else vars(tensor)  # that somebody has given to the parameter
            found.__dict__.update({name: value for name, value in notes.items() if name not in vars(found)})
            mark_as_parameter(found)
            found.requires_grad_(tensor.requires_grad)
        return found

    def become(self, value: Tensor, *, requires_grad: bool) -> GraphEntry | None:
        """Turn this very object into an ordinary tensor over the memory of ``value``.

        Returns:
            Where it entered the autograd graph, if it requires a gradient.
        """
        with without_torch_function(), torch.no_grad():
            if self.grad_fn is not None:
                self.detach_()
            self.requires_grad_(False)
            del self.__dict__["origin"], self.__dict__["geometry"]
            self.__class__ = Tensor  # type: ignore[assignment]  # as torch's UninitializedParameter does
            self.data = value
        return enter(self) if requires_grad else None

    def _gradient(self, access: str, value: Tensor | None = None) -> Tensor | None:
        """Do what reading, setting or deleting ``grad`` does."""
        if access != "__get__":
            self.has_gradient = value is not None
            self.__dict__.pop("_placeholder_gradient", None)
            return None
        if not self.has_gradient:
            return None
        kept = self.__dict__.get("_placeholder_gradient")  # the same object each time, as of a real tensor
        if kept is None or kept.shape != self.shape:
            kept = Placeholder.of(self.geometry, f"the gradient of {self.origin}", self.device)
            self.__dict__["_placeholder_gradient"] = kept
        return kept

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = access = getattr(func, "__name__", str(func))
        if access in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]  # of a property of Tensor
        if name in _HERE or (name in _FACTORIES and _only_like(args, kwargs)):
            with without_torch_function():
                return func(*args, **kwargs)
        if args and isinstance(args[0], Placeholder):
            first = args[0]
            if name in _GEOMETRY:
                return func(first.geometry, *args[1:], **kwargs)
        else:
            first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder))
        if in_functional_transform():
            raise no_value(f"a transform of torch.func around {name}", first)
        if name in ("__repr__", "__str__"):
            return f"<unknown on this pipeline stage: {first.origin}, shape {tuple(first.geometry.shape)}>"
        if access == "__set__" and not isinstance(args[0], Placeholder):
            raise _cannot_write(name, first, args[0])
        if func is torch.autograd.grad:
            raise no_value("torch.autograd.grad", first)
        if name == "grad":
            return first._gradient(access, *args[1:])
        if name in _HOOKS and args[0] is first:
            return RemovableHandle(OrderedDict())  # the stage that has the parameter runs it
        if name == "equal" and args[0].shape != args[1].shape:
            return False
        if name in _VALUES:
            raise no_value(name, first)
        if name.startswith("_foreach_"):
            return _one_by_one(func, name, first, args, kwargs)
        if name == "__deepcopy__":
            return cls.like(first, first.origin, first.device)
        if name in _MOVES:
            return cls.of(first.geometry, first.origin, torch.device(name))
        if name in _COPIES:
            raise no_value(name, first)
        written = [tensor for tensor in _written(name, args, kwargs) if not isinstance(tensor, Placeholder)]
        result = _on_meta(func, name, first, args, kwargs)
        for tensor in written:
            _taint(tensor, first, name)
        return iter(result) if name == "__iter__" else result


def no_value(what: str, placeholder: Placeholder) -> UnsupportedCodeError:
    """The error for code that asks for a value which this stage cannot know."""
    where = f"{what} needs the value of {placeholder.origin}, which this pipeline stage doesn't have. "
    if not _IN_STAGE_RUN.get():
        return UnsupportedCodeError(
            f"{where}Between steps, in hooks and callbacks, values of parameters and gradients can be read only where "
            "the stages have them all: log them from pipeline_modules that every stage runs, or use "
            "pipeline_parallel_size=1. Checkpoints, and lightning_shardckpt.open, have the values of all stages."
        )
    return UnsupportedCodeError(
        f"{where}Every stage runs the step; outside its own layers it knows shapes, not values. Let the code outside "
        "the layers depend on values of the batch alone, move it into a layer or into a module that one stage runs, or "
        "give modules to other stages with pipeline_modules."
    )


def leaked(what: str, placeholder: Placeholder) -> UnsupportedCodeError:
    """The error for a real result that depends on something only another stage has."""
    return UnsupportedCodeError(
        f"{what} depends on {placeholder.origin}, which this pipeline stage doesn't have: between two stages, only the "
        "arguments of the next layer are passed on, in tuples, lists, dicts, dataclasses and outputs of transformers, "
        "not in objects of other classes. Make what is needed an argument of the layers, move the code into a layer, "
        "or say where a module is used: pipeline_modules={'name': 'first' | 'last' | 'every'}."
    )


def first_placeholder(tree: Any) -> Placeholder | None:
    """The first placeholder of a nested structure."""
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Placeholder)), None)


def _one_element(meta: Tensor, device: torch.device) -> Tensor:
    """A tensor of that shape over the memory of one element; no view, so that it may be written to later."""
    return _poisoned(meta.dtype, device).clone().as_strided_(meta.shape, (0,) * meta.ndim)


@lru_cache(maxsize=64)
def _poisoned(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), _poison(dtype), dtype=dtype, device=device)


def _poison(dtype: torch.dtype) -> float | int:
    """A value that shows, where C++ code reads a tensor as a number: that asks no ``__torch_function__``."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _as_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Placeholder):
        return tensor.geometry
    with without_torch_function():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _on_meta(
    func: Callable[..., Any], name: str, first: Placeholder, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run ``func`` for its shapes; an unknown argument that it changed and returned is returned itself."""
    device = first.device
    originals: dict[int, Tensor] = {}

    def to_meta(value: Any) -> Any:
        nonlocal device
        if isinstance(value, Tensor):
            meta = _as_meta(value)
            originals[id(meta)] = value
            return meta
        if isinstance(value, torch.device):
            device = value
            return torch.device("meta")
        return value

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return originals[id(value)] if id(value) in originals else Placeholder.of(value, first.origin, device)

    if name == "to" and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], torch.device(args[1]), *args[2:])
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": torch.device(kwargs["device"])}
    meta_args, meta_kwargs = tree_map(to_meta, (tuple(args), kwargs))
    try:
        with torch.no_grad():
            result = (_in_bfloat16(func) if "grouped_mm" in name else func)(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error).lower():
            raise no_value(name, first) from error
        raise
    return tree_map(back, list(result) if name == "__iter__" else result)


def _in_bfloat16(func: Callable[..., Any]) -> Callable[..., Any]:
    """The meta function of a grouped product takes no other dtype, the CPU's does (torch 2.13)."""

    def narrowed(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    def run(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = func(narrowed(first), *tree_map(narrowed, args), **tree_map(narrowed, kwargs))
        return found.to(first.dtype)

    return run


def _one_by_one(
    func: Callable[..., Any], name: str, first: Placeholder, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any] | None:
    """A function of lists: what it makes, and writes, of known tensors alone is known."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    count = len(lists[0])
    mixed = any(isinstance(arg, Placeholder) for arg in (*args, *kwargs.values()))
    places = [mixed or any(isinstance(each[n], Placeholder) for each in lists if n < len(each)) for n in range(count)]

    def part(arg: Any, unknown: bool) -> Any:
        if not isinstance(arg, list | tuple):
            return arg
        return [item for item, elsewhere in zip(arg, places, strict=True) if elsewhere == unknown]

    if any(len(each) != count for each in lists):
        with without_torch_function():
            return func(*args, **kwargs)  # type: ignore[no-any-return]  # torch says what is wrong
    written = [tensor for tensor, unknown in zip(lists[0], places, strict=True) if unknown] if name[-1] == "_" else []
    for tensor in written:
        if not isinstance(tensor, Placeholder):
            raise _cannot_write(name, first, tensor)
    made = iter(func(*(part(arg, False) for arg in args), **kwargs) or ()) if not all(places) else iter(())
    if name[-1] == "_":
        return None
    guessed = iter(_on_meta(func, name, first, [part(arg, True) for arg in args], kwargs) if any(places) else ())
    return [next(guessed if unknown else made) for unknown in places]


def _only_like(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the first argument of a factory is unknown, and no other is."""
    found = [leaf for leaf in tree_leaves((tuple(args), kwargs)) if isinstance(leaf, Placeholder)]
    return len(found) == 1 and found[0] is (args[0] if args else kwargs.get("input"))


def _written(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the function changes."""
    if kwargs.get("out") is not None:
        return [leaf for leaf in tree_leaves(kwargs["out"]) if isinstance(leaf, Tensor)]
    in_place = name in _IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)] if in_place and args else []


def _cannot_write(name: str, source: Placeholder, written: Tensor) -> UnsupportedCodeError:
    what = f"{name} writes {source.origin}, whose value this pipeline stage doesn't have, into a "
    shape = f"of shape {tuple(written.shape)}. "
    if not _IN_STAGE_RUN.get():
        kind = "parameter" if isinstance(written, nn.Parameter) else "tensor"
        return UnsupportedCodeError(
            f"{what}{kind} {shape}Between steps, a stage can compute with the parameters of another one as long as "
            "what it makes of each stays with that one: averages, penalties and decays of single parameters. What "
            "joins parameters of several stages, such as a norm over all of them, needs pipeline_parallel_size=1; "
            "gradients are clipped by Trainer(gradient_clip_val=…), self.clip_gradients or fabric.clip_gradients."
        )
    kind = "parameter" if isinstance(written, nn.Parameter) else "view of a tensor, or into one that has views,"
    return UnsupportedCodeError(
        f"{what}{kind} {shape}Assign to the tensor itself, build it with torch.cat or torch.where, or move this code "
        "into a layer or into a module that one stage runs."
    )


def _taint(written: Tensor, source: Placeholder, name: str) -> Tensor:
    """A fresh tensor of a step that something unknown was written into is unknown from now on; state must not be."""
    if not _IN_STAGE_RUN.get() or type(written) is not Tensor or shares_memory(written):
        raise _cannot_write(name, source, written)
    with without_torch_function(), torch.no_grad():
        meta, device = _as_meta(written), written.device
        if written.grad_fn is not None:
            written.detach_()
        written.data = _one_element(meta, device)
        written.__class__ = Placeholder
    written.origin, written.geometry = source.origin, meta  # type: ignore[attr-defined]  # it is one now
    return written


def placeholder_positions(leaves: Sequence[Any]) -> Iterator[int]:
    """Positions of the placeholders; of an object that is there twice, the first."""
    seen: set[int] = set()
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Placeholder) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield position
