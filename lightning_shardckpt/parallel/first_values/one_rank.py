"""Modules that rank 0 builds with values and the others without memory, and the way of the values to all ranks.

1. `Build.building` runs the code that builds. On the other ranks parameters lose their memory when modules register
   them; the code runs otherwise unchanged, and draws the same random numbers (`MetaTensors`).
2. `Build.compare` finds the tensors that only rank 0 has.
3. `share_tensors` gives all ranks rank 0's buffers, and the parameters that every rank has.
4. `Build.take` takes the other parameters out of the module, and `send_values` fills the sharded ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_distributed import distribute_locally
from lightning_shardckpt.compat.torch_modules import buffer_slots, parameter_slots
from lightning_shardckpt.compat.torch_tensors import (
    DispatchMode,
    below_functions,
    dispatches,
    memory_id,
    tree_leaves,
    tree_map,
    written_arguments,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError, TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.tensors.values import broadcast_rng, share_rng
from lightning_shardckpt.system.tensor_digest import byte_view
from lightning_shardckpt.system.text import list_some

# ── tensors on the meta device ──────────────────────────────────────────────────────────────────────────────────────

_DEVICE: Any = Tensor.device.__get__
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Memory:
    """Memory that is known: its storage, which keeps the id, and the number of in-place writes to it.

    ``device`` is shown by stand-ins; ``owner`` was the first module to register it, to which others were tied.
    """

    storage: torch.UntypedStorage
    device: torch.device | None = None
    writes: int = 0
    owner: Callable[[], nn.Module | None] = lambda: None


class MetaTensors(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Tensors on the meta device while modules are built or initialised; this mode and `ShownDevices` see them.

    In-place writes to them are counted. Some are stand-ins: they show the device of a tensor with values, mix with
    tensors that have memory, draw as many random numbers, and so do the results of operations on them. Code that reads
    their values fails with torch's own error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known, self.counts = dict[int, _Memory](), True

    def know(self, tensor: Tensor, device: torch.device | None = None) -> _Memory:
        """Count the writes to a tensor from now on, and let it stand for one on ``device``, if that is given."""
        known = self._known.setdefault(memory_id(tensor), _Memory(tensor.untyped_storage()))
        known.device = known.device or device
        return known

    def find(self, tensor: Tensor) -> _Memory | None:
        """Return the memory of a tensor if it is known."""
        is_plain = tensor.layout is torch.strided and not dispatches(type(tensor))
        return self._known.get(memory_id(tensor)) if is_plain else None

    def writes(self, tensor: Tensor) -> int | None:
        """Return the number of writes to a tensor; None for one that is not known."""
        known = self.find(tensor)
        return None if known is None else known.writes

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory that stands for ``tensor``."""
        made = torch.empty_like(tensor, device="meta")
        self.know(made, tensor.device)
        return made

    def device_of(self, value: object) -> torch.device | None:
        """Return the device that a stand-in shows; None for all other values."""
        known = self.find(value) if _is_without(value) else None
        return None if known is None else known.device

    def count(self, tensor: Tensor) -> None:
        """Count a write to a tensor that has no memory, or is known."""
        known = self.know(tensor) if _is_without(tensor) else self.find(tensor)
        if known is not None and self.counts:
            known.writes += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with below_functions():
            written = [t for t in tree_leaves(written_arguments(func, args, kwargs)) if isinstance(t, Tensor)]
            if not any(map(dispatches, types)):
                return self._run(func, written, args, kwargs)
            for tensor in written:
                if tensor.device.type == "meta":
                    raise StateError(
                        f"cannot run {func} on a parameter of shape {tuple(tensor.shape)} that was parallelised: "
                        "initialise parameters before parallelising them"
                    )
        return func(*args, **kwargs)

    def _run(self, func: Any, written: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, without memory if one of its arguments is a stand-in."""
        for tensor in written:
            self.count(tensor)
        shown = next(filter(None, map(self.device_of, tree_leaves((args, kwargs)))), None)
        if shown is None:
            return func(*args, **kwargs)
        if not all(tensor.is_meta for tensor in written):
            raise StateError(f"{func} would write values of a tensor without memory to one with memory")
        if torch.Tag.nondeterministic_seeded in func.tags:  # draws its numbers with ones, and drops them
            ones, others = tree_map(lambda v: torch.ones_like(v, device=shown) if _is_without(v) else v, (args, kwargs))
            func(*ones, **others)
        args, kwargs = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        for tensor in filter(_is_without, tree_leaves(result)):
            self.know(tensor, shown)
        return result


def _is_without(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or dispatches(type(value)):
        return False
    return value.layout is torch.strided and value.device.type == "meta"


class ShownDevices(TorchFunctionMode):
    """Shows the device of the tensor that a stand-in stands for, where no operation is dispatched.

    Functions of ``torch.nn.init`` that depend on values do nothing for tensors on the meta device. They count as one
    write, also to tensors with memory, and draw for stand-ins the random numbers that they draw for values.
    """

    def __init__(self, tensors: MetaTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_DEVICE, _IS_META, _IS_CPU, _SET_DATA):
            with below_functions():
                device = self._tensors.device_of(args[0])
                if func == _SET_DATA and device is not None and not args[1].is_meta:
                    args = args[0], self._tensors.stand_in(args[1])
                elif func == _IS_META and self._is_initialized(args[0], device):
                    return True
            if device is not None and func != _SET_DATA:
                return {_DEVICE: device, _IS_META: False, _IS_CPU: device.type == "cpu"}[func]
        return func(*args, **(kwargs or {}))

    def _is_initialized(self, tensor: Tensor, device: torch.device | None) -> bool:
        """Run a function of ``torch.nn.init`` that asks for the device of a known tensor, and return whether it did."""
        frame, is_without = sys._getframe(2), _is_without(tensor)
        while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
            frame = frame.f_back  # of another mode, such as that of ``with torch.device(…)``
        if not (is_without or self._tensors.find(tensor)) or frame.f_globals.get("__name__") != "torch.nn.init":
            return False
        self._tensors.count(tensor)
        if device is not None or not is_without:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            real = torch.ones(tensor.shape, dtype=tensor.dtype, device=device) if is_without else tensor
            arguments = {name: real if frame.f_locals[name] is tensor else frame.f_locals[name] for name in names}
            self._tensors.counts = False
            try:
                frame.f_globals[code.co_name](**arguments)
            finally:
                self._tensors.counts = True
        return True


# ── the build ───────────────────────────────────────────────────────────────────────────────────────────────────────


CopySlice = Callable[[Tensor, Tensor], None]
"""Copies this rank's slices of the second, full tensor into the first."""
_IN_INIT = (
    "Code that needs values of parameters while it builds belongs into __init__, where every rank has them; in Fabric, "
    "into init_module(empty_init=False)."
)
SLOTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "parameter": parameter_slots, "buffer": buffer_slots, "attribute": vars,
}  # fmt: skip
"""By the kind of a tensor of a module: a function that returns the mutable dict of the module that has it."""


class Place(NamedTuple):
    """A tensor of a module: its "parameter", "buffer" or "attribute" in the mapping ``slots``, under ``name``."""

    fqn: str
    kind: str
    module: nn.Module
    slots: MutableMapping[str, Any]
    name: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.fqn}  {self.kind} of {type(self.module).__name__}"

    @property
    def is_without(self) -> bool:
        """Whether the tensor has no memory on this rank."""
        return bool(local_tensor(self.tensor).is_meta)


def list_places(root: nn.Module) -> list[Place]:
    """Return the tensors of ``root``, under all their names; of attributes only plain tensors."""
    places = list[Place]()
    for prefix, module in root.named_modules():
        for kind, slots_of in SLOTS.items():
            slots = slots_of(module)
            for name, value in slots.items():
                if type(value) is Tensor or (kind != "attribute" and value is not None):
                    places.append(Place(f"{prefix}.{name}" if prefix else name, kind, module, slots, name, value))
    return places


Value = tuple[list[Place], Tensor]
"""A parameter that only rank 0 has: where it was registered, and its value there, on the meta device elsewhere."""


class Build:
    """The builds of modules of one strategy.

    Attributes:
        tensors: those without memory, with the number of in-place writes to them, on every rank alike.
        only_first: the places in words that only rank 0 has, found by `compare`.
    """

    def __init__(self) -> None:
        self.tensors, self.only_first = MetaTensors(), frozenset[str]()
        self._whole = WeakKeyDictionary[nn.Module, dict[str, Tensor]]()

    @contextmanager
    def building(self, ranks: Ranks, *, on_one_rank: bool = True, phase: str = "building the module") -> Iterator[None]:
        """Run code that builds modules, with values on rank 0 alone, or on every rank unless ``on_one_rank``.

        Collective: every rank of the world must enter it, with its ``ranks``. If the code fails on one rank, all raise.

        Raises:
            UnsupportedCodeError: if the code failed on this rank, but not on rank 0, which has the values.
            RankError: if it failed on another rank.
        """
        follows = on_one_rank and dist.is_initialized() and dist.get_rank() > 0
        register: Any = partial(self._register, follows, threading.get_ident())
        with share_rng():
            error: BaseException | None = None
            hooks = [register_module_parameter_registration_hook(register)]
            hooks.append(register_module_buffer_registration_hook(register))
            try:
                with distribute_locally(), self.tensors, ShownDevices(self.tensors):
                    yield
            except BaseException as raised:
                error = raised
            finally:
                for hook in hooks:
                    hook.remove()

            def end() -> None:
                if follows and isinstance(error, Exception):
                    text = f"{type(error).__name__}: {error}. Rank 0 alone builds with values. {_IN_INIT}"
                    raise UnsupportedCodeError(text) from error
                if error is not None:
                    raise error

            ranks.step(phase, end, lambda _: None)
            broadcast_rng(None)

    def _register(self, follows: bool, thread: int, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        """Note a tensor that a module registers, and take the memory of a parameter that only rank 0 should have."""
        if tensor is None or threading.get_ident() != thread or isinstance(tensor, DTensor):
            return
        if tensor.is_meta:
            known = self.tensors.know(tensor)
            if known.owner() is None:
                known.owner = ref(module)
        elif isinstance(tensor, nn.Parameter) and not follows:
            self._whole.setdefault(module, {})[name] = tensor
        elif type(tensor) is nn.Parameter and tensor.layout is torch.strided:
            with below_functions():
                if not tensor.is_meta:  # a stand-in, which shows another device
                    meta = nn.Parameter(self.tensors.stand_in(tensor), tensor.requires_grad)
                    meta.__dict__.update(vars(tensor))
                    with suppress(RuntimeError):  # if it has weak references; then every rank has its value
                        torch.utils.swap_tensors(tensor, meta)  # type: ignore[no-untyped-call]

    def compare(self, root: nn.Module, ranks: Ranks) -> None:
        """Find the tensors that only rank 0 has.

        Collective: every rank of ``ranks`` must call it.

        Raises:
            TopologyError: if the ranks built different modules; names the first differences.
            UnsupportedCodeError: if a buffer shares the memory of a parameter.
        """
        phase, places, ties = "comparing the modules that the ranks have built", list_places(root), dict[int, str]()
        lines = [
            f"{place}  {tuple(place.tensor.shape)} {place.tensor.dtype} {type(place.tensor).__name__} "
            f"{'with gradient' * place.tensor.requires_grad} first named {ties.setdefault(id(place.tensor), place.fqn)}"
            for place in places
            if place.kind != "attribute"
        ]
        without = [str(place) for place in places if place.is_without]

        def work() -> list[list[str]]:
            _refuse_shared_memory(places)
            return [lines if ranks.rank == 0 else [], without if ranks.rank < 2 else []]

        def lead(reports: list[list[list[str]]]) -> list[list[str]]:
            # what rank 1 has not, the others have not, either
            return [*reports[0], sorted({*reports[min(1, ranks.world - 1)][1]}.difference(reports[0][1]))]

        expected, first_without, only_first = ranks.step(phase, work, lead)

        def check() -> None:
            unlike = {*first_without, *(only_first if ranks.rank else ())}.symmetric_difference(without)
            unlike |= {*only_first}.difference(map(str, places))
            if unlike or lines != expected:
                here, there = set(lines), set(expected)
                differences = [f"{line}  only on rank 0" for line in expected if line not in here]
                differences += [f"{line}  only on rank {ranks.rank}" for line in lines if line not in there]
                differences += [f"{place}  without memory on one of them alone" for place in sorted(unlike)]
                raise TopologyError(
                    f"rank 0 and rank {ranks.rank or 1} have built different modules:\n  "
                    f"{list_some(differences or ['the order of tensors'], 10, chr(10) + '  ')}\n"
                    f"Build the same module on every rank: its code must not depend on the rank. {_IN_INIT}"
                )

        ranks.step(phase, check, lambda _: None)
        self.only_first = frozenset(only_first)

    def take(self, root: nn.Module, loaded: Set[str]) -> list[Value]:
        """Take the parameters that only rank 0 has out of the module, which has tensors without memory then.

        Those of which a clean FQN is in ``loaded`` need no value.
        """
        values, metas = dict[Tensor, Value](), dict[Tensor, Tensor]()
        for place in list_places(root):
            if place.kind != "parameter" or str(place) not in self.only_first:
                continue
            old = place.tensor
            if old not in values:
                whole = self._whole.get(place.module, {}).get(place.name, old) if isinstance(old, DTensor) else old
                value = torch.empty(old.shape, dtype=old.dtype, device="meta") if place.is_without else whole.detach()
                values[old] = [], value
                metas[old] = old if place.is_without or isinstance(old, DTensor) else like(old, "meta")
            values[old][0].append(place)
            place.slots[place.name] = metas[old]
        for module in root.modules():
            self._whole.pop(module, None)
        return [value for value in values.values() if loaded.isdisjoint(clean_fqn(place.fqn) for place in value[0])]


def like(tensor: Tensor, device: str) -> Tensor:
    """Return a plain tensor of the same kind and attributes, on ``device``, with memory of its own."""
    if isinstance(tensor, DTensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        new = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(vars(tensor))
    return new


def _refuse_shared_memory(places: Sequence[Place]) -> None:
    """Raise for the first buffer that shares the memory of a parameter."""
    with below_functions():
        has_none = (UninitializedBuffer, UninitializedParameter)
        plain = [p for p in places if not isinstance(p.tensor, has_none) and not dispatches(type(p.tensor))]
        memories = [(p, memory_id(p.tensor)) for p in plain if p.tensor.layout is torch.strided and p.tensor.numel()]
        names = {memory: place.fqn for place, memory in memories if place.kind == "parameter"}
        for place, memory in memories:
            if place.kind == "buffer" and memory in names and not isinstance(place.tensor, nn.Parameter):
                raise UnsupportedCodeError(
                    f"the buffer {place.fqn} is in the memory of the parameter {names[memory]}: it would change with "
                    "every step on one process, but not when the parameter is sharded. Register a clone(), or read the "
                    "parameter."
                )


# ── from rank 0 to all ────────────────────────────────────────────────────────────────────────────────────────────────


def _broadcast(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's tensor over the world; as bytes, since gloo supports neither bool nor fp8."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.numel():
        dist.broadcast(byte_view(tensor), src=0)
    return tensor


@torch.no_grad()
def share_tensors(root: nn.Module, device: torch.device, only_first: Collection[str] = ()) -> None:
    """Give all ranks rank 0's parameters and buffers, one tensor at a time: in place, or memory to those without.

    Leaves alone DTensors, parameters that only rank 0 has, tensors that no rank has, and attributes that all have.
    Collectives run on ``device``.

    Collective: every rank of the world must call it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    shared = dict[int, Tensor]()
    for place in list_places(root):
        old, is_alone = place.tensor, str(place) in only_first
        is_sent = place.kind == "buffer" or is_alone == (place.kind == "attribute")
        if isinstance(old, DTensor) or not is_sent or (old.is_meta and not is_alone):
            continue
        if id(old) not in shared:
            value = _broadcast(torch.empty_like(old, device=device) if old.is_meta else old.detach().to(device))
            shared[id(old)] = value.to("cpu").requires_grad_(old.requires_grad) if old.is_meta else old
            if not old.is_meta and value.data_ptr() != old.data_ptr():
                old.copy_(value)
        place.slots[place.name] = shared[id(old)]


@torch.no_grad()
def send_values(values: list[Value], root: nn.Module, copy_slice: CopySlice, device: torch.device) -> None:
    """Send the values to all ranks, one after the other; each copies its slices, and rank 0 frees the whole.

    Collective: every rank of the world must call it. ``values`` is emptied.

    Raises:
        TopologyError: if sharding has changed the global shape of a parameter.
    """
    present = set(root.modules())
    while values:
        places, full = values.pop(0)
        full = _broadcast(torch.empty_like(full, device=device) if full.is_meta else full.to(device))
        fill(present, places, full, copy_slice)


def fill(present: Collection[nn.Module], places: Iterable[Place], full: Tensor, copy_slice: CopySlice) -> None:
    """Copy this rank's slices of a value into the parameter that a module of ``present`` has at a place, if any has.

    Raises:
        TopologyError: if sharding has changed the parameter's global shape.
    """
    for place in places:
        is_here = place.kind == "parameter" and place.module in present
        parameter = parameter_slots(place.module).get(place.name) if is_here else None
        if parameter is None:
            continue
        if parameter.shape != full.shape:
            raise TopologyError(
                f"the parameter {place.fqn} has shape {tuple(parameter.shape)} after it was sharded, "
                f"{tuple(full.shape)} as built; a tensor-parallel plan must keep global shapes"
            )
        copy_slice(parameter, full)
        return
