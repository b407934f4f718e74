"""Initial values of modules built on the meta device, by their own methods, before they are sharded.

A method may leave elements unfilled. So the methods write to stand-ins in uninitialized memory, under `DeferredInit`,
which detects elements that still depend on that memory. Models of transformers run ``initialize_weights``, as in
``from_pretrained`` for missing tensors; other modules run ``reset_parameters``, children first.
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
        follows: True if it gets the value of another place, to which it is tied.
        writes: the number of writes by constructors.
        constant: computes the constant from which it was made, if constructors did not write to it.
    """

    fqn: str
    module: nn.Module
    slots: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    wanted: bool
    follows: bool
    writes: int
    constant: Callable[[], Tensor] | None

    def __str__(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        return f"{self.fqn}  {'attribute' if self.slots is vars(self.module) else kind} of {type(self.module).__name__}"


def initialize_meta(
    root: nn.Module, deferred: DeferredInit, loaded: Collection[str], restores: Callable[[], bool] = lambda: False
) -> None:
    """Fill meta tensors by the methods of their modules: buffers now, parameters when ``deferred`` replays them.

    Args:
        root: the module, which only the user may have sharded.
        deferred: replays the parameters that were made in it; afterwards all others, too.
        loaded: clean FQNs of tensors that the caller fills.
        restores: called if methods leave tensors unfilled; returns True if a checkpoint will fill the state dict.

    Raises:
        UnsupportedCodeError: naming the tensors that no method fills.
    """
    places = list(_places(root, deferred, loaded))
    owners = {place.module for place in places if place.wanted}
    running = {module for module in root.modules() if not owners.isdisjoint(module.modules())} if owners else set()
    calls = list(_calls(root, running, set()))
    inside = {sub for module, _ in calls for sub in module.modules()}
    places = [place for place in places if place.wanted or place.follows or place.module in inside]
    with deferred, torch.no_grad():
        stand_ins = _put_stand_ins(places)
        try:
            for module, reset in calls:
                if reset is not None:
                    reset()
                else:
                    _initialize(module, running, places, deferred)
        finally:
            found = _take_back(places, deferred)
    problems = [*_unfilled(root, deferred, found, stand_ins), *_in_containers(root)]
    state = {clean_fqn(name) for name in root.state_dict()} if problems else set()
    if any(fqn in state for fqn, _ in problems) and restores():
        problems = [(fqn, text) for fqn, text in problems if fqn not in state]
    if problems:
        listed = "\n  ".join([text for _, text in problems[:_LISTED]] + ["…"] * (len(problems) > _LISTED))
        raise UnsupportedCodeError(
            f"{len(problems)} of the tensors that were built on the meta device have no first values:\n  {listed}\n"
            "Let reset_parameters() of their modules fill them as the constructors do, or build them without "
            "torch.device('meta'): ShardedStrategy(defer_init=True) defers configure_model by itself."
        )
    deferred.materialize_buffers(root)


def _places(root: nn.Module, deferred: DeferredInit, loaded: Collection[str]) -> Iterator[_Place]:
    filled = {id(tensor) for fqn, _, _, _, tensor in _tensors(root) if fqn in loaded}
    models, seen = _inside_models(root), set[int]()
    for fqn, module, slots, name, tensor in _tensors(root):
        known = isinstance(tensor, nn.Parameter) and deferred.knows(module, name)
        wanted = tensor.is_meta and id(tensor) not in filled and not known
        follows = wanted and id(tensor) in seen and module in models  # from_pretrained fills the first one alone
        seen.add(id(tensor))
        constructed = deferred.writes(tensor), deferred.constant(tensor)
        yield _Place(fqn, module, slots, name, tensor, wanted and not follows, follows, *constructed)


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


def _inside_models(root: nn.Module) -> set[nn.Module]:
    return {sub for module in root.modules() if is_model(module) for sub in module.modules()}


def _adapters(root: nn.Module) -> set[nn.Module]:
    """Return the modules that PEFT fills only when it creates them, as listed by its classes."""
    found = set[nn.Module]()
    for module in root.modules():
        for name in getattr(type(module), "adapter_layer_names", ()):
            child = getattr(module, name, None)
            found.update(child.modules() if isinstance(child, nn.Module) else ())
    return found


def _calls(
    module: nn.Module, running: Collection[nn.Module], seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, Callable[[], object] | None]]:
    """Yield the modules with a method that fills them, children first, and the method; None for transformers."""
    if module in seen or module not in running:
        return
    seen.add(module)
    if is_model(module):
        yield module, None
        return
    for child in module.children():
        yield from _calls(child, running, seen)
    reset = _reset_method(module)
    if reset is not None:
        yield module, reset


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the latter of nn.MultiheadAttention and nn.Transformer
        if name in vars(module) or hasattr(type(module), name):  # PEFT's wrappers would find it in the wrapped module
            found: Callable[[], object] = getattr(module, name)
            return found
    return None


def _put_stand_ins(places: Sequence[_Place]) -> dict[int, Tensor]:
    """Replace tensors by stand-ins, uninitialized or constant; return the stand-ins of wanted tensors, by id."""
    made: dict[tuple[int, bool], Tensor] = {}
    for place in places:
        key = (id(place.tensor), place.wanted)
        if key not in made:
            made[key] = _stand_in(place.tensor, place.constant)
            if not place.wanted:
                mark_initialized(made[key])
        place.slots[place.name] = made[key]
    return {number: stand_in for (number, wanted), stand_in in made.items() if wanted}


def _stand_in(tensor: Tensor, constant: Callable[[], Tensor] | None) -> Tensor:
    if constant is not None:
        new = constant().to(tensor.dtype)
    elif isinstance(tensor, DTensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        new = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(vars(tensor))
    return new


def _initialize(
    model: nn.Module, running: Collection[nn.Module], places: Sequence[_Place], deferred: DeferredInit
) -> None:
    """Run the method of a model of transformers, then the methods of modules inside that it did not fill."""
    initialize(model, running)
    inside = set(model.modules())
    touched = {p.module for p in places if p.wanted and deferred.writes(p.slots[p.name])}
    for module in dict.fromkeys(p.module for p in places if p.wanted):
        reset = _reset_method(module)
        if module in inside and module not in touched and reset is not None:
            reset()


def _take_back(places: Sequence[_Place], deferred: DeferredInit) -> list[tuple[_Place, Tensor]]:
    """Restore the tensors, except wanted buffers and attributes; return the filled tensors of wanted places."""
    found = [(place, new) for place in places if place.wanted and (new := place.slots.get(place.name)) is not None]
    values = {id(place.tensor): new for place, new in found}
    for place in places:
        new = values.get(id(place.tensor))
        is_parameter = isinstance(place.tensor, nn.Parameter)
        place.slots[place.name] = place.tensor if new is None or is_parameter else new
        if new is not None and is_parameter:
            deferred.take(place.module, place.name, new)
    return found


def _unfilled(
    root: nn.Module, deferred: DeferredInit, found: Sequence[tuple[_Place, Tensor]], stand_ins: dict[int, Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield the FQN and description of each tensor that was not filled, or that constructors filled differently."""
    models, adapters = _inside_models(root), _adapters(root)
    for place, new in found:
        filled = deferred.writes(new)
        if place.module in adapters:
            yield place.fqn, f"{place}, which PEFT fills only when it makes it"
        elif not deferred.is_defined(new):
            yield place.fqn, f"{place}, which no method fills"
        elif place.module in models or new is not stand_ins[id(place.tensor)]:
            continue
        elif place.writes > filled:
            times = f"{place.writes} times, reset_parameters {filled}"
            yield place.fqn, f"{place}, which constructors wrote to {times}"
        elif filled and place.constant is not None and not deferred.is_equal(new, place.constant()):
            yield place.fqn, f"{place}, to which constructors gave another value than reset_parameters"


def _in_containers(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the FQN and description of containers in attributes that have tensors on the meta device."""
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTRIES and type(value) in (list, tuple, dict) and len(value) <= _LARGEST:
                items = value.values() if type(value) is dict else value
                if any(type(item) is Tensor and item.is_meta for item in items):
                    fqn = clean_fqn(f"{prefix}.{name}" if prefix else name)
                    yield fqn, f"{fqn}  {type(value).__name__} of {type(module).__name__}, which no method fills"
