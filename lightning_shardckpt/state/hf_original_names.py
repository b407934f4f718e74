"""The names of a model's weights in the files of ``from_pretrained``, where they differ from its state dict.

Transformers 5 keeps, for instance, all experts of a layer in one parameter, and takes it apart when it saves. What it
does to names and shapes is observed here by having it do that to tensors without memory: each result is a box of an
entry of the state dict. Torch only; what is called is transformers' own function, if that is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.dispatch import DispatchMode
from lightning_shardckpt.compat.module_slots import buffer_slots, non_persistent_buffers
from lightning_shardckpt.compat.tensor_subclass import memory_id
from lightning_shardckpt.compat.transformers import revert_function
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.model import is_elsewhere
from lightning_shardckpt.state.name_patterns import NamedBoxes, applied, general, pattern_of


def original_names(model: nn.Module) -> dict[str, NamedBoxes]:
    """Return what the entries of a model's state dict become, by name, where it is not the entry itself.

    The numbers of layers are ``#`` where all layers are alike, so that it is of other pipeline stages, too.

    Raises:
        ValueError: if a tensor is more than a box of one entry, such as a transposed one.
    """
    revert = revert_function()
    if revert is None:
        return {}
    entries = {clean_fqn(name): tensor for name, tensor in _state(model)}
    stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in entries.items()}
    lineage = _Lineage(stand_ins)
    with lineage:
        found = revert(model, dict(stand_ins))
    parts: dict[str, NamedBoxes] = {}
    for name, tensor in found.items():
        entry, start, stop = lineage.box(name, tensor)
        parts.setdefault(entry, []).append([name, start, stop, list(tensor.shape)])
    same = {name: [[name, [0] * t.ndim, list(t.shape), list(t.shape)]] for name, t in stand_ins.items()}
    return _by_pattern({name: sorted(found) for name, found in parts.items()}, same)


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers; without the calls of hooks, which may gather."""
    found: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if not is_elsewhere(p)]
    for prefix, module in model.named_modules():
        for name, buffer in buffer_slots(module).items():
            if buffer is not None and name not in non_persistent_buffers(module):
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found


def _by_pattern(parts: dict[str, NamedBoxes], same: dict[str, NamedBoxes]) -> dict[str, NamedBoxes]:
    """The parts by patterns of names, where all names that match have the same; else by the names themselves."""
    patterns: dict[str, list[tuple[str, NamedBoxes]]] = {}
    for name, found in parts.items():
        patterns.setdefault(pattern_of(name), []).append((name, found))
    chosen: dict[str, NamedBoxes] = {}
    for pattern, names in patterns.items():
        if all(found == same[name] for name, found in names):
            continue
        alike = [general(name, found) for name, found in names]
        if all(one == alike[0] and applied(pattern, one, n) == f for one, (n, f) in zip(alike, names, strict=True)):
            chosen[pattern] = alike[0]
        else:
            chosen |= {name: found for name, found in names if found != same[name]}
    return chosen


@dataclass(frozen=True, slots=True)
class _Origin:
    """The meaning of a storage on the meta device: a box of an entry, from ``start`` on.

    ``dims``: of the entry, which each dim of the tensor ``shape`` in the storage runs along.
    """

    entry: str
    start: Shape
    shape: Shape
    dims: Shape


class _Lineage(DispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Remembers what copies of views of stand-ins are copies of."""

    def __init__(self, stand_ins: dict[str, Tensor]) -> None:
        super().__init__()
        self._alive: list[Tensor] = list(stand_ins.values())  # so that no address comes twice
        self._origins = {
            memory_id(t): _Origin(name, (0,) * t.ndim, tuple(t.shape), tuple(range(t.ndim)))
            for name, t in stand_ins.items()
        }
        self._ndim = {name: t.ndim for name, t in stand_ins.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and found.is_contiguous():
            origin = self._origin(args[0])
            if origin is not None:
                self._alive.append(found)
                self._origins[memory_id(found)] = origin
        return found

    def box(self, name: str, tensor: Tensor) -> tuple[str, list[int], list[int]]:
        """The entry that a tensor is a box of, and where that starts and stops."""
        origin = self._origin(tensor)
        if origin is None:
            raise ValueError(f"{name} is not a part of one entry of the state dict")
        stop = [at + 1 for at in origin.start]
        for length, dim in zip(origin.shape, origin.dims, strict=True):
            stop[dim] = origin.start[dim] + length
        return origin.entry, list(origin.start), stop

    def _origin(self, tensor: Tensor) -> _Origin | None:
        """Return what a view of a storage stands for; None if its elements are in another order, or of no stand-in."""
        base = self._origins.get(memory_id(tensor))
        if base is None:
            return None
        strides = torch.empty(base.shape, device="meta").stride()
        rest, start, dims = int(tensor.storage_offset()), list(base.start), list[int]()
        for dim, (length, stride) in enumerate(zip(base.shape, strides, strict=True)):
            at, rest = divmod(rest, stride) if length else (0, rest)
            start[base.dims[dim]] += at
        own_dim = 0
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            while own_dim < len(strides) and not _runs_along(base.shape[own_dim], strides[own_dim], length, stride):
                own_dim += 1
            if own_dim == len(strides):
                return None
            dims.append(base.dims[own_dim])
            own_dim += 1
        return _Origin(base.entry, tuple(start), tuple(tensor.shape), tuple(dims))


def _runs_along(own_length: int, own_stride: int, length: int, stride: int) -> bool:
    return own_length >= length and (stride == own_stride or length == own_length == 1)
