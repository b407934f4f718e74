"""First values of tensors that users build on the meta device, because no host has memory for the whole module.

They are made by the module's own methods: ``reset_parameters`` of each module, then ``_init_weights(module)`` of the
modules around it, as transformers and many others write it. Every rank makes them itself, with random numbers that
depend on a seed and the module's name, so they are the same on every topology.

After the module was sharded, one layer after the other gets memory, and at last all that is outside of layers. The
methods of the modules inside run, their writes are counted, and the values are handed on.
"""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import buffer_slots, child_slots, parameter_slots, reset_method
from lightning_shardckpt.compat.transformers import (
    initialize,
    is_model,
    mark_initialized,
    was_initialized,
    weights_method,
)
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.first_values.one_rank import (
    Build,
    CopySlice,
    MetaTensors,
    Place,
    fill,
    find_parameter,
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


class Initialization:
    """The tensors of a module that have no memory on any rank, and the module as it was built.

    Args:
        root: the module, which only the user may have sharded.
        build: knows the tensors that rank 0 has, and the writes that were counted.
        loaded: clean FQNs of tensors that the caller fills.
    """

    def __init__(self, root: nn.Module, build: Build, loaded: Collection[str]) -> None:
        places = list_places(root)
        filled = {id(place.tensor) for place in places if clean_fqn(place.fqn) in loaded}
        self._root, self._build, self._wanted = root, build, dict[int, list[Place]]()  # by the id of the tensor
        for place in places:
            if place.is_without and str(place) not in build.only_first and id(place.tensor) not in filled:
                self._wanted.setdefault(id(place.tensor), []).append(place)
        for tied in self._wanted.values():
            tied.sort(key=build.is_owner, reverse=True)
        if self._wanted:
            modules = named_modules(root)
            layers = [modules[name] for name in trunk_layers(root)]
            self._layer_of = {module: layer for layer in layers for module in layer.modules()}
            self._methods = list(_methods(root, {place.module for tied in self._wanted.values() for place in tied}))
            self._places = [p for p in places if p.kind != "attribute" or id(p.tensor) in self._wanted]
            slots = [(parameter_slots(m), buffer_slots(m), child_slots(m)) for m in root.modules()]
            self._slots: list[tuple[Any, dict[str, Any]]] = [(d, dict(d)) for each in slots for d in each]
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
        if not self._wanted:
            return
        present = set(self._root.modules())
        targets = {number: find_parameter(present, places) for number, places in self._wanted.items()}
        others, problems = list[tuple[Place, Tensor]](), list[tuple[Place, str]]()
        with self._as_built() as stand_ins:
            for layer in [*dict.fromkeys(self._layer_of.values()), None]:
                numbers = [
                    number
                    for number, places in self._wanted.items()
                    if self._layer_of.get(places[0].module) is layer and any(p.module in present for p in places)
                ]
                problems += self._make(layer, numbers, stand_ins)
                for number in numbers:
                    places, target = self._wanted[number], targets[number]
                    value: Tensor = places[0].slots[places[0].name]
                    if target is not None:
                        fill(target, places[0].fqn, value, copy_slice)
                    elif places[0].kind != "parameter":
                        others += [(place, value.detach().to(device)) for place in places]
                    places[0].slots[places[0].name] = stand_ins[number]
        for place, value in others:
            place.slots[place.name] = value
        if any_rank(bool(problems)) if dist.is_initialized() else problems:
            if restores():
                problems = [(place, text) for place, text in problems if clean_fqn(place.fqn) not in self._state]
            _refuse(problems)

    @contextmanager
    def _as_built(self) -> Iterator[dict[int, Tensor]]:
        """Put the module back as it was built, with stand-ins without memory for all tensors; yield them by number.

        Only the first place of a tied tensor gets it: modules that were tied to it don't initialise it.
        """
        stand_ins, now = dict[int, Tensor](), [(slots, dict(slots)) for slots, _ in self._slots]
        attributes = [(place.slots, {place.name: place.tensor}) for place in self._places if place.kind == "attribute"]
        for slots, built in self._slots:
            slots.clear()
            slots.update(built)
        for place in self._places:
            number = id(place.tensor)
            place.slots[place.name] = like(place.tensor, "meta")
            if number not in self._wanted or place is not self._wanted[number][0]:
                mark_initialized(place.slots[place.name])
            else:
                stand_ins[number] = place.slots[place.name]
        try:
            yield stand_ins
        finally:
            for slots, _ in self._slots:
                slots.clear()
            for slots, were in [*now, *attributes]:
                slots.update(were)

    def _make(
        self, layer: nn.Module | None, numbers: Sequence[int], stand_ins: dict[int, Tensor]
    ) -> Iterator[tuple[Place, str]]:
        """Run the methods of a layer, or of the modules outside of layers, with memory for some of its tensors.

        Yields:
            The places that no method fills as the code that built them did, each with a text.
        """
        if not numbers:
            return
        tensors, by_model, by_others = MetaTensors(), Counter[int](), Counter[int]()
        first = {number: self._wanted[number][0] for number in self._wanted}
        made = {number: like(first[number].tensor, "cpu") for number in numbers}
        for number, tensor in made.items():
            tensors.know(tensor)
            first[number].slots[first[number].name] = tensor
        for key, module, is_of_model, method in self._methods:
            if self._layer_of.get(module) is layer:
                before = {number: tensors.writes(tensor) or 0 for number, tensor in made.items()}
                with tensors.watched(), seed_temporarily(zlib.crc32(f"{self._seed} {key}".encode())):
                    method()
                counts = by_model if is_of_model else by_others
                counts.update({number: (tensors.writes(made[number]) or 0) - n for number, n in before.items()})
        for number, place in first.items():
            if number in made:
                is_replaced = place.slots[place.name] is not made[number]
                if text := self._differs(place, by_model[number], by_others[number], is_replaced=is_replaced):
                    yield place, f"{place}, which {text}"
            elif self._layer_of.get(place.module) is not layer and tensors.writes(stand_ins[number]):
                yield place, f"{place}, which a method of a module outside of its layer changes"

    def _differs(self, place: Place, by_model: int, by_others: int, *, is_replaced: bool) -> str:
        """Return why methods don't initialise a tensor as the code that built it did; empty if they do."""
        if not (by_model or by_others or is_replaced):
            return "no method fills"
        built = self._build.tensors.writes(place.tensor)
        if isinstance(place.tensor, DTensor) and by_model:
            built = 0
        if built is None and not by_model:
            return "is a copy, or was built outside of configure_model, so that its initialisation was not seen"
        repeated = by_others + (by_model if was_initialized(place.module) else 0)
        if built is not None and (built > repeated or (built and not by_model and built != repeated)):
            return f"was changed {built} times while it was built, and is changed {repeated} times by methods"
        return ""


def _refuse(problems: list[tuple[Place, str]]) -> None:
    """Raise if tensors have no first values on any rank. Collective."""
    if any_rank(bool(problems)) if dist.is_initialized() else problems:
        texts = [text for _, text in problems] or ["tensors of another pipeline stage"]
        raise UnsupportedCodeError(
            f"{len(texts)} of the tensors that were built on the meta device have no first values:\n  "
            f"{list_some(texts, _LISTED, chr(10) + '  ')}\n{_REMEDY}"
        )


def _methods(
    root: nn.Module, wanting: Collection[nn.Module]
) -> Iterator[tuple[str, nn.Module, bool, Callable[[], object]]]:
    """Yield the methods that initialise modules with ``wanting`` ones inside, in the order of ``nn.Module.apply``.

    Yields:
        The key of the random numbers, the module, whether a model of transformers runs it, which then skips modules
        that it has initialised, and the method.
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
            yield f"{name} reset", module, False, reset
        if (model := next(filter(is_model, around), None)) is not None:
            yield f"{name} model", module, True, partial(initialize, model, module)
            return
        for outer in around:
            method = weights_method(outer)
            if method is not None and _takes(method, module):
                yield f"{name} of {type(outer).__name__}", module, False, partial(method, module)

    yield from walk(root, "", ())


def _takes(method: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
