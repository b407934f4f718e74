"""First values of tensors that users build on the meta device, because no host has memory for the whole module.

They are made by the module's own methods: ``reset_parameters`` of each module, then ``_init_weights(module)`` of the
modules around it, as transformers and many others write it. Every rank makes them itself, with random numbers that
depend on a seed and the module's name, so they are the same on every topology.

1. `plan` runs all methods once without memory, to see which tensors each of them writes. Tensors that are written
   together are made together; usually those of one module.
2. After the module was sharded, `Plan.run` gives memory to one such part after the other, runs its methods, and hands
   the values on.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import buffer_slots, child_slots, parameter_slots, reset_method
from lightning_shardckpt.compat.torch_tensors import memory_id
from lightning_shardckpt.compat.transformers import (
    initialize,
    is_model,
    mark_initialized,
    was_initialized,
    weights_method,
)
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
from lightning_shardckpt.system.random_generators import seed_temporarily
from lightning_shardckpt.system.text import list_some

_KINDS = ("parameter", "buffer", "attribute")  # others are items of containers
_LISTED = 20
_REMEDY = (
    "Build them in configure_model without torch.device('meta') or trainer.init_module(empty_init=True), which takes "
    "memory on one rank alone; in Fabric, in init_module(empty_init=True). Or let a reset_parameters of their classes "
    "initialise them, or load them: pretrained=…, or a ckpt_path."
)


@dataclass(slots=True)
class _Call:
    """A method that initializes tensors.

    Attributes:
        key: of its random numbers.
        run: calls it.
        kind: a "reset" of a module by itself, a method of a module around it, or a "model" of transformers, which skips
            modules that it has initialized.
        writes: how often it writes to each tensor, by the tensor's number.
        touched: the numbers of all tensors that it reads or writes.
    """

    key: str
    run: Callable[[], object]
    kind: Literal["reset", "around", "model"]
    writes: dict[int, int] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Plan:
    """The way to the first values of tensors on the meta device: see the module."""

    _places: list[Place] = field(default_factory=list)
    _wanted: dict[int, list[Place]] = field(default_factory=dict)  # by id of the tensor
    _parts: list[tuple[set[int], list[_Call]]] = field(default_factory=list)
    _tree: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = field(default_factory=list)
    _seed: int = 0

    @torch.no_grad()
    def run(self, root: nn.Module, copy_slice: CopySlice, device: torch.device) -> None:
        """Make the values of the tensors that ``root`` has on this rank, and copy this rank's slices.

        Args:
            root: the module, which has been sharded since the plan was made, and has memory for its slices.
            copy_slice: copies this rank's slice into a parameter.
            device: of buffers.
        """
        present = set(root.modules())
        targets = {n: find_parameter(present, places) for n, places in self._wanted.items()}
        others = list[tuple[Place, Tensor]]()
        with self._as_built() as made:
            for numbers, calls in self._parts:
                if not any(place.module in present for number in numbers for place in self._wanted[number]):
                    continue
                self._put({number: like(self._wanted[number][0].tensor, "cpu") for number in numbers})
                for call in calls:
                    with seed_temporarily(zlib.crc32(f"{self._seed} {call.key}".encode())):
                        call.run()
                for number in numbers:
                    first, target = self._wanted[number][0], targets[number]
                    value = first.slots[first.name]
                    if target is not None:
                        fill(target, first.fqn, value, copy_slice)
                    elif first.kind != "parameter":
                        others += [(place, value.detach().to(device)) for place in self._wanted[number]]
                self._put({number: made[number] for number in numbers})
        for place, value in others:
            place.slots[place.name] = value

    def _put(self, tensors: dict[int, Tensor]) -> None:
        """Put tensors into the first slots of wanted ones; modules that were tied to them don't initialize them."""
        for number, tensor in tensors.items():
            first = self._wanted[number][0]
            first.slots[first.name] = tensor

    @contextmanager
    def _as_built(self) -> Iterator[dict[int, Tensor]]:
        """Put the module back as it was built, with stand-ins without memory for all tensors; yield them by number."""
        made = dict[int, Tensor]()
        for place in self._places:
            if id(place.tensor) not in made:
                made[id(place.tensor)] = like(place.tensor, "meta")
                if id(place.tensor) not in self._wanted:
                    mark_initialized(made[id(place.tensor)])
        now = [(slots, dict(slots)) for slots, _ in self._tree]
        attributes = [place for place in self._places if place.kind == "attribute"]
        for slots, built in self._tree:
            slots.clear()
            slots.update({name: made.get(id(value), value) for name, value in built.items()})
        for place in attributes:
            place.slots[place.name] = made[id(place.tensor)]
        for _, *tied in self._wanted.values():
            for place in tied:
                place.slots[place.name] = like(place.tensor, "meta")
                mark_initialized(place.slots[place.name])
        try:
            yield made
        finally:
            for slots, were in now:
                slots.clear()
                slots.update(were)
            for place in attributes:
                place.slots[place.name] = place.tensor


def plan(root: nn.Module, build: Build, loaded: Collection[str], restores: Callable[[], bool]) -> Plan:
    """Return the way to the first values of the tensors of ``root`` on the meta device.

    Args:
        root: the module, which only the user may have sharded.
        build: knows the tensors that rank 0 has, and the writes that were counted.
        loaded: clean FQNs of tensors that the caller fills.
        restores: called if tensors would be left unfilled; returns True if a checkpoint will fill the state dict.

    Raises:
        UnsupportedCodeError: naming tensors that no method fills, or that the code that built them initialised in a way
            that no method repeats.
    """
    places = list(list_places(root))
    filled = {id(place.tensor) for place in places if clean_fqn(place.fqn) in loaded}
    wanted = [p for p in places if p.is_without and str(p) not in build.only_first and id(p.tensor) not in filled]
    if not wanted:
        return Plan()
    found = Plan([place for place in places if place.kind in _KINDS[:2] or (place.kind in _KINDS and place.is_without)])
    in_containers = [place for place in wanted if place.kind not in _KINDS]
    for place in wanted:
        if place.kind in _KINDS:
            found._wanted.setdefault(id(place.tensor), []).append(place)
    for tied in found._wanted.values():
        tied.sort(key=build.is_owner, reverse=True)
    for module in root.modules():
        found._tree += [(s, dict(s)) for s in (parameter_slots(module), buffer_slots(module), child_slots(module))]
    calls = _rehearse(found, list(_calls(root, {place.module for place in wanted})))
    problems = _problems(found, calls, build.tensors)
    problems += [(place, f"{place}, which no method fills") for place in in_containers]
    state = {clean_fqn(name) for name in root.state_dict()} if problems else set()
    if any(clean_fqn(place.fqn) in state for place, _ in problems) and restores():
        problems = [(place, text) for place, text in problems if clean_fqn(place.fqn) not in state]
    if problems:
        raise UnsupportedCodeError(
            f"{len(problems)} of the tensors that were built on the meta device have no first values:\n  "
            f"{list_some([text for _, text in problems], _LISTED, chr(10) + '  ')}\n{_REMEDY}"
        )
    found._parts = _parts(found._wanted, calls)
    found._seed = int(torch.randint(1 << 62, ()))
    return found


def _calls(root: nn.Module, wanting: Collection[nn.Module]) -> Iterator[_Call]:
    """Yield the methods that initialize modules with ``wanting`` ones inside, in the order of ``nn.Module.apply``."""
    seen = set[nn.Module]()

    def walk(module: nn.Module, name: str, around: Sequence[nn.Module]) -> Iterator[_Call]:
        if module in seen or not any(part in wanting for part in module.modules()):
            return
        seen.add(module)
        around = (module, *around)
        for child, part in child_slots(module).items():
            if part is not None:
                yield from walk(part, f"{name}.{child}" if name else child, around)
        reset = reset_method(module)
        if reset is not None and _takes(reset):
            yield _Call(f"{name} reset", reset, "reset")
        model = next(filter(is_model, around), None)
        for outer in [model] if model is not None else around:
            method = weights_method(outer)
            if model is not None:
                yield _Call(f"{name} model", partial(initialize, model, module), "model")
            elif method is not None and _takes(method, module):
                yield _Call(f"{name} of {type(outer).__name__}", partial(method, module), "around")

    yield from walk(root, "", ())


def _takes(method: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _rehearse(found: Plan, calls: list[_Call]) -> list[_Call]:
    """Run all methods without memory, and note what they write; return those that write something that is wanted."""
    with found._as_built() as made, torch.no_grad():
        numbers = {memory_id(tensor): number for number, tensor in made.items()}
        tensors, totals = MetaTensors(), dict.fromkeys(made, 0)
        for tensor in made.values():
            tensors.know(tensor, torch.device("cpu"))
        for call in calls:
            tensors.touched.clear()
            with tensors.watched(draws=False):
                try:
                    with seed_temporarily(0):
                        call.run()
                except Exception as error:
                    raise UnsupportedCodeError(
                        f"the initialisation {call.key!r} of a module on the meta device cannot be planned without "
                        f"its values: {type(error).__name__}: {error}. {_REMEDY}"
                    ) from error
            call.touched = {numbers[t] for t in tensors.touched if numbers.get(t) in found._wanted}
            for number in call.touched:
                total = tensors.writes(made[number]) or 0
                if total > totals[number]:
                    call.writes[number], totals[number] = total - totals[number], total
            for number, (first, *_) in found._wanted.items():
                if first.slots[first.name] is not made[number]:  # replaced by another tensor
                    call.writes.setdefault(number, 0)
                    call.touched.add(number)
                    found._put({number: made[number]})
    return [call for call in calls if call.writes]


def _problems(found: Plan, calls: list[_Call], counted: MetaTensors) -> list[tuple[Place, str]]:
    """Return the places that no method fills as the code that built them did, each with a text."""
    problems = list[tuple[Place, str]]()
    for number, (place, *_) in found._wanted.items():
        writing = [call for call in calls if number in call.writes]
        if not writing:
            problems.append((place, f"{place}, which no method fills"))
        elif text := _not_repeated(place, writing, number, counted):
            problems.append((place, f"{place}, {text}"))
    return problems


def _not_repeated(place: Place, calls: list[_Call], number: int, counted: MetaTensors) -> str:
    """Return why methods don't initialise a tensor as the code that built it did; empty if they do."""
    built, in_model = counted.writes(place.tensor), any(call.kind == "model" for call in calls)
    if isinstance(place.tensor, DTensor):
        built = None if not in_model else 0
    if built is None and not in_model:
        return "which is a copy, or was built outside of configure_model, so that its initialisation was not seen"
    ran = not in_model or was_initialized(place.module)
    repeated = sum(call.writes[number] for call in calls if ran or call.kind != "model")
    if built is not None and (built > repeated or (built and not in_model and built != repeated)):
        return f"which was changed {built} times while it was built, and is changed {repeated} times by methods"
    return ""


def _parts(wanted: Iterable[int], calls: list[_Call]) -> list[tuple[set[int], list[_Call]]]:
    """Group the tensors that are made together, with their methods in order."""
    group = {number: {number} for number in wanted}
    for call in calls:
        joined = set[int]().union(*(group[number] for number in call.touched))
        group.update(dict.fromkeys(joined, joined))
    parts = {id(numbers): numbers for numbers in group.values()}
    return [
        (numbers, [call for call in calls if not numbers.isdisjoint(call.writes)])
        for numbers in parts.values()
        if any(not numbers.isdisjoint(call.writes) for call in calls)
    ]
