"""Let a module have whole parameters while its forward runs, where torch's engine gathers them.

A *unit* is a module with the parameters of all modules inside it but those of units of their own. While its
``forward`` runs, those that ``fully_shard`` gathers, see `carriers`, are plain tensors, through autograd. All others
stay the sharded ones, which act as whole ones by themselves, parameter by parameter. Plain are also those that
torch.compile or a fast path of torch's attention is going to see, that a tensor-parallel plan shards, and that a
pipeline keeps for several passes.

Where activations are kept for the backward, the whole parameters among them are not: autograd keeps a note in their
place, and ``fully_shard`` gathers again when it asks for one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.pytree import map_tensors
from lightning_shardckpt.compat.torch_modules import (
    has_compiled,
    parameter_slots,
    refresh_flat_weights,
    restore_flat_weights,
    set_frame_callback,
    skip_folders,
)
from lightning_shardckpt.compat.torch_tensors import (
    in_functional_transform,
    memory_id,
    version_of,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.carriers import Carried, Carrier, Engine, PlannedUnit
from lightning_shardckpt.parallel.sharding.gathered_parameters import (
    KeptGathers,
    as_gathered,
    begin_forward,
    end_forward,
    show_to_compiler,
    values_of,
    views_of,
    was_assigned,
)
from lightning_shardckpt.parallel.sharding.tensor_parallel import refuse_compiled, sharded_as_planned
from lightning_shardckpt.parallel.tensors.autocast_weights import LAYERS, CastWeight, cast_weights, has_cast_weight
from lightning_shardckpt.parallel.tensors.placement import local_part
from lightning_shardckpt.parallel.tensors.saved_parameters import SavedParameters
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import check_equal_on_ranks, gather_whole, sharding_of
from lightning_shardckpt.parallel.tensors.views import connect_to_shards

_log = logging.getLogger(__name__)
Forward = Callable[..., Any]
Slot = tuple[nn.Module, str]
_PACKAGE = Path(__file__).parents[2]
_NOT_COMPILED = [str(_PACKAGE / folder) for folder in ("compat", "parallel/sharding", "parallel/tensors")]
"""The folders of the code that shards: torch.compile is for what the forwards of units do inside."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The settings of a module whose forward has whole parameters.

    Attributes:
        name: of the module, for messages.
        device: where its parameters are gathered.
        reshard: whether torch's engine frees them between forward and backward.
        is_rest: whether torch's engine may gather them with those of other units.
        recompute: whether to compute the activations again in the backward, instead of keeping them.
        inner: whether it is a part of another unit, so that torch's engine has nothing of it.
        engine: torch's; None without it.
    """

    name: str
    device: torch.device
    reshard: bool = False
    is_rest: bool = False
    recompute: bool = False
    inner: bool = False
    engine: Engine | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self


def make_unit(module: nn.Module, unit: Unit) -> None:
    """Let the forward of ``module`` be one of a unit: an attribute of it, so that its class stays as it is."""
    skip_folders(_NOT_COMPILED)
    module.__dict__["forward"] = UnitForward(module, unit, vars(module).get("forward"))


def is_unit(module: nn.Module) -> bool:
    """Return whether a module gathers its own parameters, also inside of another unit."""
    forward = vars(module).get("forward")
    return isinstance(forward, UnitForward) and not forward.unit.inner


class UnitForward:
    """The forward of a module whose parameters are gathered meanwhile.

    Args:
        module: whose forward it is; not kept alive, since it keeps this.
        unit: how to gather.
        wrapped: what was the forward of this instance before, if somebody had given it one; else its class has it.
    """

    def __init__(self, module: nn.Module, unit: Unit, wrapped: Forward | None) -> None:
        self._module, self.unit, self._wrapped = ref(module), unit, wrapped
        self._places = list[Slot]()
        self._is_compiled = self._has_fast_paths = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.unit.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        return self._run(*args, **kwargs)

    @property
    def __wrapped__(self) -> Forward:
        """The forward without the gathering, whose signature ``inspect`` shows."""
        return self._wrapped or MethodType(type(self._owner).forward, self._owner)

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None  # somebody calls it
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitForward:
        module = memo.get(id(self._owner), self._owner)  # it is in there if it is being copied
        return UnitForward(module, self.unit, deepcopy(self._wrapped, memo))

    def __reduce__(self) -> Any:
        """Be pickled as the forward of the class, without the mesh."""
        return (partial, (self._wrapped,)) if self._wrapped else (getattr, (self._owner, "forward"))

    # --- one forward ---

    def _run(self, /, *args: Any, **kwargs: Any) -> Any:
        compiler = set_frame_callback(None)  # it is for what the forward does
        try:
            slots = self._slots()
            leaves = list({id(leaf): leaf for _, _, leaf in slots}.values())
            _refuse_kept_views(self.unit.name, leaves)
            forward = partial(self.__wrapped__, *args, **kwargs)
            if leaves and KeptGathers.current is not None:
                wholes = KeptGathers.current.take(self._owner, partial(_gather_to_keep, self.unit, leaves))
                return self._run_with(slots, dict(zip(map(id, leaves), wholes, strict=True)), forward, compiler, {})
            body = partial(self._run_beside, slots, leaves, forward, compiler)
            is_compiled = compiler is not None or self._is_compiled
            for carrier, some in _carried(self.unit, leaves, is_compiled=is_compiled):
                body = partial(_run_carried, carrier, some, (args, kwargs), body)
            return body({})
        finally:
            set_frame_callback(compiler)

    def _slots(self) -> list[tuple[nn.Module, str, ShardedTensor]]:
        """Return where the parameters of the unit are now; nowhere, if it is running already."""
        if not self._places:
            module = self._owner
            self._places = [(m, name) for m in _own_modules(module) for name in parameter_slots(m)]
            self._is_compiled = has_compiled(module)
            self._has_fast_paths = any(isinstance(m, _WITH_FAST_PATHS) for m in module.modules())
        found: list[tuple[nn.Module, str, Any]] = [(m, name, parameter_slots(m).get(name)) for m, name in self._places]
        return [
            (m, name, leaf) for m, name, leaf in found if isinstance(leaf, ShardedTensor) and not has_cast_weight(leaf)
        ]

    def _run_beside(
        self,
        slots: Sequence[tuple[nn.Module, str, ShardedTensor]],
        leaves: Sequence[ShardedTensor],
        forward: Callable[[], Any],
        compiler: Any,
        carried: Carried,
    ) -> Any:
        """Run a forward with the parameters in ``carried``, and those of the others that must be plain, too."""
        is_compiled = compiler is not None or self._is_compiled
        are_plain, wholes = is_compiled or self._has_fast_paths, dict[int, Tensor]()
        for leaf in leaves:
            if (given := carried.get(id(leaf))) is not None:
                wholes[id(leaf)] = as_gathered(given.whole, leaf) if given.history is None else given.whole
            elif are_plain or sharding_of(leaf).model_mesh is not None:
                wholes[id(leaf)] = _gathered(self.unit, leaf)
        if is_compiled:
            planned = {number for number, whole in wholes.items() if isinstance(whole, DTensor)}
            if planned:
                refuse_compiled(self._owner, self.unit.name, planned, from_outside=compiler is not None)
            show_to_compiler(wholes.values())
        return self._run_with(slots, wholes, forward, compiler, carried)

    def _run_with(
        self,
        slots: Sequence[tuple[nn.Module, str, ShardedTensor]],
        gathered: dict[int, Tensor],
        forward: Callable[[], Any],
        compiler: Any,
        carried: Carried,
    ) -> Any:
        """Run a forward with whole parameters, by the ids of the sharded ones; those in ``carried`` are torch's."""
        name = self.unit.name
        shown = {id(leaf): leaf for _, _, leaf in slots if id(leaf) in gathered}
        leaves, wholes = list(shown.values()), [gathered[number] for number in shown]
        cast = {
            id(leaf): CastWeight.of(leaf, given.whole, given.history)
            for leaf in leaves
            if (given := carried.get(id(leaf))) is not None and given.history is not None
        }
        slots = [slot for slot in slots if id(slot[2]) in shown and id(slot[2]) not in cast]
        begin_forward(wholes)
        versions = [version_of(whole) for whole in wholes]
        saved = None
        if leaves and torch.is_grad_enabled() and KeptGathers.current is None:
            again = [carried[id(leaf)].again if id(leaf) in carried else None for leaf in leaves]
            saved = SavedParameters(name, leaves, wholes, again)
        try:
            noted = nullcontext() if saved is None else saved.hooks()
            with sharded_as_planned(self._places), _put_in_place(slots, gathered), cast_weights(cast), noted:
                set_frame_callback(compiler)
                try:
                    found = forward()
                finally:
                    set_frame_callback(None)
            for leaf, whole, version in zip(leaves, wholes, versions, strict=True):
                if version_of(whole) != version or was_assigned(whole):
                    _keep_change(leaf, whole, name)
                if views := views_of(whole):
                    views[:] = [view for view in views if view() is not None]
                    _views[leaf] = views, version_of(local_tensor(leaf))
            if saved is not None:
                saved.end_forward()
            freed = {memory_id(local_tensor(one.whole)) for one in carried.values()}
            return _handed_out(found, leaves, wholes, freed)
        finally:
            end_forward(wholes)


def _carried(
    unit: Unit, leaves: Sequence[ShardedTensor], *, is_compiled: bool
) -> list[tuple[Carrier, list[ShardedTensor]]]:
    """Return which parameters torch's engine gathers for the forward that begins."""
    if unit.engine is None or unit.inner or in_functional_transform():
        return []
    found = [
        (carrier, carrier.takes(leaves))
        for carrier in unit.engine.carriers_of(unit.name)
        if not (is_compiled and carrier.is_cast)  # the compiler sees no functions of sharded tensors
    ]
    return [(carrier, some) for carrier, some in found if some]


def _run_carried(
    carrier: Carrier,
    leaves: Sequence[ShardedTensor],
    inputs: Any,
    body: Callable[[Carried], Any],
    others: Carried,
) -> Any:
    return carrier.run(leaves, inputs, lambda given: body({**others, **given}))


def _gathered(unit: Unit, leaf: ShardedTensor) -> Tensor:
    """A whole parameter that torch's engine does not gather, as a forward is to see it."""
    with without_torch_function():
        return as_gathered(gather_whole(leaf, unit.name, on_model_axes=False, device=unit.device), leaf)


def _handed_out(found: Any, leaves: Sequence[Tensor], wholes: Sequence[Tensor], freed: Collection[int]) -> Any:
    """Return what a forward returns, with parameters as the sharded ones: what is done to them must reach the shards.

    Views of parameters are connected to the shards without gradients only: with them, nobody may change these.

    Args:
        found: what the forward returned.
        leaves: the parameters.
        wholes: the same, gathered.
        freed: the memory that torch's engine frees; views of it are copied.
    """
    known = {id(whole): leaf for leaf, whole in zip(leaves, wholes, strict=True) if isinstance(leaf, ShardedTensor)}

    def handed_out(value: Tensor) -> Tensor:
        if id(value) in known:
            return known[id(value)]
        if type(value) is not Tensor:
            return value
        base = value._base if not torch.is_grad_enabled() else None
        if base is not None and id(base) in known:
            memory = values_of(base)
            if memory_id(memory) in freed:
                memory = memory.clone()
                value = memory.as_strided(value.size(), value.stride(), value.storage_offset())
            return connect_to_shards(value, known[id(base)], memory)
        return value.clone() if value.layout == torch.strided and freed and memory_id(value) in freed else value

    return map_tensors(handed_out, found)


def _refuse_kept_views(name: str, leaves: Sequence[ShardedTensor]) -> None:
    """Raise where something over the memory of an earlier gather outlived changes of the parameter."""
    if not _views:
        return
    for leaf in leaves:
        views, version = _views.pop(leaf, ((), 0))
        if any(view() is not None for view in views) and version_of(local_tensor(leaf)) != version:
            raise UnsupportedCodeError(
                f"the forward of {name} keeps a view of its parameter of shape {tuple(leaf.shape)} from an earlier "
                "call (weight.detach(), weight.data). It would not follow the parameter, whose whole is gathered anew "
                "for each call: take it anew, too, or keep a copy (weight.detach().clone())."
            )


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside that are in no unit of their own."""
    yield module
    for child in module.children():
        if not is_unit(child):
            yield from _own_modules(child)


def list_units(root: nn.Module) -> list[PlannedUnit]:
    """Return the units of ``root`` with the parameters of each that torch's engine can gather: those of no other.

    Logs the names of all others.
    """
    units = [module for module in root.modules() if is_unit(module)]
    owned = {
        unit: {id(leaf): leaf for m in _own_modules(unit) for leaf in parameter_slots(m).values()} for unit in units
    }
    inside = {id(m) for unit in units for m in _own_modules(unit)}
    counts = Counter(number for leaves in owned.values() for number in leaves)
    counts.update(id(leaf) for m in root.modules() if id(m) not in inside for leaf in parameter_slots(m).values())
    planned, is_compiled = [], has_compiled(root)
    for unit, slots in owned.items():
        settings: Unit = unit.__dict__["forward"].unit
        sharded: list[Any] = [leaf for leaf in slots.values() if isinstance(leaf, ShardedTensor)]
        leaves = [p for p in sharded if p.is_floating_point() and p.numel() and counts[id(p)] == 1]
        if leaves:
            multiplied = set() if is_compiled else _multiplied(unit)
            planned.append(PlannedUnit(settings.name, leaves, settings.reshard, settings.is_rest, multiplied))
    carried = {id(leaf) for unit in planned for leaf in unit.leaves}
    others = [n for n, p in root.named_parameters() if isinstance(p, ShardedTensor) and id(p) not in carried]
    if others and dist.get_rank() == 0:
        _log.info(
            "fully_shard does not gather %s: tied across modules, complex, or in no module that is called. "
            "lightning_shardckpt gathers them when they are used.",
            ", ".join(others),
        )
    return planned


def _multiplied(unit: nn.Module) -> set[int]:
    """The ids of the parameters of a unit that only linear layers and convolutions have, as torch makes them."""
    inside, others = set[int](), set[int]()
    for module in _own_modules(unit):
        is_plain = type(module) in LAYERS and not isinstance(getattr(module, "padding", None), str)
        slots: dict[str, Any] = {**parameter_slots(module)}
        for name, leaf in slots.items():
            is_whole = isinstance(leaf, ShardedTensor) and sharding_of(leaf).model_mesh is None
            (inside if is_plain and is_whole and name in ("weight", "bias") else others).add(id(leaf))
    return inside - others


def refuse_nested_tensors(root: nn.Module) -> None:
    """Let encoders of torch inside ``root`` say that they do not leave out padding in evaluation, as they would alone.

    Torch makes nested tensors of padded batches then, with zeros at the places of padding in what it returns; but not
    if the class of parameters has functions of its own.
    """
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.register_forward_pre_hook(_refuse_nested_tensors, with_kwargs=True)


def _refuse_nested_tensors(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
    if encoder.training or mask is None or torch.is_grad_enabled() or not getattr(encoder, "use_nested_tensor", False):
        return
    if has_torch_function(tuple(encoder.parameters())):
        raise UnsupportedCodeError(
            "nn.TransformerEncoder returns zeros for padding (src_key_padding_mask) in evaluation, but not with "
            "parameters of several ranks. Build it with enable_nested_tensor=False, and leave padding out of what "
            "you compute of its output."
        )


_WITH_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_views: MutableMapping[ShardedTensor, tuple[Sequence[ref[Tensor]], int]] = WeakIdKeyDictionary()
"""What forwards took of gathered parameters and was alive after them, with the version of the parameter then."""


def _gather_to_keep(unit: Unit, leaves: Sequence[ShardedTensor]) -> list[Tensor]:
    """Gather parameters for several passes, by torch's engine what that takes."""
    wholes: dict[int, Tensor] = {}
    for carrier, some in _carried(unit, leaves, is_compiled=False):  # no pipeline casts what it gathers
        kept = map(as_gathered, carrier.keep(some), some)
        wholes |= dict(zip(map(id, some), kept, strict=True))
    return [wholes[id(leaf)] if id(leaf) in wholes else _gathered(unit, leaf) for leaf in leaves]


@contextmanager
def _put_in_place(slots: Sequence[tuple[nn.Module, str, ShardedTensor]], wholes: dict[int, Tensor]) -> Iterator[None]:
    for module, name, leaf in slots:
        parameter_slots(module)[name] = wholes[id(leaf)]  # type: ignore[assignment]  # torch takes it for a parameter
    flat = refresh_flat_weights({id(m): m for m, _, _ in slots}.values())
    try:
        yield
    finally:
        for module, name, leaf in slots:
            present = parameter_slots(module)
            if present.get(name) is wholes[id(leaf)]:  # else somebody has put another parameter there
                present[name] = leaf  # type: ignore[assignment]  # as above
        restore_flat_weights(flat)


def _keep_change(leaf: ShardedTensor, whole: Tensor, name: str) -> None:
    """Take over into the shards what a forward has written into a whole parameter."""
    if isinstance(whole, DTensor):
        raise UnsupportedCodeError(
            f"the forward of {name} changes a parameter of shape {tuple(whole.shape)} that tensor parallelism shards. "
            "Leave its module out of tensor_parallel_plan."
        )
    sharding = sharding_of(leaf)
    with without_torch_function(), torch.no_grad():
        values = values_of(whole).clone()  # NumPy makes the memory of an array's tensor not resizable
        check_equal_on_ranks(values, sharding, f"the forward of {name}")
        local_tensor(leaf).copy_(local_part(values_of(whole), sharding))
