"""The implementation of torch's functions for sharded tensors, one for each `kinds.Kind`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, rows_of, shape_of, spec_of
from lightning_shardckpt.compat.torch_tensors import with_torch_function, without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import GATHERED, REMEDY, takes_gradients_late
from lightning_shardckpt.parallel.tensors.kinds import Kind, name_of, writes_first
from lightning_shardckpt.parallel.tensors.placement import describe, local_part
from lightning_shardckpt.parallel.tensors.sharded import (
    HANDLERS,
    LEAF,
    Function,
    ShardedTensor,
    as_sharded,
    check_not_leaf,
    is_alike,
    is_sharded,
    local_of,
    map_nested,
    new_like,
    rows_like,
    tensors_in,
)
from lightning_shardckpt.parallel.tensors.values import (
    check_equal_on_ranks,
    draw_like_first_rank,
    gather_whole,
    is_equal_on_ranks,
    join_norms,
    record_numbers,
    sharding_of,
)
from lightning_shardckpt.parallel.tensors.views import ShardView, run_gathered

_MOVES = ("cpu", "cuda", "to")
_NUMBERS = (float, int, bool)


def _access(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Get or set ``data`` or ``grad`` when torch's own property is called, as ``Tensor.data.__get__(tensor)``."""
    tensor, *value = args
    if func.__name__ == "__get__":
        return getattr(tensor, name_of(func))
    return setattr(tensor, name_of(func), *(value or [None]))


def _run_plain(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_torch_function():
        return func(*args, **kwargs)


def _run_with_examples(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, *others = args
    if is_sharded(first):
        return run_gathered(func, args, kwargs)
    with without_torch_function():
        return func(first, *(_empty_like(t) if is_sharded(t) else t for t in others), **kwargs)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _make_like(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor, *rest), kwargs = args, dict(kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    with without_torch_function():
        return new_like(tensor, func(local_tensor(tensor), *rest, **kwargs)).requires_grad_(requires_grad)


def _draw(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor on every rank, and keep this rank's rows."""
    tensor = args[0]
    if not is_sharded(tensor):
        return run_gathered(func, args, kwargs)
    name, sharding = name_of(func), sharding_of(tensor)
    requires_grad = kwargs.pop("requires_grad", False)
    with without_torch_function(), draw_like_first_rank(sharding, tensor.device, name), torch.no_grad():
        drawn = func(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args[1:], **kwargs)
        if kwargs.get("generator") is not None:  # whose state may differ between ranks
            check_equal_on_ranks(drawn, sharding, name)
    if not writes_first(func):
        return new_like(tensor, local_part(drawn, sharding).clone()).requires_grad_(requires_grad)
    with without_torch_function():
        check_not_leaf(tensor, func)
        with torch.no_grad():
            local_tensor(tensor).copy_(local_part(drawn, sharding))
        increment_version(tensor)
        return tensor


def _run_elementwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled() and (result := _run_on_rows(func, args, kwargs)) is not None:
        return result
    with without_torch_function():
        tensors = list(tensors_in(args, kwargs))
        if any(isinstance(t, ShardView) for t in tensors):  # the shards may have changed since it was taken
            return run_gathered(func, args, kwargs)
        first = next(t for t in tensors if is_sharded(t))
        target = kwargs.get("out", args[0] if writes_first(func) else None)
        if target is not None:
            return _write(func, args, kwargs, target, tensors)
        name = name_of(func)
        if name in _MOVES and (moved := _move(func, args, kwargs)) is not None:
            return moved
        if torch.is_grad_enabled() and name != "detach" and any(t.requires_grad for t in tensors):
            return run_gathered(func, args, kwargs)  # autograd reaches parameters only through their gather
        plain = [t for t in tensors if not is_alike(t, first)]
        if any(isinstance(t, DTensor) or t.ndim or t.requires_grad for t in plain):
            return run_gathered(func, args, kwargs)
        if any(not is_equal_on_ranks(t, sharding_of(first), name) for t in plain):
            return run_gathered(func, args, kwargs)
        result = func(*map_nested(args, local_of), **map_nested(kwargs, local_of))
        return _wrap_like(result, (*args, *kwargs.values()), first)


def _run_on_rows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to this rank's rows; return None unless its arguments are numbers and tensors sharded alike.

    The first argument must be a sharded tensor. Optimizer steps consist of these calls.
    """
    if not args or type(args[0]) is not ShardedTensor or (name := name_of(func)) in _MOVES:
        return None
    target: ShardedTensor = args[0]
    spec, rows, numbers = spec_of(target), list[Any](), list[float]()
    for value in args:
        kind = type(value)
        if kind is ShardedTensor and (spec_of(value) is spec or is_alike(value, target)):
            rows.append(rows_of(value))
        elif kind in _NUMBERS:
            rows.append(value)
            numbers.append(value)
        else:
            return None
    for value in kwargs.values():
        if type(value) not in _NUMBERS:
            return None
        numbers.append(value)
    if writes_first(func):
        record_numbers(name, shape_of(target), numbers)
        func(*rows, **kwargs)
        increment_version(target)
        return target
    result = func(*rows, **kwargs)
    is_new = type(result) is Tensor and id(result) not in map(id, rows)
    return new_like(target, result) if is_new else _wrap_like(result, args, target)


def _wrap_like(result: Any, args: tuple[Any, ...], example: DTensor) -> Any:
    """Wrap the rows in ``result`` as tensors with the sharding of ``example``; rows of an argument become that."""
    if isinstance(result, tuple):
        return tuple(new_like(example, part) for part in result)
    if not isinstance(result, Tensor):
        return result
    same = next((t for t in tensors_in(args, {}) if is_sharded(t) and local_tensor(t) is result), None)
    return new_like(example, result) if same is None else same


def _move(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Apply ``cpu``, ``cuda`` or ``to``: on another device, the result is the gathered tensor.

    Returns None if the device stays, so that at most the dtype of the rows changes.
    """
    tensor = args[0]
    has_examples = any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))
    rest, keywords = map_nested((args[1:], kwargs), lambda t: _empty_like(t) if is_sharded(t) else t)
    if not is_sharded(tensor):
        return func(tensor, *rest, **keywords)  # type: ignore[no-any-return]  # a Tensor
    empty = local_tensor(tensor).new_empty(0)
    moved = func(empty, *rest, **keywords)
    if moved.device != empty.device:
        return func(gather_whole(tensor, name_of(func)), *rest, **keywords)  # type: ignore[no-any-return]  # a Tensor
    copies = {"copy": kwargs.get("copy", False)}
    return _run_elementwise(Tensor.to, (tensor, moved.dtype), copies) if has_examples else None


def _write(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor, tensors: list[Tensor]
) -> Any:
    """Apply an elementwise function that writes ``target``: its first argument, or ``out``."""
    name, records = name_of(func), torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not isinstance(target, DTensor) or not is_sharded(target):
        return run_gathered(func, args, kwargs)
    check_not_leaf(target, func)
    record_numbers(name, target.shape, (*args, *kwargs.values()))
    if records or any(
        not is_alike(t, target) and (is_sharded(t) or (t.numel() != 1 and t.shape != target.shape)) for t in tensors
    ):
        return run_gathered(func, args, kwargs)
    sharding = sharding_of(target)

    def rows(value: Tensor) -> Tensor:
        if is_alike(value, target):
            return local_tensor(value)
        check_equal_on_ranks(value, sharding, name)
        if value.ndim == 0 or value.shape != target.shape:
            return value.reshape(()).to(target.device) if value.device != target.device and value.ndim else value
        return local_part(value.to(target.device), sharding)

    func(*map_nested(args, rows), **map_nested(kwargs, rows))
    increment_version(target)
    return target


def _run_on_lists(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of lists, such as ``_foreach_add``, to the rows of each list's tensors."""
    with without_torch_function():
        name = name_of(func)
        tensors = list(tensors_in(args, kwargs))
        if any(isinstance(t, ShardView) for t in tensors):  # values written to it must reach the shards
            return run_gathered(func, args, kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            if writes_first(func):
                raise RuntimeError(LEAF)
            return run_gathered(func, args, kwargs)
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
        targets = [next((t for t in row if is_sharded(t)), None) for row in zip(*lists, strict=False)]
        if writes_first(func):
            targets = [row[0] if is_sharded(row[0]) else None for row in zip(*lists, strict=False)]
            shape = targets[0].shape if targets and targets[0] is not None else ()
            record_numbers(name, shape, (*args, *kwargs.values()))
        results = func(*(_take_rows(a, targets, name) for a in args), **map_nested(kwargs, local_of))
        if name.startswith(("_fused_", "_amp_")) or results is None or writes_first(func):
            return args[0] if results is not None else None
        return type(results)(
            part if target is None else new_like(target, part) for part, target in zip(results, targets, strict=True)
        )


def _take_rows(value: Any, targets: Sequence[DTensor | None], what: str) -> Any:
    """Return a list of tensors with the rows of each that correspond to the target at its position."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Tensor):
        return map_nested(value, local_of)
    rows = []
    for tensor, target in zip(value, [*targets, *[None] * (len(value) - len(targets))], strict=False):
        if target is None:
            rows.append(gather_whole(tensor, what) if is_sharded(tensor) else tensor)
        elif not isinstance(tensor, DTensor) and tensor.numel() == 1 and tensor.shape != target.shape:
            rows.append(tensor)  # a number, such as a step count
        else:
            rows.append(rows_like(tensor, target, what))
    return rows


def _refuse_address(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedCodeError(
        f"{name_of(func)} asks for the memory of a sharded tensor of shape {tuple(args[0].shape)}, and this rank has "
        "only some of its rows. Code that works on raw memory (custom kernels, 8-bit optimizers) can't use it: pass "
        "tensor.full_tensor(), train without sharding (data_parallel_shard_size=1), or use another optimizer."
    )


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the norm of a tensor from the norms of its shards."""
    tensor, *rest = args or (kwargs["input"],)
    names = ("p", "ord") if name_of(func) == "norm" else ("ord",)
    orders = [*rest, *(kwargs[name] for name in names if name in kwargs)] or [2.0]
    is_of_all = len(orders) == 1 and not kwargs.keys() - {*names, "input"}  # no dims, no other dtype
    order = 2.0 if orders[0] in (None, "fro") else orders[0]
    with without_torch_function():
        if not is_of_all or not is_sharded(tensor) or not _has_norm([tensor], order):
            return run_gathered(func, args, kwargs)
        return _compute_norms([tensor], order)[0]


def _run_foreach_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, *rest = args
    order = [*rest, kwargs.get("ord", 2.0)][0]
    with without_torch_function():
        if len(rest) > 1 or "dtype" in kwargs or not _has_norm(tensors, order):
            return run_gathered(func, args, kwargs)
        norms: list[Any] = [None if is_sharded(t) else func([t], *rest, **kwargs)[0] for t in tensors]
        alike: dict[int, list[int]] = {}
        for n, tensor in enumerate(tensors):
            if norms[n] is None:
                alike.setdefault(id(sharding_of(tensor)), []).append(n)
        for positions in alike.values():
            for n, norm in zip(positions, _compute_norms([tensors[n] for n in positions], order), strict=True):
                norms[n] = norm
        return tuple(norms)


def _has_norm(tensors: Sequence[Tensor], order: Any) -> bool:
    """Return whether the norms can be computed from the norms of shards; autograd needs the gathered tensor."""
    if not isinstance(order, int | float) or order <= 0:
        return False
    if any(not tensor.is_floating_point() or not tensor.numel() for tensor in tensors):
        return False
    return not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors)


def _compute_norms(tensors: Sequence[Any], order: float) -> list[Tensor]:
    """Return the norm of each tensor, joined in double precision from the norms of rows; all are sharded alike."""
    rows = [local_tensor(tensor) for tensor in tensors]
    wide = [part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in rows]
    own = [float(torch.linalg.vector_norm(part, order)) if part.numel() else 0.0 for part in wide]
    return [
        torch.tensor(norm, dtype=torch.float64).to(part.device, part.dtype)
        for norm, part in zip(join_norms(tensors, own, order), rows, strict=True)
    ]


# ── hooks, and gradients ────────────────────────────────────────────────────────────────────────────────────────────


def gather_arguments(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a custom autograd function with sharded tensors gathered. Differentiable."""
    if not any(isinstance(arg, Tensor) and is_sharded(arg) for arg in args):
        return args
    with without_torch_function():
        return tuple(gather_whole(arg, function.__name__) if is_sharded(arg) else arg for arg in args)


def refuse_unused_copies(inputs: Sequence[Any], gradients: Sequence[Tensor | None] | None) -> None:
    """Raise if gathered copies of parameters are among ``inputs``, and none of them has a gradient.

    A custom autograd function that runs a module in its backward, as adjoint methods do, asks for the gradients of the
    parameters that were its arguments. These are copies from its forward, but the module has used other ones.

    Args:
        inputs: of ``torch.autograd.grad``, some of them unused.
        gradients: None if autograd has refused unused inputs.

    Raises:
        UnsupportedCodeError: naming the shape of the first copy.
    """
    found = [None] * len(inputs) if gradients is None else gradients
    copies = [(t, g) for t, g in zip(inputs, found, strict=True) if hasattr(getattr(t, "grad_fn", None), GATHERED)]
    if copies and all(gradient is None for _, gradient in copies):
        raise UnsupportedCodeError(
            "a custom autograd function runs a module in its backward, and asks torch.autograd.grad for gradients of "
            f"parameters that were its arguments, the first of shape {tuple(copies[0][0].shape)}. It got gathered "
            "copies of them, but the module uses the parameters. Ask for those of the module itself there, use "
            "torch.utils.checkpoint (of torchdiffeq odeint, not odeint_adjoint), or call torch.autograd.backward, and "
            "don't pass the parameters."
        )


def differentiate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch.autograd.grad or backward with graph edges in place of sharded inputs.

    So ``__torch_function__`` stays enabled while hooks of the user run.
    """
    if func is not torch.autograd.grad and func is not torch.autograd.backward:
        with without_torch_function():
            return func(*args, **kwargs)
    outputs, *rest = args
    argument = rest.pop(0) if func is torch.autograd.grad and rest else kwargs.pop("inputs", None)
    inputs = () if argument is None else tuple(argument.values() if isinstance(argument, dict) else argument)
    if func is torch.autograd.grad and any(not t.requires_grad for t in inputs):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    _refuse_gathered_by_fsdp(func, inputs)
    materialize = kwargs.pop("materialize_grads", False)
    kwargs["allow_unused"] = kwargs.get("allow_unused") or materialize
    if func is torch.autograd.backward:
        del kwargs["allow_unused"]
    with without_torch_function():
        edges = [get_gradient_edge(t) if is_sharded(t) else t for t in inputs]
        heads, rest, kwargs = map_nested([*outputs], _gather), map_nested(rest, _gather), map_nested(kwargs, _gather)
    if func is torch.autograd.backward:
        return func(heads, *rest, **kwargs, **({"inputs": edges} if argument is not None else {}))
    gradients = func(heads, edges, *rest, **kwargs)
    with without_torch_function():
        gradients = [_shard_gradient(g, t) for g, t in zip(gradients, inputs, strict=True)]
        if materialize:
            gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True)]
    return tuple(gradients)


def _refuse_gathered_by_fsdp(func: Function, inputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        if isinstance(tensor, DTensor) and takes_gradients_late(tensor):
            raise UnsupportedCodeError(
                f"{func.__name__} asks for the gradient of {describe(tensor)}. fully_shard computes gradients of "
                f"parameters only in loss.backward(). {REMEDY}"
            )


def _shard_gradient(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """Return the gradient of an input with the sharding of the input."""
    if not is_sharded(tensor) or not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(tensor, DTensor)
    if gradient.placements != tensor.placements:  # such as a partial sum
        gradient = gradient.redistribute(placements=tensor.placements)
    return as_sharded(gradient)


def _gather(output: Tensor) -> Tensor:
    return gather_whole(output, "backward") if isinstance(output, DTensor) and is_sharded(output) else output


def register_hook(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, hook = args
    with without_torch_function():
        return func(tensor, wrap_hook(hook, after=name_of(func) != "register_hook"))


def wrap_hook(hook: Function, *, after: bool) -> Function:
    """Return a hook that calls the user's with the sharded gradient of all batches; the user's may return a plain one.

    ``after``: True if it is called with the tensor, after its gradient has been accumulated.
    """
    if after:

        @wraps(hook)
        def on_accumulated(leaf: Tensor) -> None:
            with with_torch_function():
                if leaf.grad is not None:
                    hook(leaf)

        return on_accumulated

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

    return on_gradient


HANDLERS.update(
    {
        Kind.ACCESSOR: _access,
        Kind.METADATA: _run_plain,
        Kind.AUTOGRAD: differentiate,
        Kind.HOOK: register_hook,
        Kind.EXAMPLE: _run_with_examples,
        Kind.LIKE: _make_like,
        Kind.RANDOM: _draw,
        Kind.ELEMENTWISE: _run_elementwise,
        Kind.NORM: _run_norm,
        Kind.LISTS: _run_on_lists,
        Kind.LIST_OF_NORMS: _run_foreach_norm,
        Kind.ADDRESS: _refuse_address,
        Kind.TEXT: lambda func, args, kwargs: repr(args[0]),
        Kind.WHOLE: run_gathered,
    }
)
