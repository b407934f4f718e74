"""The implementation of torch's functions for sharded tensors: a table at the end has it by the names of functions.

The default is `run_gathered`, which is always right: the function runs on gathered tensors, and values that it writes,
also through views, reach the shards. Others avoid its communication and memory, or mean something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, rows_of, shape_of, spec_of
from lightning_shardckpt.compat.torch_tensors import (
    map_tensors,
    memory_id,
    version_of,
    with_torch_function,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gathered_weights import version_key
from lightning_shardckpt.parallel.tensors.placement import describe, local_part, sharding_of
from lightning_shardckpt.parallel.tensors.sharded import (
    TAKES_PRECEDENCE,
    Function,
    Handler,
    ShardedTensor,
    as_sharded,
    is_alike,
    is_sharded,
    map_nested,
    new_like,
    rows_like,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import (
    GATHERED,
    RECEIVER,
    REMEDY,
    Scatter,
    check_equal_on_ranks,
    gather_whole,
    is_equal_on_ranks,
    record_numbers,
    share_rng,
)

# ── functions of whole tensors ──────────────────────────────────────────────────────────────────────────────────────


class ShardView(Tensor):
    """A view of a gathered tensor, such as ``weight[0]``; changing it changes the shards."""

    _origin: GatheredTensor

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if handler_of(func) in (run_plain, _differentiate, _register_hook):
            return run_plain(func, args, kwargs or {})
        if not TAKES_PRECEDENCE.isdisjoint(types):
            return NotImplemented
        return run_gathered(func, tuple(args), kwargs or {})


@dataclass(slots=True)
class GatheredTensor:
    """A sharded tensor, the gathered one, and the `version_key` of ``shards`` when it was gathered."""

    shards: DTensor
    whole: Tensor
    version: tuple[int, int]

    def refresh(self) -> None:
        """Gather again into the same memory, if the shards have changed."""
        if self.version != version_key(self.shards):
            with torch.no_grad():
                self.whole.copy_(gather_whole(new_like(self.shards, local_tensor(self.shards).detach()), "a view"))
            self.version = version_key(self.shards)

    def write_back(self, what: str) -> None:
        """Copy the whole tensor, which must be equal on all ranks, into the shards, with its history."""
        sharding = sharding_of(self.shards)
        check_equal_on_ranks(self.whole.detach(), sharding, what)
        if torch.is_grad_enabled() and self.whole.requires_grad:
            self.shards.copy_(Scatter.apply(self.whole, self.shards))  # type: ignore[no-untyped-call]  # torch's
        else:
            with torch.no_grad():
                local_tensor(self.shards).copy_(local_part(self.whole, sharding))
            increment_version(self.shards)
        self.version = version_key(self.shards)


_kept: dict[tuple[int, bool], GatheredTensor] | None = None
"""Parameters that the running step has gathered for autograd; None between steps."""


@contextmanager
def keep_gathered() -> Iterator[None]:
    """Inside, a parameter is gathered once for autograd, and again only after a change."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def _gather_once(tensor: DTensor, what: str, *, on_model_axes: bool) -> GatheredTensor:
    """Gather a tensor, or return the one that `keep_gathered` kept."""
    key, version = (id(tensor), on_model_axes), version_key(tensor)
    kept = _kept if torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf else None
    if kept is not None and key in kept and kept[key].version == version:
        return kept[key]
    gathered = GatheredTensor(tensor, gather_whole(tensor, what, on_model_axes=on_model_axes), version)
    if kept is not None:
        kept[key] = gathered
    return gathered


def run_gathered(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors; values that it writes into their memory reach the shards.

    A result over such memory is the sharded tensor itself if that was written, and else a view of it. All other results
    are plain; beside activations of a tensor-parallel plan, parameters are DTensors as the plan shards them.
    Collective: every rank that has a shard must call it.
    """
    with without_torch_function():
        name = name_of(func)
        written = [*tensors_in(args[:1] if writes_first(func) else ()), *tensors_in(kwargs.get("out"))]
        if torch.is_grad_enabled():
            for target in written:
                leaf = target._origin.shards if isinstance(target, ShardView) else target
                if leaf.requires_grad and leaf.is_leaf:
                    raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        tensors = tensors_in(args, kwargs)
        on_model_axes = bool(written) or not any(isinstance(t, DTensor) and not is_sharded(t) for t in tensors)
        origins: dict[int, GatheredTensor] = {}  # by memory
        arguments: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id: itself, the plain one, and that one's version

        def to_plain(value: Tensor) -> Tensor:
            if id(value) in arguments:
                return arguments[id(value)][1]
            if isinstance(value, ShardView):
                origin, plain = value._origin, value.as_subclass(Tensor)
                origin.refresh()
            elif is_sharded(value):
                origin = _gather_once(value, name, on_model_axes=on_model_axes)
                plain = origin.whole
                if torch.is_grad_enabled() and any(value is target for target in written):
                    plain = plain.clone()  # which autograd allows to change in place
                    origin = GatheredTensor(value, plain, origin.version)
            else:
                return value
            if not isinstance(plain, DTensor):
                origins[_memory(plain)] = origin
            arguments[id(value)] = value, plain, version_of(plain)
            return plain

        result = func(*map_nested(args, to_plain), **map_nested(kwargs, to_plain))
        for memory in dict.fromkeys(_memory(t) for _, t, before in arguments.values() if version_of(t) != before):
            origins[memory].write_back(name)  # changed by the function, or because of a flag, such as inplace=True
        targets = {id(arguments[id(t)][1]): t for t in written if id(t) in arguments}
        return map_tensors(lambda t: targets[id(t)] if id(t) in targets else _connect(t, origins), result)


def connect_to_shards(value: Tensor, shards: DTensor, whole: Tensor) -> Tensor:
    """Turn a plain tensor over the memory of ``whole``, gathered from ``shards``, into a `ShardView` of them."""
    return _connect(value, {_memory(whole): GatheredTensor(shards, whole, version_key(shards))})


def _connect(value: Tensor, origins: dict[int, GatheredTensor]) -> Tensor:
    """Turn a result over the memory of a gathered tensor into a `ShardView`; return other results as they are."""
    origin = origins.get(_memory(value)) if type(value) is Tensor else None
    if origin is not None:
        value.__class__ = ShardView
        value._origin = origin  # type: ignore[attr-defined]  # it is a ShardView now
    return value


def _memory(value: Tensor) -> int:
    """Return an id of a tensor's memory; 0 for a tensor that can't share that of a gathered one."""
    return 0 if isinstance(value, DTensor) or value.layout != torch.strided else memory_id(value)


# ── other kinds ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_plain(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function as torch's DTensor does."""
    with without_torch_function():
        return func(*args, **kwargs)


def _refuse_address(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedCodeError(
        f"{name_of(func)} asks for the memory of a sharded tensor of shape {tuple(args[0].shape)}, and this rank has "
        "only some of its rows. Code that works on raw memory (custom kernels, 8-bit optimizers) can't use it: pass "
        "tensor.full_tensor(), train without sharding (data_parallel_shard_size=1), or use another optimizer."
    )


def _make_like(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor, *rest), requires_grad = args, kwargs.get("requires_grad", False)
    with without_torch_function():
        made = func(local_tensor(tensor), *rest, **{**kwargs, "requires_grad": False})
        return new_like(tensor, made).requires_grad_(requires_grad)


def _draw(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor on every rank; functions of torch.nn.init may change leaves."""
    first = next(t for t in tensors_in(args, kwargs) if is_sharded(t))
    sharding, is_initializer = sharding_of(first), getattr(func, "__module__", None) == "torch.nn.init"
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_initializer), ExitStack() as stack:
        for peers in (*sharding.data_axes, *sharding.others):
            state = torch.cuda.get_rng_state(first.device) if first.is_cuda else torch.get_rng_state()
            mark = float(zlib.crc32(state.numpy().tobytes()))
            if any(numbers != [mark] for numbers in peers.share(f"{name_of(func)} of random numbers", [mark])):
                stack.enter_context(share_rng(peers.reads))
        return run_gathered(func, args, kwargs)


# ── functions of rows ───────────────────────────────────────────────────────────────────────────────────────────────


def run_elementwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to this rank's rows, if its tensors are sharded alike or have one element that all ranks have.

    Optimizer steps consist of these calls. Autograd reaches parameters only through their gather.
    """
    records, name = torch.is_grad_enabled(), name_of(func)
    first: ShardedTensor | None = None
    rows, numbers = list[Any](), list[float]()
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is ShardedTensor:
            first = value if first is None else first
            is_like_first = spec_of(value) is spec_of(first) or is_alike(value, first)
            if not is_like_first or (records and name != "detach" and value.requires_grad):
                return run_gathered(func, args, kwargs)
            value = rows_of(value)
        elif isinstance(value, Tensor):
            is_number = kind is Tensor and not value.ndim and not value.requires_grad
            if first is None or not is_number or not is_equal_on_ranks(value, sharding_of(first), name):
                return run_gathered(func, args, kwargs)
        elif kind is float or kind is int:
            numbers.append(value)
        rows.append(value)
    if first is None or "out" in kwargs:
        return run_gathered(func, args, kwargs)
    result = func(*rows[: len(args)], **dict(zip(kwargs, rows[len(args) :], strict=True)))
    if writes_first(func):
        if numbers:
            record_numbers(name, shape_of(first), numbers)
        increment_version(first)
        return first
    if not isinstance(result, Tensor):
        return result
    if name in ("cpu", "cuda", "to") and result.device != rows_of(first).device:
        return run_gathered(func, args, kwargs)
    return first if result is rows_of(first) else new_like(first, result)


def _run_on_lists(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of lists, such as ``_foreach_add``, to the rows of each list's tensors.

    The tensors at one position of all lists must be plain, or sharded alike beside numbers, such as a step count.
    """
    with without_torch_function():
        lists = [value for value in args if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)]
        examples = [next((t for t in row if type(t) is ShardedTensor), None) for row in zip(*lists, strict=False)]
        pairs = [(t, example) for values in lists for t, example in zip(values, examples, strict=False)]
        records = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs))
        if records or not all(_fits(t, example) for t, example in pairs):
            return run_gathered(func, args, kwargs)
        if writes_first(func):
            values = [n for value in (*args, *kwargs.values()) for n in (value if type(value) is list else [value])]
            if numbers := [value for value in values if type(value) in (float, int)]:
                record_numbers(name_of(func), args[0][0].shape, numbers)
        rows, keywords = map_nested((args, kwargs), local_tensor)
        results = func(*rows, **keywords)
        if results is None or writes_first(func):
            return None if results is None else args[0]
        made = (t if example is None else new_like(example, t) for t, example in zip(results, examples, strict=True))
        return type(results)(made)


def _fits(tensor: Tensor, example: DTensor | None) -> bool:
    """Return whether a function of lists may have this rank's part of a tensor beside this rank's rows of another."""
    if type(tensor) is ShardedTensor:
        return example is not None and is_alike(tensor, example)
    return type(tensor) in (Tensor, torch.nn.Parameter) and (example is None or not tensor.ndim)


def _run_each(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function such as ``_foreach_norm`` to one tensor after the other, so that one is gathered at a time."""
    tensors, *rest = args
    return tuple(run_gathered(func, ([tensor], *rest), kwargs)[0] for tensor in tensors)


# ── hooks, and gradients ────────────────────────────────────────────────────────────────────────────────────────────


def gather_arguments(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a custom autograd function with sharded tensors gathered. Differentiable."""
    if not any(is_sharded(arg) for arg in args):
        return args
    with without_torch_function():
        return tuple(gather_whole(arg, function.__name__) if is_sharded(arg) else arg for arg in args)


def refuse_unused_copies(inputs: Sequence[Any], gradients: Sequence[Tensor | None] | None) -> None:
    """Raise if gathered copies of parameters are among ``inputs`` of ``torch.autograd.grad``, and all are unused.

    ``gradients`` is None if autograd has refused unused inputs.
    """
    found = [None] * len(inputs) if gradients is None else gradients
    copies = [(t, g) for t, g in zip(inputs, found, strict=True) if hasattr(getattr(t, "grad_fn", None), GATHERED)]
    if copies and all(gradient is None for _, gradient in copies):
        raise UnsupportedCodeError(
            "a custom autograd function, such as an adjoint method, runs a module in its backward, and asks "
            "torch.autograd.grad for gradients of parameters that were its arguments, the first of shape "
            f"{tuple(copies[0][0].shape)}. It got gathered copies of them, but the module uses the parameters. Ask for "
            "those of the module itself there, use torch.utils.checkpoint (of torchdiffeq odeint, not odeint_adjoint), "
            "or call torch.autograd.backward, and don't pass the parameters."
        )


def _differentiate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch.autograd.grad or backward with graph edges in place of sharded inputs, and sharded outputs gathered.

    So ``__torch_function__`` stays enabled while hooks of the user run.
    """
    inputs = args[1] if func is torch.autograd.grad else kwargs.get("inputs") or ()
    for tensor in inputs:
        if isinstance(tensor, DTensor) and RECEIVER in tensor.__dict__:
            raise UnsupportedCodeError(
                f"{func.__name__} asks for the gradient of {describe(tensor)}. fully_shard computes gradients of "
                f"parameters only in loss.backward(). {REMEDY}"
            )
    with without_torch_function():
        edges = tuple(get_gradient_edge(t) if is_sharded(t) else t for t in inputs)
        options = {name: value for name, value in kwargs.items() if name != "inputs"}
        gather = lambda t: gather_whole(t, "backward") if is_sharded(t) else t  # noqa: E731
        outputs, options = map_nested((args[0], options), gather)
    if func is not torch.autograd.grad:
        return func(outputs, **options, inputs=edges or None)
    gradients = func(outputs, edges, **options)
    with without_torch_function():
        return tuple(_as_input(gradient, tensor) for gradient, tensor in zip(gradients, inputs, strict=True))


def _as_input(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return the gradient of an input with the sharding of the input."""
    if not isinstance(tensor, ShardedTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != tensor.placements:  # such as a partial sum
        gradient = gradient.redistribute(placements=tensor.placements)
    return as_sharded(gradient)


def _register_hook(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with without_torch_function():
        return func(tensor, wrap_hook(hook, after=name_of(func) != "register_hook"))


def wrap_hook(hook: Function, *, after: bool) -> Function:
    """Return a hook that calls the user's with the sharded gradient of all batches; the user's may return a plain one.

    ``after``: True if it is called with the tensor, after its gradient has been accumulated.
    """

    @wraps(hook)
    def on_accumulated(leaf: Tensor) -> None:
        with with_torch_function():
            if leaf.grad is not None:
                hook(leaf)

    @wraps(hook)
    def on_gradient(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # only other tensors of the same gather have one
            return None
        with with_torch_function():
            new: Tensor | None = hook(as_sharded(gradient) if isinstance(gradient, DTensor) else gradient)
        if new is None or not isinstance(gradient, DTensor):
            return new
        with without_torch_function():
            return new if is_alike(new, gradient) else new_like(gradient, rows_like(new, gradient, "a hook"))

    return on_accumulated if after else on_gradient


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────

_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv
    ifloordiv mod rmod imod pow rpow ipow neg abs pos eq ne lt le gt ge and rand iand or ror ior xor rxor ixor
    invert lshift rlshift ilshift rshift rrshift irshift
"""
_WRITERS = {"__setitem__", *(f"__{name}__" for name in _OPERATORS.split() if name[0] == "i" and name != "invert")}
_TABLE: dict[Handler, str] = {
    # read shapes, dtypes and flags, which DTensor answers for the whole tensor, or act on its place in the graph
    run_plain: """
        size dim ndimension numel nelement is_floating_point is_complex is_signed is_conj is_neg element_size
        is_contiguous stride storage_offset has_names is_inference is_shared is_pinned get_device requires_grad_ __len__
        is_same_size __hash__ __dir__ _is_view is_coalesced _is_zerotensor result_type can_cast is_tensor is_storage
        is_distributed is_set_to _has_compatible_shallow_copy_type _has_grad_dtype_override
        backward retain_grad __reduce_ex__ __setstate__ detach_
        """,
    run_gathered: "T H mT mH real imag data grad",  # all other properties are metadata
    _register_hook: "register_hook register_post_accumulate_grad_hook",
    _refuse_address: "data_ptr storage untyped_storage _typed_storage share_memory_ __dlpack__",
    _draw: """
        rand_like randn_like randint_like uniform_ normal_ bernoulli_ random_ exponential_ log_normal_ cauchy_
        geometric_ kaiming_uniform_ kaiming_normal_ constant_
        """,
    _make_like: "zeros_like ones_like full_like empty_like",
    # compute each element from the elements at its position
    run_elementwise: """
        add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder pow float_power neg
        negative abs absolute sign sgn signbit exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin
        cos tan asin acos atan atan2 sinh cosh tanh erf erfc erfinv sigmoid logit clamp clip clamp_min clamp_max
        maximum minimum fmax fmin where lerp addcmul addcdiv eq ne lt le gt ge greater greater_equal less less_equal
        not_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
        isfinite isinf isnan isposinf isneginf nan_to_num floor ceil round trunc fix frac copysign hypot xlogy
        masked_fill clone detach contiguous to type float double half bfloat16 int long short char byte bool cpu
        cuda copy zero fill alias positive ldexp nextafter heaviside deg2rad rad2deg digamma lgamma i0 sinc relu
        conj_physical
        """
    + " ".join(f"__{name}__" for name in _OPERATORS.split()),
    _run_each: "_foreach_norm _foreach_max",
}
_HANDLERS = {name: handler for handler, names in _TABLE.items() for name in names.split()}


@cache
def handler_of(func: Function) -> Handler:
    """Return the implementation of a function, as ``__torch_function__`` gets it."""
    name = name_of(func)
    if getattr(func, "__module__", None) == "torch.autograd":
        return _differentiate
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _HANDLERS.get(name, _run_on_lists)
    if getattr(func, "__name__", name) != name:  # a property
        return _HANDLERS.get(name, run_plain)
    return _HANDLERS.get(name) or _HANDLERS.get(name.removesuffix("_"), run_gathered)


ShardedTensor._find_handler = handler_of


@cache
def name_of(func: Function) -> str:
    """Return the name of a function, or of the property whose accessor it is."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return str(func.__self__.__name__)  # type: ignore[attr-defined]  # of a property of Tensor
    return str(name)


@cache
def writes_first(func: Function) -> bool:
    """Return whether a function changes its first argument."""
    name = name_of(func)
    if name.startswith("__"):
        return name in _WRITERS
    return name.endswith("_") and name not in ("requires_grad_", "retain_grad_", "detach_")
