"""FSDP: options, choice of units, and the root module of ``fully_shard`` around the proxies that gather parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_shardckpt.compat.torch_modules import has_compiled, parameter_slots
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.backward_pass import Passes
from lightning_shardckpt.parallel.sharding.fqn import are_layers, module_names, named_modules, select_modules
from lightning_shardckpt.parallel.sharding.fsdp_proxies import FSDPProxy, ProxyModule, run_within
from lightning_shardckpt.parallel.tensors.gathered_weights import LAYERS
from lightning_shardckpt.parallel.tensors.placement import Peers, sharding_of
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor


@dataclass(frozen=True, slots=True)
class FSDP:
    """How parameters are sharded and gathered: the options of ``ShardedStrategy(fsdp=FSDP(…))``.

    Attributes:
        units: patterns or class names of the modules that are gathered one by one; by default the layers of the
            largest homogeneous ModuleList or Sequential. The rest is gathered for the whole step.
        reshard_after_forward: free gathered parameters between forward and backward. By default True, but False in
            pipelines, which gather them once for all microbatches.
        activation_checkpointing: recompute activations of the units (True) or of modules by pattern or class name.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        ignored: patterns or class names of modules that are not sharded: every process has them whole, and their
            gradients are averaged, as ``ignored_params`` of ``fully_shard`` has it. For code that ``fully_shard``
            cannot differentiate, such as ``torch.autograd.grad`` for parameters.
        reduce_dtype: the dtype in which gradients are reduced. By default torch's engine takes the dtype of the
            parameters, and replicas of whole parameters at least float32. ``"float32"`` sums gradients of
            ``precision="bf16-true"`` without intermediate rounding. Under ``"bf16-mixed"`` gradients of linear layers
            and convolutions are always reduced in float32.

    Raises:
        TopologyError: for a wrong value.
    """

    units: list[str] | None = None
    reshard_after_forward: bool | None = None
    activation_checkpointing: bool | list[str] = False
    cpu_offload: bool = False
    ignored: list[str] = field(default_factory=list)
    reduce_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        """Check the dtype."""
        if self.reduce_dtype not in (None, "float32", "bfloat16"):
            raise TopologyError(f'FSDP(reduce_dtype=…) is "float32", "bfloat16" or None, found {self.reduce_dtype!r}')


def trunk_layers(root: nn.Module) -> list[str]:
    """Return the FQNs of the layers of the largest ModuleList or Sequential, and of others at least half its size."""
    trunks: dict[str, tuple[int, list[str]]] = {}
    names = module_names(root)
    for name, module in named_modules(root).items():
        inside, children = any(name.startswith(f"{outer}.") for outer in trunks), list(module.children())
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential) or not are_layers(children):
            continue
        if all(_has_forward(child) and any(True for _ in child.parameters()) for child in children):
            trunks[name] = (sum(p.numel() for p in module.parameters()), [names[child] for child in children])
    largest = max((size for size, _ in trunks.values()), default=0)
    return [layer for size, layers in trunks.values() if 2 * size >= largest for layer in layers]


def choose_units(root: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the FQNs of units that are freed between forward and backward, parents before children."""
    names = set(trunk_layers(root) if patterns is None else select_modules(root, patterns, "FSDP(units=…)"))
    return [
        name for name, module in named_modules(root).items() if name in names and any(True for _ in module.parameters())
    ]


def units_around(root: nn.Module, units: Sequence[nn.Module], *, is_called: bool) -> dict[str, nn.Module]:
    """Return the modules that become units for parameters outside of ``units``, by FQN.

    These are the outermost modules without a unit inside, and modules around units that have parameters of their own;
    ``root`` itself only if it is called.
    """
    chosen, around = set(units), dict[str, nn.Module]()

    def walk(name: str, module: nn.Module) -> None:
        if module in chosen:
            return
        has_units = not chosen.isdisjoint(module.modules())
        has_own = any(True for _ in module.parameters(recurse=not has_units))
        if _has_forward(module) and (name or is_called) and has_own:
            around[name] = module
            if not has_units:
                return
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", root)
    return around


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Return every module of ``root`` that ``fully_shard`` was applied to."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: nn.Module) -> None:
    """Free gathered parameters, so that ``root.parameters()`` are the sharded ones. No communication."""
    for module in fsdp_modules(root):
        module.reshard()


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# ── units, and torch's engine ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The settings of a unit."""

    name: str  # of the module, for messages
    device: torch.device  # where its parameters are gathered
    reshard: bool = False  # whether torch's engine frees them between forward and backward
    is_rest: bool = False  # whether it may gather them together with other units', at the first forward of a step
    recompute: bool = False  # whether the backward recomputes activations (activation checkpointing)
    inner: bool = False  # whether another unit has its parameters
    engine: Engine | None = None  # torch's; None if this package gathers


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


_SMALL = 1 / 16  # the largest share of a unit that torch gathers together with other units'


class Engine:
    """Torch's engine for one module, with units.

    Args:
        mesh: the mesh that parameters are sharded over; two axes for HSDP.
        peers: the ranks of each axis of ``mesh`` with more than one, the shard axis first.
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
        try:
            _, result = run_within(self._root, None, lambda _: step())
        finally:
            for proxy in self._proxies if not torch.is_grad_enabled() else ():  # no backward frees them
                proxy.free()
        if not torch.is_grad_enabled():  # replicas may run other numbers of steps
            self._passes.compare(0, self._passes.peers[:1])
        return result

    def _prepare(self) -> None:
        """Create the proxies and the root module; called when the parameters have memory."""
        if self._root is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for (_, reshard, dtype, cast_to), named in self._group_parameters().items():
                policy = MixedPrecisionPolicy(cast_to, self._reduce_dtype or dtype, cast_forward_inputs=False)
                options = {"mesh": self._mesh, "reshard_after_forward": reshard, "offload_policy": self._offload}
                proxy = FSDPProxy(self._passes, named, self._device, mp_policy=policy, **options)
                self._proxies.append(proxy)
                for name in dict.fromkeys(name for name, _ in named):
                    self._by_unit[name].append(proxy)
            del self._module
            self._root = fully_shard(ProxyModule(proxies=[proxy.module for proxy in self._proxies]), mesh=self._mesh)
            run_within(self._root, None, lambda _: None)  # the first forward makes it the root
            self._passes.on_end.append(lambda failed: self._root.reset_iter_state() if failed else None)

    def _group_parameters(self) -> dict[Any, list[tuple[str, ShardedTensor]]]:
        """Return the parameters of each proxy, with the names of their units.

        The keys have a unit, whether to reshard, the dtype, and the dtype of autocast. They have no unit if torch
        gathers parameters of all units together: ties, those of modules around units, and the few of another dtype than
        the rest of a unit, as of norms.
        """
        units = {module: unit for module in self._module.modules() if (unit := unit_of(module)) is not None}
        owners = {own: module for module in units for own in own_modules(module)}
        uses = {(id(p), owners.get(m)) for m in self._module.modules() for p in parameter_slots(m).values()}
        counts = Counter(number for number, _ in uses)
        groups, is_compiled = defaultdict[Any, list[tuple[str, ShardedTensor]]](list), has_compiled(self._module)
        for module, unit in units.items():
            own: Any = {id(p): p for m in own_modules(module) for p in parameter_slots(m).values()}.values()
            leaves = [p for p in own if isinstance(p, ShardedTensor) and p.is_floating_point() and p.numel()]
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
    """Return the ids of the parameters of a unit that only torch's linear layers and convolutions have."""
    inside, others = set[int](), set[int]()
    for module in own_modules(unit):
        is_plain = type(module) in LAYERS and not isinstance(getattr(module, "padding", None), str)
        slots: dict[str, Any] = {**parameter_slots(module)}
        for name, leaf in slots.items():
            is_whole = isinstance(leaf, ShardedTensor) and sharding_of(leaf).model_mesh is None
            (inside if is_plain and is_whole and name in ("weight", "bias") else others).add(id(leaf))
    return inside - others
