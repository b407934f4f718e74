"""Which modules are gathered and freed together, and how are they sharded?

Knows ``fully_shard`` (FSDP2) and what it refuses. Wrapping leaves FQNs as they are: the step module that becomes
the FSDP root stands outside the user's module, and activation checkpointing replaces a bound method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.names import clean_fqn, named_modules, parameter_names, select_modules

_LISTED = 5


class StepModule(nn.Module):
    """Runs a step of ``module`` inside its own ``forward``: hooks of ``fully_shard`` on it cover the whole step.

    Raises:
        TopologyError: from ``forward``, if the step changed a parameter that was gathered for it: that would be lost.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._ran = False
        self._gathered: list[Any] | None = None  # torch's FSDPParams

    def forward(self, step: Callable[[], Any]) -> Any:
        self._ran = True
        before = self._versions()
        found = step()  # a closure, not arguments: FSDP would rebuild the containers of a batch
        changed = [name for name, version in self._versions().items() if version != before.get(name, version)]
        if changed:
            raise TopologyError(
                f"a step changed {changed[:_LISTED]}{'' if len(changed) <= _LISTED else ' and others'}, which would be "
                "lost: FSDP gathers parameters for a step and frees them behind it. Change them between two steps, "
                "such as in on_train_batch_end, where they are the sharded ones"
            )
        return found

    def _versions(self) -> dict[str, int]:
        """How often torch's operations have changed each gathered parameter, by name; what FSDP does is not counted."""
        if self._gathered is None:
            groups = (group for unit in fsdp_modules(self) for group in unit._get_fsdp_state()._fsdp_param_groups)
            self._gathered = [param for group in groups for param in group.fsdp_params]
        found = ((p._param_fqn, getattr(p, "_unsharded_param", None)) for p in self._gathered)
        return {(name or "").removeprefix("module."): p._version for name, p in found if p is not None}

    def expect_backward(self, loss: Tensor) -> None:
        """Before a backward inside the forward (manual optimization): FSDP sees only the outputs of a forward."""
        if isinstance(self, FSDPModule):
            self._get_fsdp_state()._register_pre_backward_hook(loss)

    def regather(self) -> None:
        """After a backward or an optimizer step inside the forward: the rest of the step needs the new parameters.

        Not with ``reshard``, which does nothing before a backward, where ``requires_grad`` may have changed.
        """
        if isinstance(self, FSDPModule):
            for group in self._get_fsdp_state()._fsdp_param_groups:
                group._to_sharded()  # type: ignore[no-untyped-call]  # torch's
            self.unshard()

    def reset(self) -> None:
        """After an exception in a step: forget that it was under way."""
        if isinstance(self, FSDPModule) and self._ran:
            self.reset_iter_state()


def trunk_layers(root: nn.Module) -> list[str]:
    """The layers of the largest ModuleList or Sequential of one class, and of others at least half its size."""
    trunks: dict[str, tuple[int, list[str]]] = {}
    for name, module in named_modules(root).items():
        inside = any(name.startswith(f"{outer}.") for outer in trunks)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential) or not _homogeneous(module):
            continue
        layers = [f"{name}.{child}" for child, _ in module.named_children()]
        trunks[name] = (sum(p.numel() for p in module.parameters()), layers)
    largest = max((size for size, _ in trunks.values()), default=0)
    return [layer for size, layers in trunks.values() if 2 * size >= largest for layer in layers]


def choose_units(root: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """FQNs of the modules that become FSDP units, parents before children.

    A module that shares a parameter with the outside stays in the root's unit, because FSDP2 needs tied parameters
    in one group; so does one without parameters.
    """
    names = set(trunk_layers(root) if patterns is None else select_modules(root, patterns, "fsdp_units"))
    ties = [[clean_fqn(name) for name in tie] for tie in parameter_names(root) if len(tie) > 1]
    return [name for name, module in named_modules(root).items() if name in names and _is_unit(module, name, ties)]


def shard_module(
    step: StepModule, units: Sequence[nn.Module], mesh: DeviceMesh, *, reshard_after_forward: bool, cpu_offload: bool
) -> None:
    """Apply ``fully_shard`` to the units, the last first, then to the rest as one unit under ``step``.

    0-dim parameters stay plain, since FSDP2 cannot cut them: `gradients.GradientSync` averages their gradients.
    The root is gathered for the whole step (torch's default): whoever reads parameters after a forward without a
    backward must call `reshard` first.
    """
    ignored = {p for p in step.parameters() if p.ndim == 0}
    pin = mesh.device_type == "cuda"  # pinned memory needs a CUDA context
    offload = CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy()
    for unit in reversed(units):
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
            ignored_params=ignored,
        )
    fully_shard(step, mesh=mesh, offload_policy=offload, ignored_params=ignored)


def fsdp_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """Every module of ``root`` that ``fully_shard`` was applied to."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: nn.Module) -> None:
    """Free gathered parameters, so that ``root.parameters()`` are the sharded ones. No communication."""
    for module in fsdp_modules(root):
        module.reshard()


def checkpoint_activations(modules: Sequence[nn.Module]) -> None:
    """Recompute the activations of these modules in the backward pass instead of keeping them."""
    for module in modules:
        module.forward = _recomputed(module.forward)  # on the instance: the class is shared


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def _homogeneous(container: nn.ModuleList | nn.Sequential) -> bool:
    children = list(container.children())
    alike = len({type(child) for child in children}) == 1 and len(children) > 1
    return alike and all(_has_forward(child) and any(True for _ in child.parameters()) for child in children)


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _is_unit(module: nn.Module, name: str, ties: list[list[str]]) -> bool:
    inside = f"{name}."
    crosses = any(0 < sum(n.startswith(inside) for n in tie) < len(tie) for tie in ties)
    return not crosses and any(True for _ in module.parameters())
