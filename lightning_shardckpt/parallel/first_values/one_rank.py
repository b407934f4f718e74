"""Modules that rank 0 builds with values and the others without memory, and the way of the values to all ranks.

1. `Build.building` runs the code that builds. On the other ranks parameters lose their memory when modules register
   them; the code runs otherwise unchanged, and draws the same random numbers (`MetaTensors`).
2. `Build.compare` finds out which tensors only rank 0 has, and refuses ranks that built different modules.
3. `share_tensors` gives all ranks rank 0's buffers, and the parameters that every rank has.
4. `Build.take` frees the module of the other parameters, so that it can be sharded, and `send_values` fills what is
   sharded, one tensor at a time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_distributed import distribute_locally
from lightning_shardckpt.compat.torch_modules import buffer_slots, parameter_slots
from lightning_shardckpt.compat.torch_tensors import (
    DispatchMode,
    Overload,
    below_functions,
    dispatches,
    memory_id,
    tree_flatten,
    tree_unflatten,
)
from lightning_shardckpt.compat.torch_tensors import written_arguments as written
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError, TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.sharding.shared_values import broadcast_rng, share_rng
from lightning_shardckpt.parallel.tensors.parameters import REGISTRIES, refuse_shared_memory, replace_in_attributes
from lightning_shardckpt.system.tensor_digest import byte_view
from lightning_shardckpt.system.text import list_some

# ── tensors on the meta device ──────────────────────────────────────────────────────────────────────────────────────

# Two torch modes see them while modules are built or initialised. In-place writes to them are counted. Some of them are
# stand-ins: they show the device of a tensor with values, mix with tensors that have memory, and draw as many random
# numbers. Code that reads their values fails with torch's own error.

_DEVICE: Any = Tensor.device.__get__
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Known:
    """The storage of a tensor, which keeps its id, the writes to it, and the device that it shows."""

    storage: torch.UntypedStorage
    writes: int = 0
    device: torch.device | None = None


class MetaTensors:
    """What is known of tensors on the meta device, by their storages.

    Attributes:
        touched: ids of the storages that operations have read or written, since the caller emptied it.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self.touched = set[int]()

    def know(self, tensor: Tensor, device: torch.device | None = None) -> None:
        """Count the writes to a tensor from now on, and let it stand for one on ``device``, if that is given."""
        known = self._known.setdefault(memory_id(tensor), _Known(tensor.untyped_storage()))
        known.device = known.device or device

    def count(self, tensor: Tensor) -> None:
        """Count a write to a tensor."""
        self.know(tensor)
        self._known[memory_id(tensor)].writes += 1

    def writes(self, tensor: Tensor) -> int | None:
        """Return the number of writes to a tensor; None for one that is not known."""
        known = self._find(tensor)
        return None if known is None else known.writes

    def device(self, tensor: Any) -> torch.device | None:
        """Return the device that a tensor shows; None for tensors that stand for nothing."""
        known = self._find(tensor) if isinstance(tensor, Tensor) else None
        return None if known is None else known.device

    def _find(self, tensor: Tensor) -> _Known | None:
        return self._known.get(memory_id(tensor)) if _is_without(tensor) else None

    def make_stand_in(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory that stands for ``tensor``."""
        made = torch.empty_like(tensor, device="meta")
        self.know(made, tensor.device)
        return made

    def drop_memory(self, parameter: nn.Parameter) -> None:
        """Turn a parameter into a stand-in without memory, the same object, if torch can do that.

        It can't for objects with weak references. Other classes than ``nn.Parameter`` keep their memory, too.
        """
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_meta:
            return
        with below_functions():
            meta = nn.Parameter(self.make_stand_in(parameter), parameter.requires_grad)
            meta.__dict__.update(vars(parameter))
            try:
                torch.utils.swap_tensors(parameter, meta)  # type: ignore[no-untyped-call]
            except RuntimeError:
                return

    @contextmanager
    def watched(self, *, draws: bool) -> Iterator[None]:
        """Inside, count writes, and let stand-ins act as tensors with values; what is computed from them is one, too.

        Args:
            draws: whether an operation on stand-ins draws the random numbers that it would draw for values.
        """
        with _Operations(self, draws), _Shown(self, draws):
            yield


def _is_without(tensor: Tensor) -> bool:
    return not dispatches(type(tensor)) and tensor.layout is torch.strided and tensor.device.type == "meta"


class _Operations(DispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    def __init__(self, tensors: MetaTensors, draws: bool) -> None:
        super().__init__()
        self._tensors, self._draws = tensors, draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(dispatches, types)):
            with below_functions():
                _refuse_changes_of_shards(func, args, kwargs)
            return func(*args, **kwargs)
        with below_functions():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = _tensors(written(func, args, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        without = [t for t in leaves if isinstance(t, Tensor) and _is_without(t)]
        for tensor in filter(_is_without, changed):
            self._tensors.count(tensor)
        self._tensors.touched.update(map(memory_id, without))
        shown = next((device for t in without if (device := self._tensors.device(t)) is not None), None)
        if shown is None:
            return func(*args, **kwargs)
        if any(not t.is_meta for t in changed):
            raise StateError(f"{func} would write values of a tensor without memory to one with memory")
        if self._draws and torch.Tag.nondeterministic_seeded in func.tags:  # on ones, which are dropped
            real = [torch.ones_like(t, device=shown) if isinstance(t, Tensor) and t.is_meta else t for t in leaves]
            real_args, real_kwargs = tree_unflatten(real, spec)
            func(*real_args, **real_kwargs)
        leaves = [t.to("meta") if isinstance(t, Tensor) and not t.is_meta else t for t in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        for tensor in filter(_is_without, _tensors(result)):
            self._tensors.know(tensor, shown)
        return result


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _refuse_changes_of_shards(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for tensor in _tensors(written(func, args, kwargs)):
        if tensor.device.type == "meta":
            raise StateError(
                f"cannot run {func} on a parameter of shape {tuple(tensor.shape)} that was parallelised: initialise "
                "parameters before parallelising them"
            )


class _Shown(TorchFunctionMode):
    """Shows the device of the tensor that a stand-in stands for, where no operation is dispatched.

    Functions of ``torch.nn.init`` that depend on values do nothing for tensors on the meta device. They count as one
    write, and draw for stand-ins the random numbers that they draw for values.
    """

    def __init__(self, tensors: MetaTensors, draws: bool) -> None:
        super().__init__()
        self._tensors, self._draws = tensors, draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (_DEVICE, _IS_META, _IS_CPU):
            tensor, frame = args[0], sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
                frame = frame.f_back  # of another mode, such as that of ``with torch.device(…)``
            with below_functions():
                device, is_without = self._tensors.device(tensor), _is_without(tensor)
            if func == _IS_META and is_without and frame.f_globals.get("__name__") == "torch.nn.init":
                self._initialize(tensor, device, frame)
                return True
            if device is not None:
                return {_DEVICE: device, _IS_META: False, _IS_CPU: device.type == "cpu"}[func]
        elif func == _SET_DATA:
            with below_functions():
                if self._tensors.device(args[0]) is not None and not args[1].is_meta:
                    args = (args[0], self._tensors.make_stand_in(args[1]))
        return func(*args, **(kwargs or {}))

    def _initialize(self, tensor: Tensor, device: torch.device | None, frame: FrameType) -> None:
        """Count a function of ``torch.nn.init``, which has asked for the device, and draw its random numbers."""
        self._tensors.count(tensor)
        self._tensors.touched.add(memory_id(tensor))
        if self._draws and device is not None:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            real = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            arguments = {name: frame.f_locals[name] for name in names}
            frame.f_globals[code.co_name](**{n: real if value is tensor else value for n, value in arguments.items()})


# ── the build ───────────────────────────────────────────────────────────────────────────────────────────────────────


CopySlice = Callable[[Tensor, Tensor], None]
"""Copies this rank's slices of the second, full tensor into the first."""
_LARGEST = 10_000  # items of a container that is searched for tensors
_REMEDY = (
    "Build the same module on every rank: its code must not depend on the rank. Code that depends on values of "
    "parameters belongs into __init__, where every rank has them; in Fabric, into init_module(empty_init=False)."
)
_FOLLOWS = (
    ". Rank 0 alone builds with values. If the code needs values of parameters while it builds, move it into __init__, "
    "where every rank has them; in Fabric, into init_module(empty_init=False)"
)


class Place(NamedTuple):
    """A tensor of a module: a parameter, a buffer, an attribute, or an item of a container in an attribute.

    Attributes:
        fqn: the name, as registered.
        kind: "parameter", "buffer", "attribute", or the class of the container.
        module: the owner.
        slots: the mapping of the owner that has it under ``name``; of a container's item the owner's attributes.
    """

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


def list_places(root: nn.Module) -> Iterator[Place]:
    """Yield the tensors of ``root``, under all their names; of attributes only plain tensors."""
    for prefix, module in root.named_modules():
        prefix = f"{prefix}." if prefix else ""
        for kind, slots in (("parameter", parameter_slots(module)), ("buffer", buffer_slots(module))):
            for name, tensor in list(slots.items()):
                if tensor is not None:
                    yield Place(prefix + name, kind, module, slots, name, tensor)
        for name, value in list(vars(module).items()):
            if type(value) is Tensor:
                yield Place(prefix + name, "attribute", module, vars(module), name, value)
            elif name not in REGISTRIES:
                for path, tensor in _items(value):
                    yield Place(f"{prefix}{name}{path}", type(value).__name__, module, vars(module), name, tensor)


def _items(value: object, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors in containers, with their places."""
    if type(value) not in (list, tuple, dict) or len(value) > _LARGEST or not depth:  # type: ignore[arg-type]
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):  # type: ignore[arg-type]
        if type(item) is Tensor:
            yield f"[{key}]", item
        else:
            yield from ((f"[{key}]{path}", tensor) for path, tensor in _items(item, depth - 1))


@dataclass(slots=True)
class Value:
    """A parameter that only rank 0 has: where it was registered, and its value there, None on other ranks."""

    places: list[Place]
    shape: torch.Size
    dtype: torch.dtype
    full: Tensor | None


@dataclass(slots=True)
class Build:
    """The builds of modules of one strategy.

    Attributes:
        tensors: those without memory, with the number of in-place writes to them, on every rank alike.
        only_first: the places in words that only rank 0 has, found by `compare`.
    """

    tensors: MetaTensors = field(default_factory=MetaTensors)
    only_first: frozenset[str] = frozenset()
    _owners: dict[int, ref[nn.Module]] = field(default_factory=dict)  # by the id of a counted tensor's memory
    _whole: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = field(default_factory=WeakKeyDictionary)

    @contextmanager
    def building(self, ranks: Ranks, *, on_one_rank: bool = True, phase: str = "building the module") -> Iterator[None]:
        """Run code that builds modules, with values on rank 0 alone.

        Collective: every rank of the world must enter it. If the code fails on one rank, all raise.

        Args:
            ranks: of the world.
            on_one_rank: False if every rank builds with values.
            phase: for messages.

        Raises:
            UnsupportedCodeError: if the code failed on this rank, but not on rank 0, which has the values.
            RankError: if it failed on another rank.
        """
        follows = on_one_rank and dist.is_initialized() and dist.get_rank() > 0
        error: BaseException | None = None

        def raise_error() -> None:
            if follows and isinstance(error, Exception):
                raise UnsupportedCodeError(f"{type(error).__name__}: {error}{_FOLLOWS}") from error
            if error is not None:
                raise error

        with share_rng():
            try:
                with self._watched(follows=follows):
                    yield
            except BaseException as raised:
                error = raised
            ranks.step(phase, raise_error, lambda _: None)
            if dist.is_initialized():
                broadcast_rng(None)

    @contextmanager
    def _watched(self, *, follows: bool) -> Iterator[None]:
        thread = threading.get_ident()

        def register(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            if tensor is None or threading.get_ident() != thread or isinstance(tensor, DTensor):
                return
            if tensor.is_meta:
                self.tensors.know(tensor)
                self._owners.setdefault(memory_id(tensor), ref(module))
            elif isinstance(tensor, nn.Parameter):
                if follows:
                    self.tensors.drop_memory(tensor)
                else:
                    self._whole.setdefault(module, {})[name] = tensor

        with ExitStack() as undo:
            undo.callback(register_module_parameter_registration_hook(register).remove)
            undo.callback(register_module_buffer_registration_hook(register).remove)
            undo.enter_context(distribute_locally())
            undo.enter_context(self.tensors.watched(draws=True))
            yield

    def is_owner(self, place: Place) -> bool:
        """Return whether a module was the first to register a tensor on the meta device, which others were tied to."""
        owner = self._owners.get(memory_id(place.tensor)) if self.tensors.writes(place.tensor) is not None else None
        return owner is not None and owner() is place.module

    def compare(self, root: nn.Module, ranks: Ranks) -> None:
        """Find the tensors that only rank 0 has.

        Collective: every rank of ``ranks`` must call it.

        Raises:
            TopologyError: if the ranks built different modules; names the first difference.
            UnsupportedCodeError: if a buffer shares the memory of a parameter.
        """
        lines, without = list[str](), list[str]()

        def work() -> list[Any]:
            refuse_shared_memory(root)
            lines[:], without[:] = _describe(root)
            # what rank 1 has not, the others have not, either
            return [_digest(lines), _digest(without), without if ranks.rank < 2 else []]

        def lead(reports: list[list[Any]]) -> list[str] | None:
            first, *others = reports
            only_first = set(others[0][2] if others else ()).difference(first[2])
            is_same = len({report[0] for report in reports}) == len({report[1] for report in others} or {""}) == 1
            return sorted(only_first) if is_same and only_first <= {str(place) for place in list_places(root)} else None

        found = ranks.step("comparing the modules that the ranks have built", work, lead)
        if found is None:
            ranks.step("comparing the modules that the ranks have built", lambda: lines, _refuse_difference)
        self.only_first = frozenset(found or ())

    def take(self, root: nn.Module, loaded: Collection[str]) -> list[Value]:
        """Take the parameters that only rank 0 has out of the module, which has tensors without memory then.

        Args:
            root: the module.
            loaded: clean FQNs of parameters that need no value.
        """
        values, metas = dict[int, Value](), dict[int, Tensor]()
        places = [p for p in list_places(root) if p.kind == "parameter" and str(p) in self.only_first]
        skipped = {id(place.tensor) for place in places if clean_fqn(place.fqn) in loaded}
        for place in places:
            old, key = place.tensor, id(place.tensor)
            if key not in values:
                whole = self._whole.get(place.module, {}).get(place.name, old) if isinstance(old, DTensor) else old
                full = None if place.is_without else whole.detach()
                values[key] = Value([], old.shape, old.dtype, full)
                metas[key] = old if place.is_without or isinstance(old, DTensor) else like(old, "meta")
            values[key].places.append(place)
            place.slots[place.name] = metas[key]
        for module in root.modules():
            self._whole.pop(module, None)
        return [value for key, value in values.items() if key not in skipped]


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


def _describe(root: nn.Module) -> tuple[list[str], list[str]]:
    """Return the parameters and buffers in words, and the places that have no memory on this rank."""
    lines, without, first = list[str](), list[str](), dict[int, str]()
    for place in list_places(root):
        tensor = place.tensor
        if place.kind in ("parameter", "buffer"):
            tie, kind = first.setdefault(id(tensor), place.fqn), "DTensor" if isinstance(tensor, DTensor) else ""
            needs = "with gradient" if tensor.requires_grad else ""
            lines.append(f"{place} {kind} {tuple(tensor.shape)} {tensor.dtype} {needs} first named {tie}")
        if place.is_without:
            without.append(str(place))
    return lines, without


def _digest(lines: list[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()


def _refuse_difference(reports: list[list[str]]) -> None:
    """Raise a TopologyError that names the first tensors in which a rank differs from rank 0."""
    for rank, lines in enumerate(reports):
        differences = [f"{line}  only on rank 0" for line in reports[0] if line not in set(lines)]
        differences += [f"{line}  only on rank {rank}" for line in lines if line not in set(reports[0])]
        if differences or lines != reports[0]:
            listed = list_some(differences or ["the order of tensors"], 10, "\n  ")
            raise TopologyError(f"rank 0 and rank {rank} have built different modules:\n  {listed}\n{_REMEDY}")
    raise TopologyError(f"the modules of the ranks differ in the tensors that have no memory. {_REMEDY}")


# ── from rank 0 to all ────────────────────────────────────────────────────────────────────────────────────────────────


def _broadcast(tensor: Tensor) -> None:
    """Broadcast rank 0's contiguous tensor over the world; as bytes, since gloo supports neither bool nor fp8."""
    if tensor.numel():
        dist.broadcast(byte_view(tensor), src=0)


@torch.no_grad()
def share_tensors(root: nn.Module, device: torch.device, only_first: Collection[str] = ()) -> None:
    """Give all ranks rank 0's parameters and buffers, one tensor at a time: in place, or memory to those without.

    Leaves alone DTensors, parameters that only rank 0 has, tensors that no rank has, and attributes that all have.

    Collective: every rank of the world must call it.

    Args:
        root: the module.
        device: of the collectives.
        only_first: places that only rank 0 has.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    shared = dict[int, Tensor]()
    for place in list_places(root):
        old, is_alone = place.tensor, str(place) in only_first
        is_sent = place.kind == "buffer" or is_alone != (place.kind == "parameter")
        if id(old) in shared or isinstance(old, DTensor) or not is_sent or (old.is_meta and not is_alone):
            continue
        value = torch.empty_like(old, device=device) if old.is_meta else old.detach().to(device)
        _broadcast(value := value.resolve_conj().resolve_neg().contiguous())
        shared[id(old)] = value.to("cpu").requires_grad_(old.requires_grad) if old.is_meta else old
        if not is_alone and value.data_ptr() != old.data_ptr():
            old.copy_(value)
    for place in list_places(root):
        if place.kind == "buffer":
            place.slots[place.name] = shared.get(id(place.tensor), place.tensor)
    replace_in_attributes(root, lambda value: shared.get(id(value), value), _LARGEST)


@torch.no_grad()
def send_values(values: list[Value], root: nn.Module, copy_slice: CopySlice, device: torch.device) -> None:
    """Send the values to all ranks, one after the other; each copies its slices, and rank 0 frees the whole.

    Collective: every rank of the world must call it. ``values`` is emptied.

    Raises:
        TopologyError: if sharding has changed the global shape of a parameter.
    """
    present = set(root.modules())
    while values:
        value = values.pop(0)
        full = torch.empty(value.shape, dtype=value.dtype, device=device) if value.full is None else value.full
        _broadcast(full := full.to(device).resolve_conj().resolve_neg().contiguous())
        parameter = find_parameter(present, value.places)
        if parameter is not None:
            fill(parameter, value.places[0].fqn, full, copy_slice)


def find_parameter(present: Collection[nn.Module], places: Iterable[Place]) -> Tensor | None:
    """Return the parameter that a module of ``present`` has now at the first of some places, if there is one."""
    for place in places:
        if place.kind == "parameter" and place.module in present:
            found = parameter_slots(place.module).get(place.name)
            if found is not None:
                return found
    return None


def fill(parameter: Tensor, fqn: str, full: Tensor, copy_slice: CopySlice) -> None:
    """Copy this rank's slices of a value into a parameter.

    Raises:
        TopologyError: if sharding has changed the parameter's global shape.
    """
    if parameter.shape != full.shape:
        raise TopologyError(
            f"the parameter {fqn} has shape {tuple(parameter.shape)} after it was sharded, {tuple(full.shape)} as "
            "built; a tensor-parallel plan must keep global shapes"
        )
    copy_slice(parameter, full)
