"""Checks that a tensor-parallel plan does not change the results of a model.

Between a column-wise and a row-wise layer, each rank has a part of the columns, as a plain tensor. Code that treats
each column on its own is right there; a norm, a softmax, a chunk or the width of the part is not. So the first call of
one block of each kind is compared with a copy of the block that is not sharded, and hooks of the user that would get a
part are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.torch_modules import argument_hooks, keep_hooks, result_hooks, without_global_hooks
from lightning_shardckpt.compat.torch_tensors import tree_leaves, tree_map, without_modes
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.fqn import named_modules
from lightning_shardckpt.parallel.sharding.gathered_parameters import leaf_of
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import gather_whole
from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; more than sums in another order differ
_REMEDY = (
    'Give the column-wise layers in it the style "colwise_gather_output" and the row-wise ones "rowwise_split_input", '
    "or leave them out of tensor_parallel_plan."
)


def makes_parts(style: ParallelStyle) -> bool:
    """Return whether the module's output is a part of the columns."""
    return isinstance(style, ColwiseParallel) and style.output_layouts[0] == Shard(-1) and style.use_local_output


def takes_parts(style: ParallelStyle) -> bool:
    """Return whether the module's input is a part of the columns."""
    return isinstance(style, RowwiseParallel) and style.input_layouts[0] == Shard(-1)


def watch_plan(
    root: nn.Module, styles: Mapping[str, ParallelStyle], hooks: Mapping[nn.Module, frozenset[int]], mesh: DeviceMesh
) -> None:
    """Register checks of a plan, which run when modules are called.

    Args:
        root: the module, sharded by the plan.
        styles: the styles by FQN.
        hooks: the ids of the hooks of ``parallelize_module``, by module.
        mesh: the tensor-parallel ranks.
    """
    modules = named_modules(root)
    for fqn, style in styles.items():
        if makes_parts(style) or takes_parts(style):
            check = partial(_refuse_hooks, fqn, hooks.get(modules[fqn], frozenset()), makes_parts(style))
            modules[fqn].register_forward_pre_hook(check, prepend=True)
    kinds: dict[Any, str] = {}
    for name, inside in _blocks(modules, styles).items():
        kinds.setdefault((type(modules[name]), inside), name)
    for name in kinds.values():
        comparison = _Comparison(name, ref(modules[name]), root, hooks, mesh.get_group())
        comparison.handle = modules[name].register_forward_pre_hook(comparison, with_kwargs=True)


def _blocks(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> dict[str, tuple[str, ...]]:
    """Return the innermost modules with both column-wise and row-wise layers, and the names of the layers inside."""
    blocks: dict[str, tuple[str, ...]] = {}
    rows = [fqn for fqn, style in styles.items() if takes_parts(style)]
    for fqn in (fqn for fqn, style in styles.items() if makes_parts(style)):
        name = fqn
        while name := name.rpartition(".")[0]:
            is_called = type(modules[name]).forward is not nn.Module.forward or "forward" in vars(modules[name])
            if is_called and any(row.startswith(f"{name}.") for row in rows):
                inside = [other.removeprefix(name) for other in styles if other.startswith(f"{name}.")]
                blocks[name] = tuple(sorted(inside))
                break
    return blocks


def _refuse_hooks(fqn: str, of_plan: frozenset[int], makes: bool, module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a sharded module: refuse hooks of the user that would get a part of an activation."""
    others = (result_hooks(module) if makes else argument_hooks(module)) - of_plan
    if (makes and others) or len(others) > 1:  # this hook itself gets arguments
        raise UnsupportedCodeError(
            f"a hook on {fqn}, which tensor_parallel_plan shards, would get the part of its "
            f"{'output' if makes else 'input'} that this rank has. Register it on the module around, or give {fqn} the "
            f'style "{"colwise_gather_output" if makes else "rowwise_split_input"}".'
        )


@dataclass(slots=True)
class _Comparison:
    """A forward pre-hook that compares a block with a copy that is not sharded, once.

    It raises its finding on every call: the first call may be a trial of a pipeline, which ends without an error.
    """

    name: str
    block: ref[nn.Module]
    root: nn.Module
    hooks: Mapping[nn.Module, frozenset[int]]
    group: dist.ProcessGroup
    handle: RemovableHandle | None = None
    found: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Comparison:
        return self

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self.handle is None or block is not self.block():  # a deep copy of a block has this hook, too
            return
        if not self.found:
            difference = self._compare(block, args, kwargs)
            if not any_rank(bool(difference), self.group):
                self.handle.remove()
                self.handle = None
                return
            self.found = (
                f"tensor_parallel_plan: {self.name} ({type(block).__name__}) computes something else when it is "
                f"sharded: {difference or 'another rank found a difference'}. Between its column-wise and row-wise "
                "layers a rank has a part of the columns, so a norm, a softmax, a chunk, or the number of columns is "
                f"not the value of the whole. {_REMEDY}"
            )
        raise TopologyError(self.found)

    @torch.no_grad()
    @without_modes()
    def _compare(self, block: nn.Module, args: Any, kwargs: Any) -> str:
        """Return the difference of a sharded and an unsharded copy; empty if there is none, or it is unknown."""
        state = get_rng_state(every_device=False)
        try:
            dtype = torch.float64 if any(p.dtype == torch.float64 for p in block.parameters()) else torch.float32
            copied, unsharded = self._copy(block, sharded=True), self._copy(block, sharded=False)
            expected = _run(unsharded, dtype, args, kwargs, state)
        except Exception:  # the module or its inputs can't be copied, or its code depends on the sharding
            return ""
        try:
            actual = _run(copied, dtype, args, kwargs, state)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            set_rng_state(state)
        return _describe_difference(actual, expected, _TOLERANCES[dtype])

    def _copy(self, block: nn.Module, *, sharded: bool) -> nn.Module:
        """Return a copy of the block in evaluation mode, without hooks of the user."""
        memo: dict[int, Any] = {id(self.root): self.root}
        if not sharded:
            memo |= {id(p): nn.Parameter(_whole(p), requires_grad=False) for p in block.parameters()}
        copied: nn.Module = deepcopy(block, memo)
        for original, module in zip(block.modules(), copied.modules(), strict=True):
            keep_hooks(module, self.hooks.get(original, frozenset()) if sharded else frozenset())
        return copied.eval()


def _run(block: nn.Module, dtype: torch.dtype, args: Any, kwargs: Any, state: dict[str, Any]) -> list[Tensor]:
    """Return the floating-point outputs of a copy of a block, run with copies of the arguments in ``dtype``."""
    if any(p.dtype != dtype for p in block.parameters() if p.is_floating_point()):
        block.to(dtype)
    own_args, own_kwargs = tree_map(partial(_copy_argument, dtype), (args, kwargs))
    set_rng_state(state)
    with torch.autocast(next(block.parameters()).device.type, enabled=False), without_global_hooks():
        outputs = block(*own_args, **own_kwargs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _whole(parameter: Tensor) -> Tensor:
    leaf = leaf_of(parameter)  # a unit around the block may have gathered it
    return gather_whole(leaf, "a check of the plan") if isinstance(leaf, ShardedTensor) else leaf.detach()


def _copy_argument(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype) if value.is_floating_point() else value.detach().clone()
    return deepcopy(value)


def _describe_difference(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> str:
    for position, (value, reference) in enumerate(zip(actual, expected, strict=False)):
        if value.shape != reference.shape:
            if position:  # attention weights, returned beside the output, are the weights of the rank's heads
                continue
            return f"its output has the shape {tuple(value.shape)}, not {tuple(reference.shape)}"
        if not reference.numel():
            continue
        off, largest = float((value - reference).abs().max()), float(reference.abs().max())
        if off > tolerance * largest:
            return f"its output is off by {off:.3g} of {largest:.3g}"
    return ""
