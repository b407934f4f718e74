"""Tensors that are made of other tensors: wrapper subclasses, such as quantized weights and 8-bit moments.

``__tensor_flatten__`` says which tensors are inside, and what else the class needs. Those are stored like any tensor,
under ``<name>#<attribute>``, and the rest as a record under ``<name>#``, so that nothing is pickled. An inner tensor of
the shape of the whole is laid out like it; another one, such as the scales of blocks, cannot be resharded.
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

MARK = "#"  # between the name of a tensor and what is inside; alone at the end, of the record


def is_compound(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or what this rank has of it, is a wrapper subclass."""
    return hasattr(type(local_tensor(tensor)), "__tensor_flatten__")


def is_record(name: str) -> bool:
    """Return whether a stored value says how a compound tensor is put together."""
    return name.endswith(MARK)


def take_apart(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors inside a compound tensor, live, and the records of it and of compound ones inside, both by key.

    Raises:
        StateError: for a context that is no plain data, and for a sharded tensor with an inner one that has no shards.
    """
    outer: Any = local_tensor(tensor)
    attributes, context = outer.__tensor_flatten__()
    record = {"class": class_name(outer), "tensors": list(attributes), "shape": list(tensor.shape), "context": context}
    tensors: dict[str, torch.Tensor] = {}
    records = {name + MARK: encode_small(record, f"the context of {class_name(outer)} in {name}")}
    for attribute in attributes:
        key, inner = f"{name}{MARK}{attribute}", _laid_out(name, tensor, attribute, getattr(outer, attribute))
        if is_compound(inner):
            more, others = take_apart(key, inner)
            tensors |= more
            records |= others
        else:
            tensors[key] = inner
    return tensors, records


def memory_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what this rank holds of a tensor, detached: one plain tensor, or those inside a compound one."""
    local: Any = local_tensor(tensor)
    if not is_compound(local):
        yield local.detach()
        return
    for attribute in local.__tensor_flatten__()[0]:
        yield from memory_of(getattr(local, attribute))


def put_together(name: str, values: dict[str, Any], like: torch.Tensor) -> None:
    """Replace, in a dict of loaded values, the parts of a compound tensor by the tensor.

    Args:
        name: of the compound tensor.
        values: the parts and the records by the keys that `take_apart` gave them.
        like: the parameter whose state it is; where inner tensors are laid out like it, so is the result.

    Raises:
        StateError: if the class is not there: nothing is imported by name.
        FormatError: if the record is none, or names a tensor that is not stored.
    """
    record = _check_record(values.pop(name + MARK), name)
    inner: dict[str, Any] = {}
    for attribute in record["tensors"]:
        key = f"{name}{MARK}{attribute}"
        if key + MARK in values:
            put_together(key, values, like)
        if not isinstance(values.get(key), torch.Tensor):
            raise FormatError(f"{name}: its record names the tensor {attribute!r}, which is not stored")
        inner[attribute] = values.pop(key)
    spec = next((spec_of(t) for t in inner.values() if isinstance(t, DTensor)), None)
    local = {attribute: local_tensor(tensor) for attribute, tensor in inner.items()}
    shape = torch.Size(record["shape"]) if spec is None else local_tensor(like).shape
    found: Any = _class(record["class"], name).__tensor_unflatten__(
        local, record["context"], shape, torch.empty(shape, device="meta").stride()
    )
    if spec is not None:
        found = shard_like(found, spec)
        found.__class__ = type(like)
    values[name] = found


def compound_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of compound tensors that are inside no other one, from the keys of loaded values.

    >>> compound_names({"step": 1, "exp_avg#": {}, "exp_avg#codes": 0})
    ['exp_avg']
    """
    return [key[: -len(MARK)] for key in values if is_record(key) and MARK not in key[: -len(MARK)]]


def class_name(value: object) -> str:
    """Module and qualified name of the class of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def describe_record(record: Any) -> str:
    """A record in words, for an error."""
    found = decode_small(record)
    return f"{found['class']} of shape {tuple(found['shape'])} with context {found['context']!r}"


def _laid_out(name: str, tensor: torch.Tensor, attribute: str, inner: torch.Tensor) -> torch.Tensor:
    """The inner tensor of this rank, as the shard that it is of a whole one."""
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


def _check_record(found: Any, name: str) -> dict[str, Any]:
    record: dict[str, Any] = found
    ok = isinstance(record, dict) and record.keys() == {"class", "tensors", "shape", "context"}
    if not ok or not isinstance(record["class"], str) or not all(isinstance(t, str) for t in record["tensors"]):
        raise FormatError(f"{name}: not a record of a compound tensor: {str(record)[:200]}")
    return record


def _class(path: str, name: str) -> Any:
    """A class that the program has; a checkpoint imports none."""
    module, _, qualified = path.rpartition(".")
    while module and module not in sys.modules:
        module = module.rpartition(".")[0]
    found: Any = sys.modules.get(module)
    for part in path.removeprefix(f"{module}.").split(".") if found is not None else ():
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise StateError(
            f"{name} was saved as a {path}, which is not here, or no tensor class that can be put together. Import "
            f"{qualified} before the load, in the version that saved."
        )
    return found
