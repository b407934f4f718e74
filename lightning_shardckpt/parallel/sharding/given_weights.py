"""Whole weights that take the place of sharded ones for a call, as ``torch.func.functional_call`` puts them there.

A module that a tensor-parallel plan shards expects its part. So whole weights are sharded when it is called, through
autograd; those that are sharded already need nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import DTensorSpec, local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_modules import parameter_slots
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import Scatter, where_is

_planned: MutableMapping[nn.Module, dict[str, DTensorSpec]] = WeakIdKeyDictionary()
"""How a plan has sharded the parameters of modules."""


def note_planned_shards(root: nn.Module) -> None:
    """Remember how tensor parallelism has sharded the parameters of modules inside ``root``."""
    for module in root.modules():
        parameters: dict[str, Any] = dict(parameter_slots(module))
        for name, parameter in parameters.items():
            if isinstance(parameter, ShardedTensor) and (where := where_is(parameter)).model_mesh is not None:
                spec = DTensorSpec(where.model_mesh, where.model, tensor_meta=spec_of(parameter).tensor_meta)
                _planned.setdefault(module, {})[name] = spec


@contextmanager
def sharded_as_planned(places: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Inside, whole weights in these places are sharded as the plan has sharded those that belong there."""
    before: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for module, name in places if _planned else ():
        slots, spec = parameter_slots(module), _planned.get(module, {}).get(name)
        value = slots.get(name)
        if spec is not None and isinstance(value, Tensor) and not isinstance(value, DTensor):
            before.append((slots, name, value))
            slots[name] = _part(value, spec)  # type: ignore[assignment]  # torch takes it for a parameter
    try:
        yield
    finally:
        for slots, name, value in before:
            slots[name] = value


def _part(value: Tensor, spec: DTensorSpec) -> Tensor:
    with without_torch_function():
        like = new_dtensor(local_tensor(value).new_empty(0), spec)
        found: Tensor = Scatter.apply(value, like)  # type: ignore[no-untyped-call]  # torch's
        return found
