"""Wrapper subclasses: tensors made of inner tensors, such as quantized weights and 8-bit moments.

``__tensor_flatten__`` returns the names of the inner tensors and a context. Inner tensors are stored like any tensor,
under ``<name>#<attribute>``, and the context in a JSON record under ``<name>#``, without pickle. An inner tensor of the
outer shape is sharded like the outer tensor; any other, such as the scales of blocks, cannot be resharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, spec_of
from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.state.dtensor_layout import layout_of, shard_like
from lightning_shardckpt.state.json_tree import decode_small, encode_small

MARK = "#"  # between the names of the outer and the inner tensor; at the end of a record's name


def is_compound(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or its local part, is a wrapper subclass."""
    return hasattr(type(local_tensor(tensor)), "__tensor_flatten__")


def flatten_compound(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the live inner tensors of a compound tensor, and the records of it and of nested ones, both by key.

    Raises:
        StateError: if a context is not plain data, or an inner tensor of a sharded tensor cannot be sharded.
    """
    outer: Any = local_tensor(tensor)
    attributes, context = outer.__tensor_flatten__()
    record = {"class": class_name(outer), "tensors": list(attributes), "shape": list(tensor.shape), "context": context}
    tensors: dict[str, torch.Tensor] = {}
    records = {name + MARK: encode_small(record, f"the context of {class_name(outer)} in {name}")}
    for attribute in attributes:
        key, inner = f"{name}{MARK}{attribute}", _shard_inner(name, tensor, attribute, getattr(outer, attribute))
        if is_compound(inner):
            nested, nested_records = flatten_compound(key, inner)
            tensors |= nested
            records |= nested_records
        else:
            tensors[key] = inner
    return tensors, records


def memory_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the local part of a tensor, detached: one plain tensor, or the inner tensors of a compound one."""
    local: Any = local_tensor(tensor)
    if not is_compound(local):
        yield local.detach()
        return
    for attribute in local.__tensor_flatten__()[0]:
        yield from memory_of(getattr(local, attribute))


def unflatten_compound(name: str, values: dict[str, Any], like: torch.Tensor) -> None:
    """Replace the inner tensors and the record of a compound tensor in ``values`` by the tensor. In place.

    Args:
        name: of the compound tensor.
        values: the inner tensors and the records by the keys of `flatten_compound`.
        like: the parameter that the state belongs to; the result is sharded like it if the inner tensors are.

    Raises:
        StateError: if the class is not imported. Nothing is imported by name.
        FormatError: if the record is malformed, or names a tensor that is not stored.
    """
    record = _check_record(values.pop(name + MARK), name)
    inner: dict[str, Any] = {}
    for attribute in record["tensors"]:
        key = f"{name}{MARK}{attribute}"
        if key + MARK in values:
            unflatten_compound(key, values, like)
        if not isinstance(values.get(key), torch.Tensor):
            raise FormatError(f"{name}: its record names the tensor {attribute!r}, which is not stored")
        inner[attribute] = values.pop(key)
    spec = next((spec_of(t) for t in inner.values() if isinstance(t, DTensor)), None)
    local = {attribute: local_tensor(tensor) for attribute, tensor in inner.items()}
    shape = torch.Size(record["shape"]) if spec is None else local_tensor(like).shape
    compound: Any = _find_class(record["class"], name).__tensor_unflatten__(
        local, record["context"], shape, torch.empty(shape, device="meta").stride()
    )
    if spec is not None:
        compound = shard_like(compound, spec)
        compound.__class__ = type(like)
    values[name] = compound


def compound_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of outermost compound tensors from the keys of loaded values.

    >>> compound_names({"step": 1, "exp_avg#": {}, "exp_avg#codes": 0})
    ['exp_avg']
    """
    return [key[: -len(MARK)] for key in values if key.endswith(MARK) and MARK not in key[: -len(MARK)]]


def class_name(value: object) -> str:
    """Return the module and qualified name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def describe_record(record: Any) -> str:
    """Return a description of a record for an error message."""
    fields = decode_small(record)
    return f"{fields['class']} of shape {tuple(fields['shape'])} with context {fields['context']!r}"


def _shard_inner(name: str, tensor: torch.Tensor, attribute: str, inner: torch.Tensor) -> torch.Tensor:
    """Return the inner tensor as a DTensor if the outer tensor is one."""
    if not isinstance(tensor, DTensor) or isinstance(inner, DTensor):
        return inner
    if inner.shape == local_tensor(tensor).shape:
        return shard_like(inner, spec_of(tensor))
    if layout_of(tensor).cuts:
        raise StateError(
            f"{name}: {attribute} of a {class_name(local_tensor(tensor))} has shape {tuple(inner.shape)}, for a shard "
            f"of {tuple(local_tensor(tensor).shape)}: it belongs to this rank's part alone, and no other topology "
            "could load it. Replicate the parameter (data_parallel_shard_size=1), or keep it in full precision."
        )
    return inner


def _check_record(record: Any, name: str) -> dict[str, Any]:
    ok = isinstance(record, dict) and record.keys() == {"class", "tensors", "shape", "context"}
    if not ok or not isinstance(record["class"], str) or not all(isinstance(t, str) for t in record["tensors"]):
        raise FormatError(f"{name}: not a record of a compound tensor: {str(record)[:200]}")
    return dict(record)


def _find_class(path: str, name: str) -> Any:
    """Return a class of a module that is imported already."""
    module, _, qualified = path.rpartition(".")
    while module and module not in sys.modules:
        module = module.rpartition(".")[0]
    kind: Any = sys.modules.get(module)
    for part in path.removeprefix(f"{module}.").split(".") if kind is not None else ():
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise StateError(
            f"{name} was saved as a {path}, which is not imported, or not a tensor subclass with __tensor_unflatten__. "
            f"Import {qualified} before the load, in the version that saved."
        )
    return kind
