"""Choice of FSDP units, and modules to which the user has applied ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.fqn import are_layers, module_names, named_modules, select_modules


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
        inside = any(name.startswith(f"{outer}.") for outer in trunks)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential) or not _is_trunk(module):
            continue
        layers = [names[child] for child in module.children()]
        trunks[name] = (sum(p.numel() for p in module.parameters()), layers)
    largest = max((size for size, _ in trunks.values()), default=0)
    return [layer for size, layers in trunks.values() if 2 * size >= largest for layer in layers]


def choose_units(root: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the FQNs of units that are freed between forward and backward, parents before children."""
    names = set(trunk_layers(root) if patterns is None else select_modules(root, patterns, "FSDP(units=…)"))
    return [name for name, module in named_modules(root).items() if name in names and _has_parameters(module)]


def units_around(root: nn.Module, units: Sequence[nn.Module], *, is_called: bool) -> dict[str, nn.Module]:
    """Return the modules that become units for parameters outside of ``units``, by FQN.

    These are the outermost modules without a unit inside, and modules around units that have parameters of their own;
    ``root`` itself only if it is called, and not only its steps.
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


def _is_trunk(container: nn.ModuleList | nn.Sequential) -> bool:
    children = list(container.children())
    return are_layers(children) and all(_has_forward(child) and _has_parameters(child) for child in children)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
