"""Gather the parameters of a module in one go while its forward runs.

A *unit* is a module with the parameters of all modules inside it but those of units of their own. While its
``forward`` runs, these parameters are whole plain tensors, through autograd. Outside of it they are the sharded ones,
which act as whole ones by themselves, parameter by parameter: so units only save time, whatever is called how.

Where activations are kept for the backward, the whole parameters among them need not be: a unit that reshards keeps a
note in their place, and gathers again when autograd asks for one. So does FSDP, between forward and backward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.gather import Gather, GatherPlan, is_gathered, no_gradient
from lightning_shardckpt.parallel.sharding.held import HeldGradients
from lightning_shardckpt.parallel.sharding.placement import local_part
from lightning_shardckpt.parallel.sharding.sharded_tensor import ShardedTensor
from lightning_shardckpt.parallel.sharding.step_cache import recall, remember
from lightning_shardckpt.parallel.sharding.values import check_same, where_is

_UNIT, _FORWARD = "_shardckpt_unit", "_shardckpt_forward"
Forward = Callable[..., Any]
Slot = tuple[nn.Module, str]
_data: Any = Tensor.data
_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets what looks at the frames of Python in this thread, such as torch.compile, and returns what did before."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What the forward of a module has to do.

    Attributes:
        name: of the module, for messages.
        number: of that name, from `Peers.register`.
        device: where its parameters are gathered.
        held: where gradients accumulate, if they are to be reduced later.
        reshard: whether to free whole parameters between forward and backward.
        recompute: whether to compute the activations again in the backward, instead of keeping them.
        inner: whether it is a part of another unit, and gathers only when it is called without that.
        takes_plain: whether plain parameters take part where gathers are kept, so that their hooks run once for all
            passes.
    """

    name: str
    number: int
    device: torch.device
    held: HeldGradients
    reshard: bool = False
    recompute: bool = False
    inner: bool = False
    takes_plain: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self


def make_unit(module: nn.Module, unit: Unit) -> None:
    """Let the forward of ``module`` be one of a unit. Its class becomes one of the same name."""
    if "forward" in vars(module):  # somebody has wrapped it
        module.__dict__[_FORWARD] = module.__dict__.pop("forward")
    module.__dict__[_UNIT] = unit
    kind = type(module)
    _leave_out_of_graphs()
    made = type(kind.__name__, (_InUnit, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    object.__setattr__(module, "__class__", made)  # a compiled module would pass it on to what it wraps


def _leave_out_of_graphs() -> None:
    """Let torch.compile pass over the code of this folder; it compiles what the forwards of units do inside."""
    dynamo = sys.modules.get("torch._dynamo")  # to import it takes long, and without it nothing is compiled
    folder = os.path.dirname(__file__)
    if dynamo is not None and folder not in dynamo.trace_rules.SKIP_DIRS:
        dynamo.trace_rules.SKIP_DIRS.append(folder)
        dynamo.trace_rules._recompile_re()


def is_unit(module: nn.Module) -> bool:
    """Whether it gathers its own parameters, also inside of another unit."""
    unit: Unit | None = vars(module).get(_UNIT)
    return unit is not None and not unit.inner


class _InUnit(nn.Module):
    """Mixed into the class of a unit."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = vars(self).get(_FORWARD) or super().forward
        unit: Unit = vars(self)[_UNIT]
        if unit.recompute and torch.is_grad_enabled():
            return checkpoint(partial(_run, self, unit, forward), *args, use_reentrant=False, **kwargs)
        return _run(self, unit, forward, *args, **kwargs)


class GatheredCopy(Tensor):
    """A whole parameter in the forward of a unit: an ordinary tensor, but changes through ``data`` are noticed."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        """The values, over the same memory."""
        self._touched = True
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copies, since others have the memory."""
        with torch.no_grad():
            self.copy_(value)


class GatheredPart(DTensor):
    """The same of a parameter that a tensor-parallel plan cuts; `_keep_change` refuses changes."""

    __slots__: list[str] = []
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        """The values, over the same memory."""
        self.__dict__["_touched"] = True
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__["_touched"] = True


class KeptGathers:
    """Parameters that are gathered once for many passes over the same modules, such as those of microbatches.

    The passes see copies that are leaves of autograd: their gradients accumulate there, and are reduced by `reduce`.
    """

    current: ClassVar[KeptGathers | None] = None

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, units take their parameters from here."""
        before, KeptGathers.current = KeptGathers.current, self
        try:
            yield
        finally:
            KeptGathers.current = before

    def take(self, module: nn.Module, gather: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The copies for a module; made by ``gather`` for the first pass."""
        found = self._found.get(id(module))
        if found is None:
            with torch.enable_grad():
                wholes = gather()
            copies = [_as_parameter(whole.detach().requires_grad_(whole.requires_grad)) for whole in wholes]
            found = self._found[id(module)] = wholes, copies
        return found[1]

    def reduce(self) -> None:
        """Give the gradients of all passes to the sharded parameters. Collective: every rank that has a shard."""
        found, self._found = self._found, {}
        for wholes, copies in found.values():
            heads = [(whole, copy) for whole, copy in zip(wholes, copies, strict=True) if whole.requires_grad]
            given = [
                (whole, no_gradient(whole) if copy.grad is None else copy.grad)
                for whole, copy in heads
                if copy.grad is not None or is_gathered(whole)
            ]
            if given:
                torch.autograd.backward([whole for whole, _ in given], [gradient for _, gradient in given])


# ── one forward ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(module: nn.Module, unit: Unit, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    compiler = _set_compiler(None)  # it is for what the forward does
    try:
        slots = _slots(module, plain=unit.takes_plain and KeptGathers.current is not None)
        leaves = list({id(leaf): leaf for _, _, leaf in slots}.values())
        if not leaves:
            _set_compiler(compiler)
            return forward(*args, **kwargs)
        wholes = _gathered(module, unit, leaves)
        versions = [whole._version for whole in wholes]
        places = dict(zip(map(id, leaves), wholes, strict=True))
        with _put_in_place(slots, places), _noted(module, unit, leaves, wholes):
            _set_compiler(compiler)
            try:
                found = forward(*args, **kwargs)
            finally:
                _set_compiler(None)
        for leaf, whole, version in zip(leaves, wholes, versions, strict=True):
            if whole._version != version or vars(whole).get("_touched", False):
                _keep_change(leaf, whole, unit.name)
        return found
    finally:
        _set_compiler(compiler)


def _slots(module: nn.Module, *, plain: bool) -> list[tuple[nn.Module, str, Tensor]]:
    """Where the parameters of a unit are now. Of one that is running already, nowhere."""
    known = _places.get(module)
    if known is None:
        known = _places[module] = [(m, name) for m in _own_modules(module) for name in m._parameters]
    found = [(m, name, m._parameters.get(name)) for m, name in known]
    return [
        (m, name, leaf)
        for m, name, leaf in found
        if isinstance(leaf, ShardedTensor) or (plain and type(leaf) is nn.Parameter)
    ]


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside that are in no unit of their own."""
    yield module
    for child in module.children():
        if not is_unit(child):
            yield from _own_modules(child)


_places: MutableMapping[nn.Module, list[Slot]] = WeakIdKeyDictionary()
_plans: MutableMapping[nn.Module, tuple[list[Tensor], list[tuple[list[int], GatherPlan]]]] = WeakIdKeyDictionary()


def _gathered(module: nn.Module, unit: Unit, leaves: list[Tensor]) -> list[Tensor]:
    """The whole parameters, as the forward is to see them."""
    if KeptGathers.current is not None:
        return KeptGathers.current.take(module, lambda: _gather(module, unit, leaves, history=True))
    if unit.reshard:
        return _gather(module, unit, leaves, history=torch.is_grad_enabled())
    shards = [leaf for leaf in leaves if isinstance(leaf, DTensor)]  # plain ones take part only in the case above
    kept = {n: whole for n, leaf in enumerate(shards) if (whole := recall(leaf)) is not None}
    missing = [n for n in range(len(shards)) if n not in kept]
    if missing:
        new = _gather(module, unit, [shards[n] for n in missing], history=torch.is_grad_enabled())
        for n, whole in zip(missing, new, strict=True):
            kept[n] = whole
            remember(shards[n], whole)
    return [kept[n] for n in range(len(shards))]


def _gather(module: nn.Module, unit: Unit, leaves: Sequence[Tensor], *, history: bool) -> list[Tensor]:
    wholes = {n: leaf.view_as(leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, DTensor)}
    for places, plan in _plans_of(module, unit, leaves):
        some = [leaf for leaf in (leaves[n] for n in places) if isinstance(leaf, DTensor)]
        if history and any(leaf.requires_grad for leaf in some):
            found = Gather.apply(plan, unit.held, *some)  # type: ignore[no-untyped-call]  # torch's
        else:
            found = plan.gather([leaf._local_tensor for leaf in some])
        for n, whole in zip(places, found, strict=True):
            wholes[n] = _as_parameter(whole)
    return [wholes[n] for n in range(len(leaves))]


def _plans_of(module: nn.Module, unit: Unit, leaves: Sequence[Tensor]) -> list[tuple[list[int], GatherPlan]]:
    """Which parameters are gathered together: those of one dtype that the same ranks have shards of."""
    known = _plans.get(module)
    if known is not None and [id(leaf) for leaf in known[0]] == [id(leaf) for leaf in leaves]:
        return known[1]
    together: dict[Any, list[tuple[int, DTensor]]] = {}
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, DTensor):
            where = where_is(leaf)
            together.setdefault((id(where.shard), id(where.replicate), leaf.dtype), []).append((n, leaf))
    found = [
        ([n for n, _ in some], GatherPlan([leaf for _, leaf in some], unit.device, unit.name, unit.number))
        for some in together.values()
    ]
    _plans[module] = [*leaves], found
    return found


def _as_parameter(whole: Tensor) -> Tensor:
    if type(whole) is Tensor:
        whole.__class__ = GatheredCopy
    elif type(whole) is DTensor:
        whole.__class__ = GatheredPart
    whole._is_param = True  # how torch knows a parameter of another class
    return whole


@contextmanager
def _put_in_place(slots: Sequence[tuple[nn.Module, str, Tensor]], wholes: dict[int, Tensor]) -> Iterator[None]:
    for module, name, leaf in slots:
        module._parameters[name] = wholes[id(leaf)]  # type: ignore[assignment]  # torch takes it for a parameter
    lists = {id(m): (m, m.__dict__["_flat_weights"]) for m, _, _ in slots if isinstance(m, nn.RNNBase)}
    for module, _ in lists.values():  # recurrent modules keep their parameters in a list, too
        module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in module._flat_weights_names]
    try:
        yield
    finally:
        for module, name, leaf in slots:
            if module._parameters.get(name) is wholes[id(leaf)]:  # else somebody has put another parameter there
                module._parameters[name] = leaf  # type: ignore[assignment]  # as above
        for module, weights in lists.values():
            module.__dict__["_flat_weights"] = weights


def _keep_change(leaf: Tensor, whole: Tensor, name: str) -> None:
    """Take over into the shards what a forward has written into a whole parameter."""
    if isinstance(whole, DTensor):
        raise TopologyError(
            f"the forward of {name} changes a parameter of shape {tuple(whole.shape)} that tensor parallelism cuts. "
            "Leave its module out of tensor_parallel_plan."
        )
    if not isinstance(leaf, DTensor):
        return  # the copy has its memory
    where = where_is(leaf)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        check_same(_data.__get__(whole), where, f"the forward of {name}")
        leaf._local_tensor.copy_(local_part(_data.__get__(whole), where))


def _noted(
    module: nn.Module, unit: Unit, leaves: list[Tensor], wholes: Sequence[Tensor]
) -> AbstractContextManager[Any]:
    """Inside, autograd keeps notes in place of whole parameters, if the unit reshards."""
    if not unit.reshard or KeptGathers.current is not None or not torch.is_grad_enabled():
        return nullcontext()
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # checkpointing, offloading
        return nullcontext()
    places = {_memory(whole): n for n, whole in enumerate(wholes)}
    again: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        n = places.get(_memory(tensor))
        if n is None:
            return tensor.detach()  # autograd would keep itself alive, if it were the tensor
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        return n, spec, local.size(), local.stride(), local.storage_offset()

    @torch.no_grad()
    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        n, spec, *geometry = kept
        if not again:
            again.extend(_gather(module, unit, leaves, history=False))
        whole = again[n]
        if isinstance(whole, DTensor):
            return DTensor(whole._local_tensor.as_strided(*geometry), spec, requires_grad=False)  # type: ignore[no-untyped-call]
        found: Tensor = whole.as_strided(*geometry)
        return found

    for node in {whole.grad_fn for whole in wholes if whole.grad_fn is not None}:
        node.register_hook(lambda *_: again.clear())  # autograd has gone through the unit
    return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if local.layout == torch.strided else 0
