"""Tensor-parallel plans: one style for each module, applied by ``parallelize_module``.

A plan is resolved completely before anything is sharded, so that all names that don't fit are reported at once.
Gradients of replicated parameters that see only this rank's heads or columns are partial sums: the plan names them, and
``gradient_sync`` sums them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.torch_modules import (
    argument_hooks,
    child_slots,
    compiled_from,
    is_compiled,
    keep_hooks,
    parameter_slots,
    result_hooks,
    without_global_hooks,
)
from lightning_shardckpt.compat.torch_tensors import tree_leaves, tree_map, without_modes
from lightning_shardckpt.compat.transformers import own_tensor_parallel_plan
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn, matching_fqns
from lightning_shardckpt.parallel.sharding.fqn import matching_base_modules, named_modules, suggest_names
from lightning_shardckpt.parallel.sharding.gathered_parameters import leaf_of
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import gather_whole
from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state
from lightning_shardckpt.system.text import list_some

Style = str | ParallelStyle
Plan = str | Mapping[str, Style] | Callable[..., Any]

PARTIAL = "replicated_with_grad_allreduce"
STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(
        ("colwise_rep", "colwise_gather_output", "embedding_colwise"),
        lambda: ColwiseParallel(output_layouts=Replicate()),
    ),
    **dict.fromkeys(
        ("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), lambda: RowwiseParallel(input_layouts=Replicate())
    ),
    **dict.fromkeys(("replicate", PARTIAL)),
}
"""The named styles, spelled as in Hugging Face transformers; None for those that shard nothing."""

_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts")
"""Styles of transformers for all experts of a layer together."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The style of each module, by clean FQN."""

    styles: Mapping[str, ParallelStyle] = field(default_factory=dict)  # of sharded modules
    partial: frozenset[str] = frozenset()  # replicated modules whose gradients are partial sums over the tensor axis
    apply: Callable[..., Any] | None = None  # the user's function of (module, tensor mesh), in place of `styles`


def resolve_plan(root: nn.Module, plan: Plan, ties: list[list[str]], size: int) -> TensorPlan:
    """Return the checked plan for a module, from the user's argument; ``ties`` has the names of each tied parameter.

    Raises:
        TopologyError: if a pattern matches nothing, a style is unknown or a width doesn't divide over ``size`` ranks.
        ImportError: if ``plan`` is a name that can't be imported; or as ``pkgutil.resolve_name``.
    """
    if isinstance(plan, str) and plan != "auto":
        plan = pkgutil.resolve_name(plan)
    if callable(plan):
        return TensorPlan(apply=plan)
    if not isinstance(plan, str | Mapping):
        raise TopologyError(
            'tensor_parallel_plan is "auto", a dict of module pattern to style, or a function of (module, mesh), '
            f'found {plan!r}: write {{"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}}'
        )
    modules = named_modules(root)
    named = _matched(root, modules, _own_plan(root) if isinstance(plan, str) else plan, strict=plan != "auto")
    for tie in ties:  # modules that share a weight with a sharded module must shard it alike
        owners = [clean_fqn(name).rpartition(".")[0] for name in tie]
        for owner in owners if any(owner in named for owner in owners) else ():
            if owner in modules:
                is_embedding = isinstance(modules[owner], nn.Embedding)
                named.setdefault(owner, "embedding_rowwise" if is_embedding else "colwise_gather_output")
    made = {f: s if isinstance(s, ParallelStyle) else make() if (make := STYLES[s]) else None for f, s in named.items()}
    styles = _styles_inside_adapters(modules, {fqn: style for fqn, style in made.items() if style is not None})
    for fqn, style in styles.items():
        if type(style) in (ColwiseParallel, RowwiseParallel):
            module = modules[fqn]
            if not isinstance(module, nn.Linear | nn.Embedding):
                raise _unfit(fqn, style, module, "torch shards no modules of this class by it")
            if "weight" not in parameter_slots(module):  # a parametrization, weight or spectral norm, pruning
                raise _unfit(fqn, style, module, "its weight is computed from other parameters")
    _check_sizes(modules, styles, size)
    return TensorPlan(styles, frozenset(fqn for fqn, style in named.items() if style == PARTIAL))


def apply_plan(root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shard the modules of ``root``. Weights must be equal on all ranks, or on the meta device."""
    if plan.apply is not None:
        plan.apply(root, mesh)
    modules, first = named_modules(root), RemovableHandle.next_id
    for fqn, style in plan.styles.items():
        try:
            parallelize_module(modules[fqn], mesh, style, src_data_rank=None)
        except (NotImplementedError, KeyError) as error:  # a KeyError for parameters of modules inside a Linear
            raise _unfit(fqn, style, modules[fqn], error) from error
    for module in root.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            module.register_forward_hook(_refuse_second_derivatives)
    refuse_compiled(root, "", {id(p) for p in root.parameters() if isinstance(p, DTensor)})
    _watch_plan(root, plan.styles, range(first, RemovableHandle.next_id), mesh)


def refuse_compiled(root: nn.Module, name: str, planned: Set[int], *, from_outside: bool = False) -> None:
    """Raise a TopologyError if a module is compiled that has parameters with the ids ``planned``, which a plan shards.

    ``name`` is the FQN of ``root``; with ``from_outside``, compiled code calls it.
    """
    for inner, module in root.named_modules():
        compiled = is_compiled(module) or compiled_from(module) is not None
        if (compiled or from_outside) and any(id(p) in planned for p in module.parameters()):
            fqn = clean_fqn(".".join(filter(None, (name, inner))))
            raise TopologyError(
                f"{fqn or type(root).__name__} is compiled, and tensor_parallel_plan shards it: torch cannot compile "
                "its collectives. Compile modules that the plan leaves whole, or train without torch.compile."
            )


def _refuse_second_derivatives(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: refuse second derivatives, of which torch's DTensor loses parts."""

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedCodeError(
                f"a backward with create_graph=True went through {type(module).__name__}: torch's DTensor loses parts "
                "of second derivatives. Leave its module out of tensor_parallel_plan."
            )

    for value in output if isinstance(output, tuple | list) else (output,):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(check)  # type: ignore[no-untyped-call]  # torch's


def _own_plan(root: nn.Module) -> dict[str, Style]:
    """Return the plans of the outermost Hugging Face models inside ``root``, with patterns for ``root``."""
    plan, outermost = dict[str, Style](), list[str]()
    for name, module in root.named_modules():
        fqn = clean_fqn(name)
        own = own_tensor_parallel_plan(module)
        if own and not any(fqn.startswith(f"{outer}.") or not outer for outer in outermost):
            outermost.append(fqn)
            plan |= {f"{fqn}.{pattern}" if fqn else pattern: style for pattern, style in own.items()}
    if not plan:
        raise TopologyError(
            f'tensor_parallel_plan="auto": no module of {type(root).__name__} has a plan (a Hugging Face model '
            'with config.base_model_tp_plan has). Give a dict such as {"net.blocks.*.up": "colwise", '
            '"net.blocks.*.down": "rowwise"}, or a function of (module, tensor_mesh).'
        )
    return without_experts(plan)


def without_experts(plan: dict[str, Style]) -> dict[str, Style]:
    """Return a model's own plan without its experts, which are replicated."""
    experts = tuple(pattern for pattern, style in plan.items() if style in _EXPERTS)
    return {p: style for p, style in plan.items() if not any(p == e or p.startswith(f"{e}.") for e in experts)}


def _matched(
    root: nn.Module, modules: dict[str, nn.Module], plan: Mapping[str, Style], *, strict: bool
) -> dict[str, Style]:
    """Return the style of each module by FQN; the last pattern that matches a module decides."""
    named, problems = dict[str, Style](), list[str]()
    has_adapters = any(hasattr(module, "peft_config") for module in modules.values())
    for pattern, style in plan.items():
        matches = matching_fqns(modules, pattern)
        if has_adapters:
            matches = [*matches, *matching_base_modules(modules, pattern)]
        if matches and not isinstance(style, ParallelStyle) and style not in STYLES:
            problems.append(f"  {pattern!r}: unknown style {style!r}, expected one of {list(STYLES)}")
        elif not matches and strict:
            problems.append(f"  {pattern!r} matches no module{suggest_names(modules, pattern)}")
        named |= dict.fromkeys(matches, style)
    if not problems and not named:
        problems = [f"  none of its {len(plan)} patterns matches a module"]
    if problems:
        raise TopologyError(
            f"tensor_parallel_plan doesn't fit {type(root).__name__}:\n"
            + "\n".join(problems)
            + "\nIn a pattern, * stands for one component of a module name and ** for any number of them."
        )
    return named


def _unfit(fqn: str, style: ParallelStyle, module: nn.Module, reason: object) -> TopologyError:
    return TopologyError(
        f"tensor_parallel_plan: {type(style).__name__} cannot shard {fqn} ({type(module).__name__}): {reason}. Use it "
        "on Linear or Embedding modules, or give a callable plan."
    )


def _check_sizes(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Check that the widths of parts, which are plain local tensors, divide evenly: torch assumes equal parts there."""
    uneven = list[str]()
    for fqn, style in styles.items():
        for is_split, features in ((_makes_parts(style), "out_features"), (_takes_parts(style), "in_features")):
            width = getattr(modules[fqn], features, 0)
            if is_split and width % size:
                uneven.append(f"  {fqn}: {features} is {width}")
    if uneven:
        raise TopologyError(
            f"tensor_parallel_plan: these widths don't divide over tensor_parallel_size {size}\n" + "\n".join(uneven)
        )


# A LoRA layer adds ``lora_B(lora_A(dropout(x)))`` to the output of the base layer that a plan names. With a column-wise
# one, ``lora_B`` is sharded alike, so that the outputs fit. With a row-wise one, which has a part of the input,
# ``lora_A`` is, with a sum over the ranks as small as the rank of the adapter. The other is replicated. PEFT is not
# imported: its layers are recognized by their attributes.


def _styles_inside_adapters(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Replace the styles of PEFT's wrappers by styles of the modules inside; a module's own style has precedence.

    Raises a TopologyError for wrappers that cannot be sharded: other kinds than LoRA, and variants such as DoRA.
    """
    inside, unfit = dict[str, ParallelStyle](), list[str]()
    for fqn, style in styles.items():
        module: Any = modules[fqn]
        parts: dict[str, Any] = {**child_slots(module)}
        if not {"base_layer", "original_module"} & parts.keys():
            inside[fqn] = style
        elif "modules_to_save" in parts:  # the plan has matched the wrapped module, too
            continue
        elif "lora_A" not in parts or getattr(module, "lora_variant", None) or not _fits(module.base_layer, style):
            unfit.append(f"{fqn} ({type(module).__name__}, {type(style).__name__})")
        else:  # LoRA of an embedding has only parameters
            sharded = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
            names = ["base_layer", *(f"{sharded}.{name}" for name, _ in parts[sharded].named_children())]
            inside |= {f"{fqn}.{name}": style for name in names}
            if _takes_parts(style):
                dropouts = parts["lora_dropout"].named_children()
                names = [name for name, dropout in dropouts if isinstance(dropout, nn.Dropout)]
                inside |= {f"{fqn}.lora_dropout.{name}": _SharedDropout() for name in names}
    if unfit:
        raise TopologyError(
            f"tensor_parallel_plan cannot shard {len(unfit)} modules with adapters: {list_some(unfit, 5)}. It shards "
            "plain LoRA over Linear and Embedding, column-wise with a replicated input or row-wise with a replicated "
            "output. Use that, leave their patterns out of the plan, or give a function of (module, tensor_mesh)."
        )
    return inside | {fqn: style for fqn, style in styles.items() if fqn in inside}


def _fits(base_layer: nn.Module, style: Any) -> bool:
    """Return whether a style leaves the input of ``lora_A`` or the output of ``lora_B`` whole."""
    is_column, is_row = isinstance(style, ColwiseParallel), isinstance(style, RowwiseParallel)
    layouts = style.input_layouts if is_column else style.output_layouts if is_row else [None]
    return isinstance(base_layer, nn.Linear | nn.Embedding) and layouts[0] == Replicate()


class _SharedDropout(ParallelStyle):
    """A style for a dropout whose input is this rank's columns: it drops what a dropout of all columns would drop.

    Without it, all ranks would drop the same places of their columns.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()

        def forward(dropout: Any, x: Tensor) -> Tensor:
            width = x.shape[-1]
            noise = nn.functional.dropout(x.new_ones((*x.shape[:-1], ranks * width)), dropout.p, dropout.training)
            return x * noise.narrow(-1, rank * width, width)

        module.__dict__["forward"] = MethodType(forward, module)  # a deep copy gets its own
        return module


# ── the check of a plan ───────────────────────────────────────────────────────────────────────────────────────────────


# Between a column-wise and a row-wise layer, each rank has a part of the columns, as a plain tensor. Code that does not
# treat each column on its own is wrong there, such as a norm. So the first call of one block of each kind is compared
# with a copy of the block that is not sharded, and hooks of the user that would get a part are refused.

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; more than sums in another order differ


def _makes_parts(style: ParallelStyle) -> bool:
    """Return whether the module's output is a part of the columns."""
    return isinstance(style, ColwiseParallel) and style.output_layouts[0] == Shard(-1) and style.use_local_output


def _takes_parts(style: ParallelStyle) -> bool:
    """Return whether the module's input is a part of the columns."""
    return isinstance(style, RowwiseParallel) and style.input_layouts[0] == Shard(-1)


def _watch_plan(root: nn.Module, styles: Mapping[str, ParallelStyle], hooks: range, mesh: DeviceMesh) -> None:
    """Register checks of a plan, which run when modules are called; ``hooks``: the ids of those of torch and ours."""
    modules = named_modules(root)
    for fqn, style in styles.items():
        if _makes_parts(style) or _takes_parts(style):
            check = partial(_refuse_hooks, fqn, hooks, _makes_parts(style))
            modules[fqn].register_forward_pre_hook(check, prepend=True)
    kinds: dict[Any, str] = {}
    for name, inside in _blocks(modules, styles).items():
        kinds.setdefault((type(modules[name]), inside), name)
    for name in kinds.values():
        comparison = _Comparison(name, ref(modules[name]), ref(root), hooks, mesh.get_group())
        comparison.handle = modules[name].register_forward_pre_hook(comparison, with_kwargs=True)


def _blocks(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> dict[str, tuple[str, ...]]:
    """Return the innermost modules with both column-wise and row-wise layers, and the names of the layers inside."""
    blocks: dict[str, tuple[str, ...]] = {}
    rows = [fqn for fqn, style in styles.items() if _takes_parts(style)]
    for fqn in (fqn for fqn, style in styles.items() if _makes_parts(style)):
        name = fqn
        while name := name.rpartition(".")[0]:
            is_called = type(modules[name]).forward is not nn.Module.forward or "forward" in vars(modules[name])
            if is_called and any(row.startswith(f"{name}.") for row in rows):
                inside = [other.removeprefix(name) for other in styles if other.startswith(f"{name}.")]
                blocks[name] = tuple(sorted(inside))
                break
    return blocks


def _refuse_hooks(fqn: str, of_plan: range, makes: bool, module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a sharded module: refuse hooks of the user that would get a part of an activation."""
    others = (result_hooks(module) if makes else argument_hooks(module)).difference(of_plan)
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
    root: ref[nn.Module]
    hooks: range
    group: dist.ProcessGroup
    handle: RemovableHandle | None = None
    found: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Comparison:
        return self

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if block is not self.block():  # a deep copy of a block has this hook, too
            return
        if not self.found:
            difference = self._compare(block, args, kwargs)
            if not any_rank(bool(difference), self.group):
                assert self.handle is not None
                self.handle.remove()
                return
            self.found = difference or "another rank found a difference"
        raise TopologyError(
            f"tensor_parallel_plan: {self.name} ({type(block).__name__}) computes something else when it is sharded: "
            f"{self.found}. Between its column-wise and row-wise layers a rank has a part of the columns, so a norm, a "
            "softmax, a chunk, or the number of columns is not the value of the whole. Give the column-wise layers in "
            'it the style "colwise_gather_output" and the row-wise ones "rowwise_split_input", or leave them out of '
            "tensor_parallel_plan."
        )

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
        memo: dict[int, Any] = {id(root := self.root()): root}
        if not sharded:
            leaves = {id(p): leaf_of(p) for p in block.parameters()}  # a unit around the block may have gathered it
            wholes = {
                n: gather_whole(p, "a check of the plan") if isinstance(p, ShardedTensor) else p.detach()
                for n, p in leaves.items()
            }
            memo |= {n: nn.Parameter(whole, requires_grad=False) for n, whole in wholes.items()}
        copied: nn.Module = deepcopy(block, memo)
        for module in copied.modules():
            keep_hooks(module, self.hooks if sharded else ())
        return copied.eval()


def _run(block: nn.Module, dtype: torch.dtype, args: Any, kwargs: Any, state: dict[str, Any]) -> list[Tensor]:
    """Return the floating-point outputs of a copy of a block, run with copies of the arguments in ``dtype``."""
    if any(p.dtype != dtype for p in block.parameters() if p.is_floating_point()):
        block.to(dtype)

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(dtype) if value.is_floating_point() else value.detach().clone()
        return deepcopy(value)

    own_args, own_kwargs = tree_map(copy, (args, kwargs))
    set_rng_state(state)
    with torch.autocast(next(block.parameters()).device.type, enabled=False), without_global_hooks():
        outputs = block(*own_args, **own_kwargs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


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
