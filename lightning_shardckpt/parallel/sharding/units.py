"""FSDP units: modules whose parameters are gathered while their forward runs.

A *unit* has the parameters of a module and of the modules inside it, except for units inside it. While its ``forward``
runs, the module has plain tensors in place of the parameters that ``fully_shard`` gathers, that torch.compile or a fast
path of torch's attention reads, that a tensor-parallel plan shards beside the data axes, or that a pipeline keeps for
several passes. A parameter that only a plan shards computes itself, as torch's DTensor. All others stay sharded, and
are gathered one by one when a function needs them.

The tensors that autograd saves for the backward do not include gathered parameters: hooks save a reference in their
place, and ``fully_shard`` gathers again when autograd unpacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import local_tensor
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
    map_tensors,
    memory_id,
    version_of,
    versions_of,
    viewed_tensor,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.fsdp import Unit, own_modules
from lightning_shardckpt.parallel.sharding.fsdp_proxies import FSDPProxy, Gathered
from lightning_shardckpt.parallel.sharding.gathered_parameters import (
    AFTER_FORWARD,
    IN_FORWARD,
    KeptGathers,
    as_gathered,
    switch_classes,
    traces_of,
    values_of,
)
from lightning_shardckpt.parallel.sharding.tensor_parallel import refuse_compiled
from lightning_shardckpt.parallel.tensors.gathered_weights import SavedParameters, cast_weights, has_cast_weight
from lightning_shardckpt.parallel.tensors.operations import connect_to_shards
from lightning_shardckpt.parallel.tensors.placement import local_part, sharding_of
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import PART, check_equal_on_ranks, gather_whole

Slot = tuple[nn.Module, str, ShardedTensor]
_PACKAGE = Path(__file__).parents[2]
_NOT_COMPILED = [str(_PACKAGE / folder) for folder in ("compat", "parallel/sharding", "parallel/tensors")]
"""The folders with the code of sharding, which torch.compile skips."""


def make_unit(module: nn.Module, unit: Unit) -> None:
    """Make ``module`` a unit, by an attribute ``forward`` of the instance: its class stays as it is."""
    skip_folders(_NOT_COMPILED)
    module.__dict__["forward"] = UnitForward(module, unit, vars(module).get("forward"))


class _Call(NamedTuple):
    """One call of a unit: where its sharded parameters are, each of them once, and the original forward."""

    slots: Sequence[Slot]
    leaves: Sequence[ShardedTensor]
    forward: Callable[[], Any]
    compiler: Any  # the callback of torch.compile, which only the original forward must see


class UnitForward:
    """The forward of a unit; ``wrapped`` is the attribute ``forward`` of the instance before, if it had one."""

    def __init__(self, module: nn.Module, unit: Unit, wrapped: Callable[..., Any] | None) -> None:
        self._module, self.unit, self._wrapped = ref(module), unit, wrapped  # the module holds this object
        self._places = list[tuple[nn.Module, str]]()
        self._is_compiled = self._has_fast_paths = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.unit.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        return self._run(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward, whose signature ``inspect`` shows."""
        return self._wrapped or MethodType(type(self._owner).forward, self._owner)

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None  # its caller holds it
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitForward:
        return UnitForward(memo.get(id(self._owner), self._owner), self.unit, deepcopy(self._wrapped, memo))

    def __reduce__(self) -> Any:
        """Pickle the original forward: a mesh can't be pickled."""
        return (partial, (self._wrapped,)) if self._wrapped else (getattr, (self._owner, "forward"))

    # --- one forward ---

    def _run(self, /, *args: Any, **kwargs: Any) -> Any:
        compiler = set_frame_callback(None)  # disables torch.compile until the original forward
        try:
            slots = self._slots()
            leaves = list({id(leaf): leaf for _, _, leaf in slots}.values())
            _refuse_kept_views(self.unit.name, leaves)
            call = _Call(slots, leaves, partial(self.__wrapped__, *args, **kwargs), compiler)
            if leaves and KeptGathers.current is not None:
                key = (id(self._owner), *(leaf.requires_grad for leaf in leaves))  # a step may freeze it for one call
                wholes = KeptGathers.current.take(key, partial(self._gather_to_keep, leaves))
                return self._run_with(call, dict(zip(map(id, leaves), wholes, strict=True)), {})
            body = partial(self._run_beside, call)
            for proxy, selected in self._select_proxies(leaves, is_compiled=self._is_compiled or compiler is not None):
                body = partial(proxy.run, selected, (args, kwargs), body)
            return body({})
        except RuntimeError as error:
            if "got mixed torch.Tensor and DTensor" not in str(error):  # of torch's dispatch for DTensors
                raise
            raise UnsupportedCodeError(
                f"{self.unit.name} computes with a plain tensor beside a DTensor: tensor_parallel_plan shards a module "
                "in it that has plain tensors, too, such as the masks of pruning, or a whole parameter that was "
                "assigned. Copy values into the parameters that are there (load_state_dict without assign=True, "
                "weight.data.copy_), or leave that module out of tensor_parallel_plan."
            ) from error
        finally:
            set_frame_callback(compiler)

    def _slots(self) -> list[Slot]:
        """Return the modules and names with the sharded parameters of the unit; none while the unit runs."""
        if not self._places:
            module = self._owner
            self._places = [(m, name) for m in own_modules(module) for name in parameter_slots(m)]
            self._is_compiled = has_compiled(module)
            self._has_fast_paths = any(isinstance(m, _WITH_FAST_PATHS) for m in module.modules())
        slots: list[tuple[nn.Module, str, Any]] = [(m, name, parameter_slots(m).get(name)) for m, name in self._places]
        return [(m, name, leaf) for m, name, leaf in slots if type(leaf) is ShardedTensor and not has_cast_weight(leaf)]

    def _select_proxies(
        self, leaves: Sequence[ShardedTensor], *, is_compiled: bool
    ) -> list[tuple[FSDPProxy, list[ShardedTensor]]]:
        """Return the proxies that gather for the next forward, and the parameters of each."""
        if self.unit.engine is None or self.unit.inner or in_functional_transform():
            return []
        proxies = self.unit.engine.proxies_of(self.unit.name)
        if is_compiled:
            proxies = [proxy for proxy in proxies if proxy.cast_to is None]  # cast_arguments does not run there
        return [(proxy, selected) for proxy in proxies if (selected := proxy.select(leaves))]

    def _gather(self, leaf: ShardedTensor) -> Tensor:
        """Gather a parameter without torch's engine."""
        with without_torch_function():
            whole = gather_whole(leaf, self.unit.name, on_model_axes=False, device=self.unit.device)
            return as_gathered(whole, leaf)

    def _gather_to_keep(self, leaves: Sequence[ShardedTensor]) -> list[Tensor]:
        """Gather parameters for several passes, of a pipeline, which has no cast weights."""
        wholes: dict[int, Tensor] = {}
        for proxy, selected in self._select_proxies(leaves, is_compiled=False):
            wholes |= dict(zip(map(id, selected), proxy.keep(selected), strict=True))
        return [wholes[id(leaf)] if id(leaf) in wholes else self._gather(leaf) for leaf in leaves]

    def _run_beside(self, call: _Call, by_fsdp: Gathered) -> Any:
        """Run a forward with the parameters that ``fully_shard`` gathered, and others that must be plain."""
        is_compiled = call.compiler is not None or self._is_compiled
        are_plain, wholes = is_compiled or self._has_fast_paths, dict[int, Tensor]()
        for leaf in call.leaves:
            if id(leaf) in by_fsdp:
                wholes[id(leaf)] = by_fsdp[id(leaf)].whole
            elif PART in leaf.__dict__ and not are_plain:
                wholes[id(leaf)] = leaf
            elif are_plain or sharding_of(leaf).model_mesh is not None:
                wholes[id(leaf)] = self._gather(leaf)
        if is_compiled:
            planned = {number for number, whole in wholes.items() if isinstance(whole, DTensor)}
            if planned:
                refuse_compiled(self._owner, self.unit.name, planned, from_outside=call.compiler is not None)
            for whole in wholes.values():
                whole.__dict__["_compiled"] = True  # hides `grad`, since torch.compile can't trace a sharded gradient
        return self._run_with(call, wholes, by_fsdp)

    def _run_with(self, call: _Call, plain: Mapping[int, Tensor], by_fsdp: Gathered) -> Any:
        """Run a forward with the tensors in ``plain``, by the ids of the sharded ones; some are ``by_fsdp``."""
        name, leaves = self.unit.name, [leaf for leaf in call.leaves if id(leaf) in plain]
        wholes = [plain[id(leaf)] for leaf in leaves]
        cast = {number: gathered.cast for number, gathered in by_fsdp.items() if gathered.cast is not None}
        slots = [slot for slot in call.slots if id(slot[2]) in plain and id(slot[2]) not in cast]
        switch_classes(wholes, IN_FORWARD)
        memories = {memory_id(local_tensor(w)): p for p, w in zip(leaves, wholes, strict=True) if p is not w}
        versions, saved = versions_of(wholes), None
        if memories and torch.is_grad_enabled() and KeptGathers.current is None:
            saved = SavedParameters(name, memories, {number: gathered.regather for number, gathered in by_fsdp.items()})
        try:
            with _put_in_place(slots, plain), cast_weights(cast), nullcontext() if saved is None else saved.hooks():
                set_frame_callback(call.compiler)
                try:
                    outputs = call.forward()
                finally:
                    set_frame_callback(None)
            for leaf, whole, before, now in zip(leaves, wholes, versions, versions_of(wholes), strict=True):
                was_read, views = traces_of(whole)
                if now != before or was_read:
                    _write_back(leaf, whole, name)
                if views:
                    views[:] = [view for view in views if view() is not None]
                    _views[leaf] = views, version_of(local_tensor(leaf))
            if saved is not None:
                saved.end_forward()
            freed = {memory for memory, leaf in memories.items() if id(leaf) in by_fsdp}
            return _replace_in_outputs(outputs, leaves, wholes, freed)
        finally:
            switch_classes(wholes, AFTER_FORWARD)


def _replace_in_outputs(
    outputs: Any, leaves: Sequence[ShardedTensor], wholes: Sequence[Tensor], freed: Collection[int]
) -> Any:
    """Replace gathered parameters in the outputs of a forward by the sharded ones, so that changes reach the shards.

    Without gradients, views of parameters become views of the shards; with gradients, autograd forbids changes. Views
    of memory that torch's engine has ``freed`` are copied.
    """
    shards = {id(whole): leaf for leaf, whole in zip(leaves, wholes, strict=True)}

    def replace(value: Tensor) -> Tensor:
        if id(value) in shards:
            return shards[id(value)]
        if type(value) is not Tensor:
            return value
        base = viewed_tensor(value) if not torch.is_grad_enabled() else None
        if base is not None and id(base) in shards:
            memory = values_of(base)
            if memory_id(memory) in freed:
                memory = memory.clone()
                value = memory.as_strided(value.size(), value.stride(), value.storage_offset())
            return connect_to_shards(value, shards[id(base)], memory)
        return value.clone() if value.layout == torch.strided and freed and memory_id(value) in freed else value

    return map_tensors(replace, outputs)


def _refuse_kept_views(name: str, leaves: Sequence[ShardedTensor]) -> None:
    """Raise if a view of an earlier gather is still alive, and the parameter has changed since."""
    if not _views:
        return
    for leaf in leaves:
        views, version = _views.pop(leaf, ((), 0))
        if any(view() is not None for view in views) and version_of(local_tensor(leaf)) != version:
            raise UnsupportedCodeError(
                f"the forward of {name} keeps a view of its parameter of shape {tuple(leaf.shape)} from an earlier "
                "call (weight.detach(), weight.data). It would not follow changes of the parameter, which is gathered "
                "again for each call: take a new view in each call, or keep a copy (weight.detach().clone())."
            )


def refuse_nested_tensors(root: nn.Module) -> None:
    """Make nn.TransformerEncoder raise where torch uses nested tensors, but not for sharded parameters."""
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
_views: MutableMapping[ShardedTensor, tuple[Sequence[ref[Tensor]], int]] = WeakIdKeyDictionary()
"""Detached views of gathered parameters that outlived a forward, and the version of the parameter then."""


@contextmanager
def _put_in_place(slots: Sequence[Slot], wholes: Mapping[int, Tensor]) -> Iterator[None]:
    for module, name, leaf in slots:
        parameter_slots(module)[name] = wholes[id(leaf)]  # type: ignore[assignment]  # torch takes it for a parameter
    flat = refresh_flat_weights({id(m): m for m, _, _ in slots}.values())
    try:
        yield
    finally:
        for module, name, leaf in slots:
            present = parameter_slots(module)
            if present.get(name) is wholes[id(leaf)]:  # unless the forward has assigned another one
                present[name] = leaf  # type: ignore[assignment]  # as above
        restore_flat_weights(flat)


def _write_back(leaf: ShardedTensor, whole: Tensor, name: str) -> None:
    """Copy a gathered parameter that a forward has changed into the shards."""
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
