"""FSDP units of one module, and the root module of ``fully_shard`` around the proxies that gather their parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightning_shardckpt.compat.torch_modules import has_compiled, parameter_slots
from lightning_shardckpt.parallel.sharding.backward_pass import Passes
from lightning_shardckpt.parallel.sharding.fsdp_proxies import Call, FSDPProxy, ProxyModule
from lightning_shardckpt.parallel.tensors.gathered_weights import LAYERS
from lightning_shardckpt.parallel.tensors.placement import Peers
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import sharding_of


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The settings of a unit.

    Attributes:
        name: the name of the module, for messages.
        device: where its parameters are gathered.
        reshard: whether torch's engine frees them between forward and backward.
        is_rest: True if torch's engine may gather them together with other units', at the first forward of a step.
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


def unit_of(module: nn.Module) -> Unit | None:
    """Return the settings of a module that is a unit with its own parameters; None for others."""
    unit = getattr(vars(module).get("forward"), "unit", None)
    return unit if isinstance(unit, Unit) and not unit.inner else None


def own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and the modules inside it, except for units and modules inside them."""
    yield module
    for child in module.children():
        if unit_of(child) is None:
            yield from own_modules(child)


_SMALL = 1 / 16
"""The largest share of a unit that torch gathers together with other units' and keeps until the backward ends."""


class Engine:
    """Torch's engine for one module.

    Args:
        module: the module, with units.
        mesh: the mesh that parameters are sharded over; two axes for HSDP.
        device: where parameters are gathered.
        peers: the ranks of each axis of ``mesh`` with more than one, the shard axis first.
        offload: whether the shards are in CPU memory.
        reduce_dtype: the dtype in which gradients are reduced; None for the dtype of the parameters.
        autocast_dtype: the dtype of autocast in steps; None without autocast.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        peers: Sequence[Peers],
        *,
        offload: bool,
        reduce_dtype: torch.dtype | None,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self._module, self._mesh, self._device, self._passes = module, mesh, device, Passes(peers)
        self._offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
        self._reduce_dtype, self._autocast_dtype = reduce_dtype, autocast_dtype
        self._proxies, self._by_unit = list[FSDPProxy](), defaultdict[str, list[FSDPProxy]](list)
        self._root: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return self

    def proxies_of(self, unit: str) -> Sequence[FSDPProxy]:
        """Return the proxies that gather the parameters of a unit, by its name."""
        self._prepare()
        return self._by_unit.get(unit, ())

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step within the root module, so that torch's streams wait for earlier work once, not for each unit."""
        self._prepare()
        self._passes.recover()
        for proxy in self._proxies:
            proxy.begin_step()
        call = Call(lambda _: step())
        self._root(None, call)
        if not torch.is_grad_enabled():  # there is no backward that frees them
            for proxy in self._proxies:
                proxy.free()
        result = call.result()
        if not torch.is_grad_enabled():  # replicas may run other numbers of steps
            self._passes.compare(0, self._passes.peers[:1])
        return result

    def _prepare(self) -> None:
        """Create the proxies and the root module; called when the parameters have memory."""
        if self._root is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for (_, reshard, _, cast_to), named in self._group_parameters().items():
                proxy = FSDPProxy(
                    self._passes,
                    named,
                    self._device,
                    cast_to,
                    self._reduce_dtype,
                    mesh=self._mesh,
                    reshard_after_forward=reshard,
                    offload_policy=self._offload,
                )
                self._proxies.append(proxy)
                for name in dict.fromkeys(name for name, _ in named):
                    self._by_unit[name].append(proxy)
            del self._module
            self._root = fully_shard(ProxyModule(proxies=[proxy.module for proxy in self._proxies]), mesh=self._mesh)
            self._root(None, Call(lambda _: None))  # the first forward makes it the root
            self._passes.on_end.append(lambda failed: self._root.reset_iter_state() if failed else None)

    def _group_parameters(self) -> dict[Any, list[tuple[str, ShardedTensor]]]:
        """Return the parameters of each proxy, with the names of their units.

        The keys have a unit, whether to reshard, the dtype, and the dtype of autocast. Parameters that several modules
        have (ties), of the modules around units, and the few of another dtype than the rest of a unit, as of norms,
        have no unit in the key: torch gathers them together.
        """
        units = {module: unit for module in self._module.modules() if (unit := unit_of(module)) is not None}
        owned = {m: {id(p): p for own in own_modules(m) for p in parameter_slots(own).values()} for m in units}
        inside = {id(own) for module in units for own in own_modules(module)}
        counts = Counter(number for slots in owned.values() for number in slots)
        counts.update(id(p) for m in self._module.modules() if id(m) not in inside for p in parameter_slots(m).values())
        groups, is_compiled = defaultdict[Any, list[tuple[str, ShardedTensor]]](list), has_compiled(self._module)
        for module, unit in units.items():
            sharded: list[Any] = [leaf for leaf in owned[module].values() if isinstance(leaf, ShardedTensor)]
            leaves = [leaf for leaf in sharded if leaf.is_floating_point() and leaf.numel()]
            cast = set() if is_compiled else _cast_by_autocast(module)
            alike = defaultdict[Any, list[ShardedTensor]](list)
            for leaf in leaves:
                is_shared = counts[id(leaf)] > 1
                is_cast = leaf.dtype == torch.float32 and id(leaf) in cast and not is_shared
                alike[leaf.dtype, self._autocast_dtype if is_cast else None, is_shared].append(leaf)
            most = _SMALL * sum(leaf.numel() for leaf in leaves)
            for (dtype, cast_to, is_shared), group in alike.items():
                is_small = unit.reshard and sum(leaf.numel() for leaf in group) <= most
                is_rest = is_shared or unit.is_rest or is_small
                key = (None, False, dtype, cast_to) if is_rest else (unit.name, unit.reshard, dtype, cast_to)
                groups[key] += [(unit.name, leaf) for leaf in group]
        return groups


def _cast_by_autocast(unit: nn.Module) -> set[int]:
    """Return the ids of the parameters of a unit that only torch's own linear layers and convolutions have."""
    inside, others = set[int](), set[int]()
    for module in own_modules(unit):
        is_plain = type(module) in LAYERS and not isinstance(getattr(module, "padding", None), str)
        slots: dict[str, Any] = {**parameter_slots(module)}
        for name, leaf in slots.items():
            is_whole = isinstance(leaf, ShardedTensor) and sharding_of(leaf).model_mesh is None
            (inside if is_plain and is_whole and name in ("weight", "bias") else others).add(id(leaf))
    return inside - others
