"""First values of tensors that users build on the meta device, because no host has memory for the whole module.

They are made by the module's own methods: ``reset_parameters`` of each module, then ``_init_weights(module)`` of the
modules around it, as transformers and many others write it. Every rank makes them itself, with random numbers that
depend on a seed and the module's name, so they are the same on every topology.

The methods run on copies of the modules, made before the module is sharded. One layer after the other gets memory
there, and at last all that is outside of layers. Writes are counted, and the values are handed on.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import child_slots, copy_modules, reset_method
from lightning_shardckpt.compat.transformers import initialize, is_model, was_initialized, weights_method
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.first_values.one_rank import (
    SLOTS,
    Build,
    CopySlice,
    MetaTensors,
    Place,
    ShownDevices,
    fill,
    like,
    list_places,
)
from lightning_shardckpt.parallel.sharding.fqn import named_modules
from lightning_shardckpt.parallel.sharding.fsdp import trunk_layers
from lightning_shardckpt.system.random_generators import seed_temporarily
from lightning_shardckpt.system.text import list_some

_LISTED = 20
_REMEDY = (
    "Build them in configure_model without torch.device('meta') or trainer.init_module(empty_init=True), which takes "
    "memory on one rank alone; in Fabric, in init_module(empty_init=True). Or let a reset_parameters of their classes "
    "initialise them, or load them: pretrained=…, or a ckpt_path."
)


@dataclass(eq=False, slots=True)
class _Tensor:
    """A tensor that has no memory on any rank, in a layer, or in none."""

    places: list[Place]  # first in the module that registered it first: those that were tied to it don't make it
    layer: nn.Module | None
    slots: dict[str, Any]  # of the copy of this module, with a tensor of its own

    @property
    def value(self) -> Any:
        """The tensor of the module's copy."""
        return self.slots[self.places[0].name]

    def renew(self, device: str) -> Tensor:
        """Replace the tensor of the module's copy by a new one on ``device``, and return it."""
        self.slots[self.places[0].name] = new = like(self.places[0].tensor, device)
        return new


class Initialization:
    """The tensors of a module that have no memory on any rank, and copies of its modules as they were built.

    Args:
        root: the module, which only the user may have sharded.
        build: has compared the module.
        loaded: clean FQNs of tensors that the caller fills.
    """

    def __init__(self, root: nn.Module, build: Build, loaded: Collection[str]) -> None:
        places, wanted = list_places(root), dict[int, list[Place]]()  # by the id of the tensor
        filled = {id(place.tensor) for place in places if clean_fqn(place.fqn) in loaded}
        for place in places:
            if place.is_without and str(place) not in build.only_first and id(place.tensor) not in filled:
                wanted.setdefault(id(place.tensor), []).append(place)
        self._root, self._build, self._tensors = root, build, list[_Tensor]()
        if wanted:
            modules, copies = named_modules(root), copy_modules(root, lambda tensor: like(tensor, "meta"))
            layers = [modules[name] for name in trunk_layers(root)]
            layer_of = {module: layer for layer in layers for module in layer.modules()}
            for tied in wanted.values():
                known = build.tensors.find(tied[0].tensor)
                tied.sort(key=lambda place: known is not None and known.owner() is place.module, reverse=True)
                slots = SLOTS[tied[0].kind](copies[tied[0].module])
                self._tensors.append(_Tensor(tied, layer_of.get(tied[0].module), slots))
                self._tensors[-1].renew("meta")
            wanting = {copies[place.module] for tied in wanted.values() for place in tied}
            self._methods = list(_methods(copies[root], wanting))
            self._layer_of = {copies[module]: layer for module, layer in layer_of.items()}
            self._state = {clean_fqn(name) for name in root.state_dict()}
            self._seed = int(torch.randint(1 << 62, ()))

    @torch.no_grad()
    def run(self, copy_slice: CopySlice, device: torch.device, restores: Callable[[], bool]) -> None:
        """Make the values of the tensors that the module has on this rank, and copy this rank's slices.

        Collective: every rank of the world must call it.

        Args:
            copy_slice: copies this rank's slice into a parameter, which has memory.
            device: of buffers.
            restores: called on all ranks if tensors would be left unfilled; returns True if a checkpoint will fill the
                state dict.

        Raises:
            UnsupportedCodeError: naming tensors that no method fills, or that the code that built them initialised in a
                way that no method repeats.
        """
        if not self._tensors:
            return
        present, problems = set(self._root.modules()), list[tuple[Place, str]]()
        for layer in dict.fromkeys(tensor.layer for tensor in self._tensors):
            inside = [t for t in self._tensors if t.layer is layer and any(p.module in present for p in t.places)]
            problems += self._make(layer, inside) if inside else ()
            for tensor in inside:
                fill(present, tensor.places, tensor.value, copy_slice)
                if tensor.places[0].kind != "parameter":
                    value = tensor.value.detach().to(device)
                    for place in tensor.places:
                        place.slots[place.name] = value
                tensor.renew("meta")
        if _are_anywhere(problems) and restores():
            problems = [(place, text) for place, text in problems if clean_fqn(place.fqn) not in self._state]
        if _are_anywhere(problems):
            texts = [text for _, text in problems] or ["tensors of another pipeline stage"]
            raise UnsupportedCodeError(
                f"{len(texts)} of the tensors that were built on the meta device have no first values:\n  "
                f"{list_some(texts, _LISTED, chr(10) + '  ')}\n{_REMEDY}"
            )

    def _make(self, layer: nn.Module | None, inside: Sequence[_Tensor]) -> Iterator[tuple[Place, str]]:
        """Run the methods of a layer, or of the modules outside of layers, on tensors with memory.

        Yields the places that no method fills as the code that built them did, each with a text.
        """
        by_model, by_others = MetaTensors(), MetaTensors()
        made = {tensor: tensor.renew("cpu") for tensor in inside}
        counted = {tensor: (by_model.know(value), by_others.know(value)) for tensor, value in made.items()}
        for module, key, is_models, method in self._methods:
            if self._layer_of.get(module) is layer:
                watch = by_model if is_models else by_others
                with watch, ShownDevices(watch), seed_temporarily(zlib.crc32(f"{self._seed} {key}".encode())):
                    method()
        for tensor in self._tensors:
            place = tensor.places[0]
            if tensor in made:
                numbers = [known.writes for known in counted[tensor]]
                if text := self._differs(place, *numbers, is_replaced=tensor.value is not made[tensor]):
                    yield place, f"{place}, which {text}"
            elif tensor.layer is not layer and any(watch.writes(tensor.value) for watch in (by_model, by_others)):
                yield place, f"{place}, which a method of a module outside of its layer changes"

    def _differs(self, place: Place, by_model: int, by_others: int, *, is_replaced: bool) -> str:
        """Return why methods don't initialise a tensor as the code that built it did; empty if they do."""
        if not (by_model or by_others or is_replaced):
            return "no method fills"
        built = 0 if isinstance(place.tensor, DTensor) and by_model else self._build.tensors.writes(place.tensor)
        if built is None and not by_model:
            return "is a copy, or was built outside of configure_model, so that its initialisation was not seen"
        repeated = by_others + (by_model if was_initialized(place.module) else 0)
        if built is not None and (built > repeated or (built and not by_model and built != repeated)):
            return f"was changed {built} times while it was built, and is changed {repeated} times by methods"
        return ""


def _are_anywhere(problems: Sequence[object]) -> bool:
    """Return whether any rank has problems. Collective."""
    return any_rank(bool(problems)) if dist.is_initialized() else bool(problems)


def _methods(
    root: nn.Module, wanting: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, str, bool, Callable[[], object]]]:
    """Yield the methods that initialise modules with ``wanting`` ones inside, in the order of ``nn.Module.apply``.

    With its module, a key for random numbers, and whether a model of transformers runs it.
    """
    seen = set[nn.Module]()

    def walk(module: nn.Module, name: str, around: Sequence[nn.Module]) -> Iterator[Any]:
        if module in seen or not any(part in wanting for part in module.modules()):
            return
        seen.add(module)
        around = (module, *around)
        for child, part in child_slots(module).items():
            if part is not None:
                yield from walk(part, f"{name}.{child}" if name else child, around)
        reset = reset_method(module)
        if reset is not None and _takes(reset):
            yield module, f"{name} reset", False, reset
        if (model := next(filter(is_model, around), None)) is not None:
            yield module, f"{name} model", True, partial(initialize, model, module)
            return
        for outer in around:
            method = weights_method(outer)
            if method is not None and _takes(method, module):
                yield module, f"{name} of {type(outer).__name__}", False, partial(method, module)

    yield from walk(root, "", ())


def _takes(method: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
