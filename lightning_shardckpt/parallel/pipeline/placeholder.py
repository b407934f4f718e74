"""Placeholders: tensors with a shape, a dtype and a device, but without a value.

Every pipeline stage runs the user's whole step. Modules of other stages are copies whose parameters are placeholders,
and every result computed from a placeholder is a placeholder. When the real activation arrives, the object itself
becomes an ordinary tensor. Code that needs a value (control flow, ``item``, a write into state) gets an error at that
line.
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

from lightning_shardckpt.compat.torch_tensors import (
    in_functional_transform,
    keep_version,
    mark_as_parameter,
    shares_memory,
    tree_leaves,
    tree_map,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.fqn import ABSENT
from lightning_shardckpt.parallel.tensors.sharded import TAKES_PRECEDENCE

_OWN = frozenset({"device", "is_cuda", "is_cpu", "is_meta", "get_device", "is_leaf", "grad_fn"})
_OWN |= {"requires_grad", "requires_grad_", "_is_param", "__hash__"}
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
_COPIES = frozenset({"new_tensor", "new_full", "full_like"})  # of a placeholder: C++ code reads its memory
_MOVES = frozenset({"cpu", "cuda"})

_IN_STAGE_RUN: ContextVar[bool] = ContextVar("_IN_STAGE_RUN", default=False)


@contextmanager
def in_stage_run() -> Iterator[None]:
    """Inside, a write of a placeholder into a new tensor makes it a placeholder; elsewhere that is an error."""
    token = _IN_STAGE_RUN.set(True)
    try:
        yield
    finally:
        _IN_STAGE_RUN.reset(token)


class Placeholder(Tensor):
    """A tensor whose value is on another pipeline stage.

    Its memory is one element, expanded to the shape. The result of a torch function on it is a placeholder; its shape
    comes from running the function on the meta device. Under autocast the shape is right, but the dtype may be wrong.

    Attributes:
        origin: the parameter or activation that the value is computed from, for messages.
        geometry: a meta tensor with its shape, strides and dtype.
        has_gradient: for a parameter, True if it has a gradient on its own stage.
        is_elsewhere: tells code that knows no pipelines that there is nothing to save or load.
    """

    origin: str
    is_elsewhere = True
    has_gradient = False
    geometry: Tensor

    @classmethod
    def of(cls, meta: Tensor, origin: str, device: torch.device) -> Placeholder:
        """Return a placeholder with the shape, strides and dtype of ``meta``."""
        with without_torch_function():
            made: Any = _one_element(meta, device)
            made.__class__ = cls
            # not `meta` itself, which other placeholders may share: its shape may be changed in place
            geometry = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="meta")
            made.origin, made.geometry = origin, geometry
        return made  # type: ignore[no-any-return]  # it is a placeholder now

    @classmethod
    def like(cls, tensor: Tensor, origin: str, device: torch.device) -> Placeholder:
        """Return a placeholder with the (global) shape and dtype of a tensor; a parameter if that is one."""
        made = cls.of(_as_meta(tensor), origin, device)
        if isinstance(tensor, nn.Parameter):
            attributes = {} if isinstance(tensor, Placeholder) else vars(tensor)
            made.__dict__.update({name: value for name, value in attributes.items() if name not in vars(made)})
            mark_as_parameter(made)
            made.requires_grad_(tensor.requires_grad)
        return made

    def become(self, value: Tensor, *, requires_grad: bool) -> GraphEntry | None:
        """Turn this object into an ordinary tensor over the memory of ``value``.

        Returns:
            The point where it enters the autograd graph; None if it requires no gradient.
        """
        with without_torch_function(), torch.no_grad():
            if self.grad_fn is not None:
                self.detach_()
            self.requires_grad_(False)
            del self.__dict__["origin"], self.__dict__["geometry"]
            self.__class__ = Tensor  # type: ignore[assignment]  # as torch's UninitializedParameter does
            self.data = value
        return _enter(self) if requires_grad else None

    def set_gradient(self, is_there: bool) -> None:
        """Set ``has_gradient``; if True, ``grad`` is another object from now on."""
        self.has_gradient = is_there
        self.__dict__.pop("_placeholder_gradient", None)

    def _access_grad(self, access: str, value: Tensor | None = None) -> Tensor | None:
        """Get, set or delete ``grad``; ``access`` is the name of the property's accessor."""
        if access != "__get__":
            self.set_gradient(value is not None)
            return None
        if not self.has_gradient:
            return None
        gradient = self.__dict__.get("_placeholder_gradient")  # the same object each time, as for a real tensor
        if gradient is None or gradient.shape != self.shape:
            gradient = Placeholder.of(self.geometry, f"the gradient of {self.origin}", self.device)
            self.__dict__["_placeholder_gradient"] = gradient
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = access = getattr(func, "__name__", str(func))
        if access in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]  # of a property of Tensor
        if name in _OWN or (name in _FACTORIES and _only_first_unknown(args, kwargs)):
            with without_torch_function():
                return func(*args, **kwargs)
        if args and isinstance(args[0], Placeholder):
            first = args[0]
            if name in _GEOMETRY:
                return func(first.geometry, *args[1:], **kwargs)
        else:
            first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Placeholder))
        if in_functional_transform():
            raise no_value_error(f"a transform of torch.func around {name}", first)
        if name in ("__repr__", "__str__"):
            return f"<unknown on this pipeline stage: {first.origin}, shape {tuple(first.geometry.shape)}>"
        if access == "__set__" and not isinstance(args[0], Placeholder):
            raise _write_error(name, first, args[0])
        if func is torch.autograd.grad:
            raise no_value_error("torch.autograd.grad", first)
        if name == "grad":
            return first._access_grad(access, *args[1:])
        if name in _HOOKS and args[0] is first:
            return RemovableHandle(OrderedDict())  # the stage that has the parameter runs it
        if name == "equal" and args[0].shape != args[1].shape:
            return False
        if name in _VALUES or name.startswith("_foreach_"):
            raise no_value_error(name, first)
        if name == "__deepcopy__":
            return cls.like(first, first.origin, first.device)
        if name in _MOVES:
            return cls.of(first.geometry, first.origin, torch.device(name))
        if name in _COPIES:
            raise no_value_error(name, first)
        written = [tensor for tensor in _written(name, args, kwargs) if not isinstance(tensor, Placeholder)]
        result = _run_on_meta(func, name, first, args, kwargs)
        for tensor in written:
            _turn_into_placeholder(tensor, first, name)
        return iter(result) if name == "__iter__" else result


TAKES_PRECEDENCE.add(Placeholder)
ABSENT.add(Placeholder)


def no_value_error(what: str, placeholder: Placeholder) -> UnsupportedCodeError:
    """Return the error for code that needs the value of a placeholder."""
    where = f"{what} needs the value of {placeholder.origin}, which this pipeline stage doesn't have. "
    if not _IN_STAGE_RUN.get():
        return UnsupportedCodeError(
            f"{where}Between steps, hooks and callbacks can read only parameters and gradients that every stage has: "
            "log them from Pipeline(modules=…) that every stage runs, or use pipeline_parallel_size=1. Checkpoints, "
            "and lightning_shardckpt.load_keys, have the values of all stages."
        )
    return UnsupportedCodeError(
        f"{where}Every stage runs the step; outside its own layers it knows shapes, not values. Let the code outside "
        "the layers depend only on values of the batch, move it into a layer or into a module that one stage runs, or "
        "assign modules to other stages with Pipeline(modules=…)."
    )


def leak_error(what: str, placeholder: Placeholder) -> UnsupportedCodeError:
    """Return the error for a result of this stage that depends on a value of another stage."""
    return UnsupportedCodeError(
        f"{what} depends on {placeholder.origin}, which this pipeline stage doesn't have: between two stages, only the "
        "arguments of the next layer are passed on, in tuples, lists, dicts, dataclasses and outputs of transformers, "
        "not in objects of other classes. Pass the value as an argument of the layers, move the code into a layer, "
        "or say where a module is used: Pipeline(modules={'name': 'first' | 'last' | 'every'})."
    )


def first_placeholder(tree: Any) -> Placeholder | None:
    """Return the first placeholder of a nested structure, if any."""
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Placeholder)), None)


def _one_element(meta: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with the shape of ``meta`` over one element; no view, so that it can be written to later."""
    return _invalid_element(meta.dtype, device).clone().as_strided_(meta.shape, (0,) * meta.ndim)


@lru_cache(maxsize=64)
def _invalid_element(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a conspicuous value: C++ code that reads a number does not call ``__torch_function__``."""
    if dtype.is_floating_point or dtype.is_complex:
        value = math.nan
    else:
        value = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device=device)


def _as_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Placeholder):
        return tensor.geometry
    with without_torch_function():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _run_on_meta(
    func: Callable[..., Any], name: str, first: Placeholder, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run ``func`` on the meta device, and return placeholders; an argument that it returns stays itself."""
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

    def from_meta(value: Any) -> Any:
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
            raise no_value_error(name, first) from error
        raise
    return tree_map(from_meta, list(result) if name == "__iter__" else result)


def _in_bfloat16(func: Callable[..., Any]) -> Callable[..., Any]:
    """Run a grouped product in bfloat16: its meta function supports no other dtype, unlike the CPU's (torch 2.13)."""

    def cast(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    def run(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        product: Tensor = func(cast(first), *tree_map(cast, args), **tree_map(cast, kwargs))
        return product.to(first.dtype)

    return run


def _only_first_unknown(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the first argument is the only placeholder."""
    placeholders = [leaf for leaf in tree_leaves((tuple(args), kwargs)) if isinstance(leaf, Placeholder)]
    return len(placeholders) == 1 and placeholders[0] is (args[0] if args else kwargs.get("input"))


def _written(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the function changes."""
    if kwargs.get("out") is not None:
        return [leaf for leaf in tree_leaves(kwargs["out"]) if isinstance(leaf, Tensor)]
    in_place = name in _IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)] if in_place and args else []


def _write_error(name: str, source: Placeholder, written: Tensor) -> UnsupportedCodeError:
    what = f"{name} writes {source.origin}, whose value this pipeline stage doesn't have, into a "
    shape = f"of shape {tuple(written.shape)}. "
    if not _IN_STAGE_RUN.get():
        kind = "parameter" if isinstance(written, nn.Parameter) else "tensor"
        return UnsupportedCodeError(
            f"{what}{kind} {shape}Between steps, code may compute with the parameters of another stage as long as the "
            "result depends on one parameter: averages, penalties and decays of single parameters. Results that "
            "combine parameters of several stages, such as a norm over all of them, need pipeline_parallel_size=1; "
            "clip gradients by Trainer(gradient_clip_val=…), self.clip_gradients or fabric.clip_gradients."
        )
    kind = "parameter" if isinstance(written, nn.Parameter) else "view of a tensor, or into one that has views,"
    return UnsupportedCodeError(
        f"{what}{kind} {shape}Assign to the tensor itself, build it with torch.cat or torch.where, or move this code "
        "into a layer or into a module that one stage runs."
    )


def _turn_into_placeholder(written: Tensor, source: Placeholder, name: str) -> None:
    """Turn a new tensor that a placeholder was written into, into a placeholder; raise for state."""
    if not _IN_STAGE_RUN.get() or type(written) is not Tensor or shares_memory(written):
        raise _write_error(name, source, written)
    with without_torch_function(), torch.no_grad():
        meta, device = _as_meta(written), written.device
        if written.grad_fn is not None:
            written.detach_()
        written.data = _one_element(meta, device)
        written.__class__ = Placeholder
    written.origin, written.geometry = source.origin, meta  # type: ignore[attr-defined]  # it is a placeholder now


def placeholder_positions(leaves: Sequence[Any]) -> Iterator[int]:
    """Yield the position of each placeholder, the first one if an object occurs twice."""
    seen: set[int] = set()
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Placeholder) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield position


# ── entries into the autograd graph ─────────────────────────────────────────────────────────────────────────────────


class GraphEntry:
    """The point where a received activation enters the autograd graph of a stage.

    Attributes:
        token: an empty leaf that the activation depends on.
        grad: the activation's gradient, after the backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.token = torch.empty(0, device=device, requires_grad=True)
        self.grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, entry: GraphEntry) -> Tensor:
        ctx.entry = entry
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        ctx.entry.grad = grad if ctx.entry.grad is None else ctx.entry.grad + grad
        return None, torch.empty_like(ctx.entry.token), None


def _enter(value: Tensor) -> GraphEntry:
    """Make ``value`` itself depend on a new entry: user code may change it in place, as it is no leaf."""
    entry = GraphEntry(value.device)
    # enable_grad: the first use may be under no_grad. keep_version: checkpoint may have saved the tensor already.
    with torch.enable_grad(), keep_version(value):
        _Enter.apply(value, entry.token, entry)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return entry
