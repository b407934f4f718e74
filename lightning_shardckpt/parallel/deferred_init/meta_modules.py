"""Initial values of modules built on the meta device.

Models of transformers run ``initialize_weights``, as in ``from_pretrained`` for missing tensors. Its results are logged
under `DeferredInit`, on stand-ins for the meta tensors. All other tensors on the meta device must be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import buffer_slots, parameter_slots
from lightning_shardckpt.compat.transformers import initialize, is_model, mark_initialized
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.sharding.references import REGISTRIES

_LISTED = 20
_LARGEST = 10_000  # items of a container that is searched for tensors


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a module.

    Attributes:
        slots: the module's parameters, its buffers, or its other attributes.
        wanted: True if the tensor has no value, and must be filled here.
    """

    fqn: str
    module: nn.Module
    slots: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    wanted: bool

    def __str__(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        return f"{self.fqn}  {'attribute' if self.slots is vars(self.module) else kind} of {type(self.module).__name__}"


def initialize_meta(
    root: nn.Module, deferred: DeferredInit, loaded: Collection[str], restores: Callable[[], bool] = lambda: False
) -> None:
    """Fill meta tensors of transformers' models: buffers now, parameters when ``deferred`` replays them.

    Args:
        root: the module, which only the user may have sharded.
        deferred: replays the parameters that were made in it; afterwards all others, too.
        loaded: clean FQNs of tensors that the caller fills.
        restores: called if tensors are left unfilled; returns True if a checkpoint will fill the state dict.

    Raises:
        UnsupportedCodeError: naming the tensors that are not filled.
    """
    models = list(_outermost_models(root))
    inside = {sub for model in models for sub in model.modules()}
    places = list(_places(root, deferred, loaded, inside))
    wanting = {place.module for place in places if place.wanted}
    running = {module for module in inside if not wanting.isdisjoint(module.modules())}
    own = [place for place in places if place.wanted or place.module in inside]
    with deferred, torch.no_grad():
        stand_ins = _put_stand_ins(own)
        try:
            for model in models:
                if model in running:
                    initialize(model, running)
        finally:
            filled = _take_back(own, stand_ins, deferred)
    adapters = _adapters(root)
    problems = [
        (place.fqn, f"{place}{', which PEFT fills only when it makes it' if place.module in adapters else ''}")
        for place in places
        if place.wanted and (id(place.tensor) not in filled or place.module in adapters)
    ]
    problems += _in_containers(root)
    state = {clean_fqn(name) for name in root.state_dict()} if problems else set()
    if any(fqn in state for fqn, _ in problems) and restores():
        problems = [(fqn, text) for fqn, text in problems if fqn not in state]
    if problems:
        listed = "\n  ".join([text for _, text in problems[:_LISTED]] + ["…"] * (len(problems) > _LISTED))
        raise UnsupportedCodeError(
            f"{len(problems)} of the tensors that were built on the meta device have no first values:\n  {listed}\n"
            "Build them in configure_model, which takes no memory for them (defer_init=True), without "
            "torch.device('meta') or trainer.init_module(empty_init=True); in Fabric, in init_module(empty_init=True). "
            "Or load them: pretrained=…, or a ckpt_path."
        )
    deferred.materialize_buffers(root)


def _places(
    root: nn.Module, deferred: DeferredInit, loaded: Collection[str], in_models: Collection[nn.Module]
) -> Iterator[_Place]:
    tensors, seen = list(_tensors(root)), set[int]()
    filled = {id(tensor) for fqn, _, _, _, tensor in tensors if fqn in loaded}
    for fqn, module, slots, name, tensor in tensors:
        known = isinstance(tensor, nn.Parameter) and deferred.knows(module, name)
        is_tied = id(tensor) in seen and module in in_models  # from_pretrained fills the first one alone
        seen.add(id(tensor))
        wanted = tensor.is_meta and id(tensor) not in filled and not known and not is_tied
        yield _Place(fqn, module, slots, name, tensor, wanted)


def _tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, MutableMapping[str, Any], str, Tensor]]:
    """Yield all parameters and buffers, and attributes on the meta device, once per module."""
    for prefix, module in root.named_modules():
        attributes = {n: t for n, t in vars(module).items() if isinstance(t, Tensor) and t.is_meta}
        kinds: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = [(vars(module), attributes)]
        kinds += [(slots, dict(slots)) for slots in (parameter_slots(module), buffer_slots(module))]
        for slots, tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield clean_fqn(f"{prefix}.{name}" if prefix else name), module, slots, name, tensor


def _outermost_models(module: nn.Module) -> Iterator[nn.Module]:
    if is_model(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def _adapters(root: nn.Module) -> set[nn.Module]:
    """Return the modules that PEFT fills only when it creates them, as listed by its classes."""
    found = set[nn.Module]()
    for module in root.modules():
        for name in getattr(type(module), "adapter_layer_names", ()):
            child = getattr(module, name, None)
            found.update(child.modules() if isinstance(child, nn.Module) else ())
    return found


def _put_stand_ins(places: Sequence[_Place]) -> dict[int, Tensor]:
    """Replace tensors by uninitialized stand-ins; return the stand-ins of wanted tensors, by id."""
    made: dict[tuple[int, bool], Tensor] = {}
    for place in places:
        key = (id(place.tensor), place.wanted)
        if key not in made:
            made[key] = _stand_in(place.tensor)
            if not place.wanted:
                mark_initialized(made[key])
        place.slots[place.name] = made[key]
    return {number: stand_in for (number, wanted), stand_in in made.items() if wanted}


def _stand_in(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        new = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(vars(tensor))
    return new


def _take_back(places: Sequence[_Place], stand_ins: dict[int, Tensor], deferred: DeferredInit) -> set[int]:
    """Restore the tensors, except wanted buffers and attributes; return the ids of wanted tensors that were filled."""
    found = {id(place.tensor): place.slots.get(place.name) for place in places if place.wanted}
    for place in places:
        new = found.get(id(place.tensor))
        is_parameter = isinstance(place.tensor, nn.Parameter)
        place.slots[place.name] = place.tensor if new is None or is_parameter else new
        if new is not None and is_parameter:
            deferred.take(place.module, place.name, new)
    return {n for n, new in found.items() if new is not None and (new is not stand_ins[n] or deferred.is_written(new))}


def _in_containers(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the FQN and description of containers in attributes that have tensors on the meta device."""
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTRIES and type(value) in (list, tuple, dict) and len(value) <= _LARGEST:
                items = value.values() if type(value) is dict else value
                if any(type(item) is Tensor and item.is_meta for item in items):
                    fqn = clean_fqn(f"{prefix}.{name}" if prefix else name)
                    yield fqn, f"{fqn}  {type(value).__name__} of {type(module).__name__}, which no method fills"
