"""Kinds of torch functions, by how they are run on sharded tensors. Pure: knows names only.

A function in no list runs on gathered tensors, which is always right. The lists name those that must not, because of
their meaning or their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import cache
from typing import Any


class Kind(Enum):
    """How a function is run on sharded tensors."""

    METADATA = auto()
    """Reads shapes, dtypes and flags, which DTensor answers for the whole tensor, or acts on its place in the graph."""
    DERIVATIVE = auto()
    """Computes gradients."""
    HOOK = auto()
    """Registers a hook on the tensor's gradient."""
    ADDRESS = auto()
    """Asks for memory, or its address."""
    RANDOM = auto()
    """Draws values, the same ones on all ranks."""
    LIKE = auto()
    """Makes a tensor with the same sharding."""
    ELEMENTWISE = auto()
    """Computes each element from the elements at its position."""
    LISTS = auto()
    """Computes elementwise on lists of tensors."""
    EACH = auto()
    """Reduces each tensor of a list."""
    WHOLE = auto()
    """Needs the gathered tensor."""


_NAMES = {
    Kind.METADATA: """
        size dim ndimension numel nelement is_floating_point is_complex is_signed is_conj is_neg element_size
        is_contiguous stride storage_offset has_names is_inference is_shared is_pinned get_device requires_grad_ __len__
        is_same_size __hash__ __dir__ _is_view is_coalesced _is_zerotensor result_type can_cast is_tensor is_storage
        is_distributed is_set_to _has_compatible_shallow_copy_type _has_grad_dtype_override
        backward retain_grad __reduce_ex__ __setstate__ detach_
        """,
    Kind.WHOLE: "T H mT mH real imag data grad",  # all other properties are metadata
    Kind.HOOK: "register_hook register_post_accumulate_grad_hook",
    Kind.ADDRESS: "data_ptr storage untyped_storage _typed_storage share_memory_ __dlpack__",
    Kind.RANDOM: """
        rand_like randn_like randint_like uniform_ normal_ bernoulli_ random_ exponential_ log_normal_ cauchy_
        geometric_ kaiming_uniform_ kaiming_normal_ constant_
        """,
    Kind.LIKE: "zeros_like ones_like full_like empty_like",
    Kind.ELEMENTWISE: """
        add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder pow float_power neg
        negative abs absolute sign sgn signbit exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin
        cos tan asin acos atan atan2 sinh cosh tanh erf erfc erfinv sigmoid logit clamp clip clamp_min clamp_max
        maximum minimum fmax fmin where lerp addcmul addcdiv eq ne lt le gt ge greater greater_equal less less_equal
        not_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
        isfinite isinf isnan isposinf isneginf nan_to_num floor ceil round trunc fix frac copysign hypot xlogy
        masked_fill clone detach contiguous to type float double half bfloat16 int long short char byte bool cpu
        cuda copy zero fill alias positive ldexp nextafter heaviside deg2rad rad2deg digamma lgamma i0 sinc relu
        conj_physical
        """,
    Kind.EACH: "_foreach_norm _foreach_max",
}
_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv
    ifloordiv mod rmod imod pow rpow ipow neg abs pos eq ne lt le gt ge and rand iand or ror ior xor rxor ixor
    invert lshift rlshift ilshift rshift rrshift irshift
"""
_BY_NAME |= {f"__{name}__": Kind.ELEMENTWISE for name in _OPERATORS.split()}
_WRITERS = {"__setitem__", *(f"__{name}__" for name in _OPERATORS.split() if name.startswith("i") and name != "invert")}


@cache
def kind_of(func: Callable[..., Any]) -> Kind:
    """Return the kind of a function, as ``__torch_function__`` gets it."""
    name = name_of(func)
    if getattr(func, "__module__", None) == "torch.autograd":
        return Kind.DERIVATIVE
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return _BY_NAME.get(name, Kind.LISTS)
    if getattr(func, "__name__", name) != name:  # a property
        return _BY_NAME.get(name, Kind.METADATA)
    return _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("_"), Kind.WHOLE)


@cache
def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the property whose accessor it is."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return str(func.__self__.__name__)  # type: ignore[attr-defined]  # of a property of Tensor
    return str(name)


@cache
def writes_first(func: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument."""
    name = name_of(func)
    if name.startswith("__"):
        return name in _WRITERS
    return name.endswith("_") and name not in ("requires_grad_", "retain_grad_", "detach_")
