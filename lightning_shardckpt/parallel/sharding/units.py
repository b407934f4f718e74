"""FSDP units: modules whose parameters are gathered while their forward runs.

A *unit* has the parameters of a module and of the modules inside it, except for units inside it. While its ``forward``
runs, functions get gathered values of the parameters that

* ``fully_shard`` gathers, through `fsdp_proxies`;
* a tensor-parallel plan shards;
* a pipeline keeps for several passes;
* torch.compile or a fast path of torch's attention reads: for these, the module has the gathered tensors themselves.

All other parameters are gathered one by one when a function needs them.

The tensors that autograd saves for the backward do not include gathered parameters: hooks save a reference in their
place, and ``fully_shard`` gathers again when autograd unpacks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.pytree import map_tensors
from lightning_shardckpt.compat.torch_modules import (
    has_compiled,
    parameter_slots,
    set_frame_callback,
    skip_folders,
)
from lightning_shardckpt.compat.torch_tensors import (
    in_functional_transform,
    mark_as_parameter,
    memory_id,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.fsdp_proxies import Engine, FSDPProxy, Gathered, PlannedUnit
from lightning_shardckpt.parallel.sharding.kept_gathers import KeptGathers
from lightning_shardckpt.parallel.sharding.tensor_parallel import refuse_compiled, sharded_as_planned
from lightning_shardckpt.parallel.tensors.gathered import (
    CAST_LAYERS,
    GatheredTensor,
    SavedParameters,
    in_forward,
    is_in_forward,
)
from lightning_shardckpt.parallel.tensors.placement import version_key
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import gather_whole, sharding_of

Forward = Callable[..., Any]
Slot = tuple[nn.Module, str]
_PACKAGE = Path(__file__).parents[2]
_NOT_COMPILED = [str(_PACKAGE / folder) for folder in ("compat", "parallel/sharding", "parallel/tensors")]
"""The folders with the code of sharding, which torch.compile skips."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The settings of a unit.

    Attributes:
        name: the name of the module, for messages.
        device: where its parameters are gathered.
        reshard: whether torch's engine frees them between forward and backward.
        is_rest: True if torch's engine may gather them together with other units' parameters.
        recompute: whether to recompute the activations in the backward (activation checkpointing).
        inner: whether another unit has its parameters.
        engine: torch's engine; None if this package gathers.
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
    """Make ``module`` a unit, by an attribute ``forward`` of the instance: its class stays as it is."""
    skip_folders(_NOT_COMPILED)
    module.__dict__["forward"] = UnitForward(module, unit, vars(module).get("forward"))


def is_unit(module: nn.Module) -> bool:
    """Return whether a module is a unit with its own parameters."""
    forward = vars(module).get("forward")
    return isinstance(forward, UnitForward) and not forward.unit.inner


_MIXED = "got mixed torch.Tensor and DTensor"  # in an error of torch's dispatch for DTensors


class UnitForward:
    """The forward of a unit, which gathers its parameters.

    Args:
        module: the module; held by a weak reference, as it holds this object.
        unit: the settings.
        wrapped: the attribute ``forward`` that the instance had before; None for the method of its class.
    """

    def __init__(self, module: nn.Module, unit: Unit, wrapped: Forward | None) -> None:
        self._module, self.unit, self._wrapped = ref(module), unit, wrapped
        self._places = list[Slot]()
        self._is_compiled, self._with_fast_paths = False, list[nn.Module]()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.unit.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        return self._run(*args, **kwargs)

    @property
    def __wrapped__(self) -> Forward:
        """The original forward, whose signature ``inspect`` shows."""
        return self._wrapped or MethodType(type(self._owner).forward, self._owner)

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None  # its caller holds it
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitForward:
        module = memo.get(id(self._owner), self._owner)
        return UnitForward(module, self.unit, deepcopy(self._wrapped, memo))

    def __reduce__(self) -> Any:
        """Pickle the original forward: a mesh can't be pickled."""
        return (partial, (self._wrapped,)) if self._wrapped else (getattr, (self._owner, "forward"))

    # --- one forward ---

    def _run(self, /, *args: Any, **kwargs: Any) -> Any:
        compiler = set_frame_callback(None)  # disables torch.compile until the original forward
        try:
            leaves = self._leaves()
            forward = partial(self.__wrapped__, *args, **kwargs)
            if leaves and KeptGathers.current is not None:
                key = (id(self._owner), *(leaf.requires_grad for leaf in leaves))  # a step may freeze it for one call
                wholes = KeptGathers.current.take(key, leaves, partial(_gather_to_keep, self.unit, leaves))
                kept = [GatheredTensor(leaf, w, version_key(leaf)) for leaf, w in zip(leaves, wholes, strict=True)]
                return self._run_with({id(leaf): g for leaf, g in zip(leaves, kept, strict=True)}, forward, compiler)
            body = partial(self._run_beside, leaves, forward, compiler)
            is_compiled = compiler is not None or self._is_compiled
            for proxy, selected in _select_proxies(self.unit, leaves, is_compiled=is_compiled):
                body = partial(_run_in_proxy, proxy, selected, (args, kwargs), body)
            return body({})
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise UnsupportedCodeError(
                f"{self.unit.name} computes with a plain tensor beside a DTensor: tensor_parallel_plan shards a module "
                "in it that has plain tensors, too, such as the masks of ModelPruning and torch.nn.utils.prune, or a "
                "whole parameter that was assigned. Copy values into the parameters that are there (load_state_dict "
                "without assign=True, weight.data.copy_), or leave that module out of tensor_parallel_plan."
            ) from error
        finally:
            set_frame_callback(compiler)

    def _leaves(self) -> list[ShardedTensor]:
        """Return the sharded parameters of the unit that no running forward has gathered."""
        if not self._places:
            module = self._owner
            self._places = [(m, name) for m in _own_modules(module) for name in parameter_slots(m)]
            self._is_compiled = has_compiled(module)
            fast = [part for m in module.modules() if isinstance(m, _WITH_FAST_PATHS) for part in m.modules()]
            self._with_fast_paths = list(dict.fromkeys(fast))
        leaves: dict[int, Any] = {id(leaf := parameter_slots(m).get(name)): leaf for m, name in self._places}
        return [leaf for leaf in leaves.values() if isinstance(leaf, ShardedTensor) and not is_in_forward(leaf)]

    def _run_beside(
        self, leaves: Sequence[ShardedTensor], forward: Callable[[], Any], compiler: Any, gathered: Gathered
    ) -> Any:
        """Run a forward with the parameters that ``fully_shard`` gathered, and others that must be gathered."""
        is_compiled = compiler is not None or self._is_compiled
        for leaf in leaves:
            is_read = is_compiled or self._with_fast_paths or sharding_of(leaf).model_mesh is not None
            if is_read and id(leaf) not in gathered:
                gathered[id(leaf)] = GatheredTensor(leaf, _gather(self.unit, leaf), version_key(leaf))
        if is_compiled:
            planned = {number for number, g in gathered.items() if isinstance(g.whole, DTensor)}
            if planned:
                refuse_compiled(self._owner, self.unit.name, planned, from_outside=compiler is not None)
        return self._run_with(gathered, forward, compiler)

    def _run_with(self, gathered: Gathered, forward: Callable[[], Any], compiler: Any) -> Any:
        """Run a forward with gathered parameters."""
        hooks: AbstractContextManager[Any] = nullcontext()
        if torch.is_grad_enabled() and KeptGathers.current is None:
            hooks = SavedParameters(self.unit.name, [*gathered.values()]).hooks() if gathered else hooks
        is_compiled = compiler is not None or self._is_compiled
        read = _own_modules(self._owner) if is_compiled else [m for m in self._with_fast_paths if not m.training]
        with sharded_as_planned(self._places), _put_in_place(read, gathered), in_forward(gathered), hooks:
            set_frame_callback(compiler)
            try:
                outputs = forward()
            finally:
                set_frame_callback(None)
        for found in gathered.values():
            found.end_forward(f"the forward of {self.unit.name}")
        return _copy_freed(outputs, {memory_id(local_tensor(g.whole)) for g in gathered.values() if g.regather})


def _select_proxies(
    unit: Unit, leaves: Sequence[ShardedTensor], *, is_compiled: bool
) -> list[tuple[FSDPProxy, list[ShardedTensor]]]:
    """Return the proxies that gather for the next forward, and the parameters of each."""
    if unit.engine is None or unit.inner or in_functional_transform():
        return []
    proxies = [
        (proxy, proxy.select(leaves))
        for proxy in unit.engine.proxies_of(unit.name)
        if not (is_compiled and proxy.is_cast)  # cast_arguments does not run in compiled code
    ]
    return [(proxy, selected) for proxy, selected in proxies if selected]


def _run_in_proxy(
    proxy: FSDPProxy,
    leaves: Sequence[ShardedTensor],
    inputs: Any,
    body: Callable[[Gathered], Any],
    others: Gathered,
) -> Any:
    return proxy.run(leaves, inputs, lambda gathered: body({**others, **gathered}))


def _gather(unit: Unit, leaf: ShardedTensor) -> Tensor:
    """Gather a parameter for a forward without torch's engine."""
    with without_torch_function():
        return gather_whole(leaf, unit.name, on_model_axes=False, device=unit.device)


def _copy_freed(outputs: Any, freed: Collection[int]) -> Any:
    """Copy views of memory that torch's engine frees; those for which autograd records nothing follow the shards."""

    def copy(value: Tensor) -> Tensor:
        is_freed = type(value) is Tensor and value.layout == torch.strided and memory_id(value) in freed
        return value.clone() if is_freed else value

    return map_tensors(copy, outputs) if freed else outputs


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and the modules inside it, except for units and modules inside them."""
    yield module
    for child in module.children():
        if not is_unit(child):
            yield from _own_modules(child)


def list_units(root: nn.Module) -> list[PlannedUnit]:
    """Return the units of ``root``, with the parameters that torch's engine can gather."""
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
        leaves = [p for p in sharded if p.is_floating_point() and p.numel()]
        if leaves:
            shared = {id(p) for p in leaves if counts[id(p)] > 1}
            cast = set() if is_compiled else _cast_by_autocast(unit) - shared
            planned.append(PlannedUnit(settings.name, leaves, settings.reshard, settings.is_rest, cast, shared))
    return planned


def _cast_by_autocast(unit: nn.Module) -> set[int]:
    """Return the ids of the parameters of a unit that only torch's own linear layers and convolutions have."""
    inside, others = set[int](), set[int]()
    for module in _own_modules(unit):
        is_plain = type(module) in CAST_LAYERS and not isinstance(getattr(module, "padding", None), str)
        slots: dict[str, Any] = {} if isinstance(module, nn.RNNBase) else {**parameter_slots(module)}
        for name, leaf in slots.items():  # recurrent modules keep a list of their weights, and aren't compiled
            is_whole = isinstance(leaf, ShardedTensor) and sharding_of(leaf).model_mesh is None
            (inside if is_plain and is_whole and name in ("weight", "bias") else others).add(id(leaf))
    return inside - others


def refuse_nested_tensors(root: nn.Module) -> None:
    """Make nn.TransformerEncoder raise where it would use nested tensors on a single process.

    For padded batches in evaluation, torch uses nested tensors, and returns zeros for padding; but not if parameters
    have ``__torch_function__``.
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
            "sharded parameters. Build it with enable_nested_tensor=False, and don't use its output for padding."
        )


_WITH_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


def _gather_to_keep(unit: Unit, leaves: Sequence[ShardedTensor]) -> list[Tensor]:
    """Gather parameters for several passes."""
    wholes: dict[int, Tensor] = {}
    for proxy, selected in _select_proxies(unit, leaves, is_compiled=False):  # pipelines don't gather cast weights
        wholes |= dict(zip(map(id, selected), proxy.keep(selected), strict=True))
    return [wholes[id(leaf)] if id(leaf) in wholes else _gather(unit, leaf) for leaf in leaves]


@contextmanager
def _put_in_place(modules: Iterable[nn.Module], gathered: Gathered) -> Iterator[None]:
    """Inside, these modules have the gathered tensors in place of their parameters."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in modules:
        slots: dict[str, Any] = {} if isinstance(module, nn.RNNBase) else {**parameter_slots(module)}
        for name, leaf in slots.items():  # recurrent modules keep a list of their weights, and aren't compiled
            found = gathered.get(id(leaf))
            if found is not None and found.history is None and not isinstance(found.whole, DTensor):
                mark_as_parameter(found.whole)
                before.append((parameter_slots(module), name, leaf))
                parameter_slots(module)[name] = found.whole  # type: ignore[assignment]  # torch takes it for one
    try:
        yield
    finally:
        for present, name, leaf in before:
            if present.get(name) is gathered[id(leaf)].whole:  # unless the forward has assigned another one
                present[name] = leaf
