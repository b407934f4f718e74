"""Tensor-parallel plans: one style for each module, applied by ``parallelize_module``.

A plan is resolved completely before anything is sharded, so that all problems are reported at once, with the model
unchanged. Gradients of replicated parameters that see only this rank's heads or columns are partial sums: the plan
names them, and ``gradient_sync`` sums them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import is_parametrized

from lightning_shardckpt.compat.torch_modules import (
    argument_hooks,
    child_slots,
    compiled_from,
    is_compiled,
    mix_in,
    parameter_slots,
    result_hooks,
)
from lightning_shardckpt.compat.transformers import own_tensor_parallel_plan
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn, matching_fqns
from lightning_shardckpt.parallel.sharding.fqn import matching_base_modules, named_modules, suggest_names
from lightning_shardckpt.parallel.sharding.plan_check import watch_plan

Style = str | ParallelStyle
Plan = str | Mapping[str, Style] | Callable[..., Any]

PARTIAL = "replicated_with_grad_allreduce"
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""The named styles, spelled as in Hugging Face transformers; ``replicate`` and PARTIAL shard nothing."""

_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts")
"""Styles of transformers for all experts of a layer together."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The style of each module, by clean FQN.

    Attributes:
        styles: the styles of sharded modules.
        partial: replicated modules whose gradients are partial sums over the tensor axis.
        apply: the user's function of (module, tensor mesh), in place of ``styles``.
    """

    styles: Mapping[str, ParallelStyle] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    apply: Callable[..., Any] | None = None


def resolve_plan(root: nn.Module, plan: Plan, ties: list[list[str]], size: int) -> TensorPlan:
    """Return the checked plan for a module.

    Args:
        root: the module.
        plan: the user's argument.
        ties: the names of each tied parameter.
        size: the number of tensor-parallel ranks.

    Raises:
        TopologyError: if a pattern matches nothing, a style is unknown or a size doesn't divide.
    """
    if isinstance(plan, str) and plan != "auto":
        plan = cast("Plan", _import(plan))
    if callable(plan):
        return TensorPlan(apply=plan)
    if not isinstance(plan, str | Mapping):
        raise TopologyError(
            'tensor_parallel_plan is "auto", a dict of module pattern to style, or a function of (module, mesh), '
            f'found {plan!r}: write {{"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}}'
        )
    modules = named_modules(root)
    if isinstance(plan, str):
        named = _matched(modules, without_experts(_hf_plan(root, size)), root, strict=False)
    else:
        named = _matched(modules, plan, root, strict=True)
    named |= _tied_styles(modules, named, ties)
    styles = {
        fqn: STYLES[style]() if isinstance(style, str) else style
        for fqn, style in named.items()
        if style not in (PARTIAL, "replicate")
    }
    partial = frozenset(fqn for fqn, style in named.items() if style == PARTIAL)
    resolved = TensorPlan(_styles_inside_adapters(modules, styles), partial)
    _check_modules(modules, resolved.styles)
    _check_sizes(modules, resolved.styles, size)
    return resolved


def apply_plan(root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shard the modules of ``root``. Weights must be equal on all ranks, or on the meta device."""
    if plan.apply is not None:
        outcome = plan.apply(root, mesh)
        if isinstance(outcome, Mapping):
            raise TopologyError("a callable tensor_parallel_plan must shard the module itself and return None")
    hooks = _apply_styles(root, plan.styles, mesh)
    for module in root.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            handle = module.register_forward_hook(_refuse_second_derivatives)
            hooks[module] = hooks.get(module, frozenset()) | {handle.id}
    refuse_compiled(root, "", {id(p) for p in root.parameters() if isinstance(p, DTensor)})
    watch_plan(root, plan.styles, hooks, mesh)


def refuse_compiled(root: nn.Module, name: str, planned: Set[int], *, from_outside: bool = False) -> None:
    """Check that no module is compiled that has parameters sharded by a plan.

    Args:
        root: the module tree.
        name: the FQN of ``root``; empty for the whole model.
        planned: the ids of the parameters that the plan shards.
        from_outside: whether compiled code calls ``root``.

    Raises:
        TopologyError: naming the module.
    """
    for inner, module in root.named_modules():
        compiled = is_compiled(module) or compiled_from(module) is not None
        if (compiled or from_outside) and any(id(p) in planned for p in module.parameters()):
            fqn = clean_fqn(".".join(filter(None, (name, inner))))
            raise TopologyError(
                f"{fqn or type(root).__name__} is compiled, and tensor_parallel_plan shards it: torch cannot compile "
                "its collectives. Compile modules that the plan leaves whole, or train without torch.compile or "
                "without tensor parallelism."
            )


def _refuse_second_derivatives(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: refuse second derivatives, of which torch's DTensor loses parts."""

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedCodeError(
                f"a backward with create_graph=True went through {type(module).__name__}, which tensor_parallel_plan "
                "shards: torch's DTensor loses parts of second derivatives. Leave its module out of "
                "tensor_parallel_plan, or train without tensor parallelism."
            )

    for value in output if isinstance(output, tuple | list) else (output,):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(check)  # type: ignore[no-untyped-call]  # torch's


def _apply_styles(
    root: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> dict[nn.Module, frozenset[int]]:
    """Shard modules, and return the ids of the hooks of ``parallelize_module``."""
    modules, hooks = named_modules(root), dict[nn.Module, frozenset[int]]()
    for fqn, style in styles.items():
        before = result_hooks(modules[fqn]) | argument_hooks(modules[fqn])
        try:
            parallelize_module(modules[fqn], mesh, style, src_data_rank=None)
        except (NotImplementedError, KeyError) as error:  # a KeyError for parameters of modules inside a Linear
            raise _unfit(fqn, style, modules[fqn], error) from error
        hooks[modules[fqn]] = (result_hooks(modules[fqn]) | argument_hooks(modules[fqn])) - before
    return hooks


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TopologyError(
            f'tensor_parallel_plan: cannot import {path!r} ({error}); give "auto", a dict of module pattern to style, '
            "or the import path of a function of (module, tensor_mesh)"
        ) from error
    return cast("Callable[..., Any]", function)


def _hf_plan(root: nn.Module, size: int) -> dict[str, Style]:
    """Return the plans of the outermost Hugging Face models inside ``root``, with patterns for ``root``."""
    plan: dict[str, Style] = {}
    for name, model in _hf_models(root):
        prefix = f"{name}." if name else ""
        plan |= {prefix + pattern: style for pattern, style in own_tensor_parallel_plan(model).items()}
        _check_heads(name, getattr(model, "config", None), size)
    if not plan:
        raise TopologyError(
            f'tensor_parallel_plan="auto": no module of {type(root).__name__} has a plan (a Hugging Face model '
            'with config.base_model_tp_plan has). Give a dict such as {"net.blocks.*.up": "colwise", '
            '"net.blocks.*.down": "rowwise"}, or a function of (module, tensor_mesh).'
        )
    return plan


def without_experts(plan: dict[str, Style]) -> dict[str, Style]:
    """Return a model's own plan without its experts, which are replicated."""
    experts = tuple(pattern for pattern, style in plan.items() if style in _EXPERTS)
    return {p: style for p, style in plan.items() if not any(p == e or p.startswith(f"{e}.") for e in experts)}


def _hf_models(root: nn.Module) -> Iterator[tuple[str, Any]]:
    outermost: list[str] = []
    for name, module in root.named_modules():
        fqn = clean_fqn(name)
        if any(fqn.startswith(f"{outer}.") for outer in outermost):
            continue
        if own_tensor_parallel_plan(module):
            outermost.append(fqn)
            yield fqn, module


def _check_heads(name: str, config: Any, size: int) -> None:
    counts = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    wrong = {key: count for key, count in counts.items() if isinstance(count, int) and count % size}
    if wrong:
        raise TopologyError(
            f"tensor_parallel_plan: the attention heads of {name or 'the model'} don't divide over "
            f"tensor_parallel_size {size}: found {wrong}"
        )


def _matched(
    modules: dict[str, nn.Module], plan: Mapping[str, Style], root: nn.Module, *, strict: bool
) -> dict[str, Style]:
    """Return the style of each module by FQN; the last pattern that matches a module decides."""
    named: dict[str, Style] = {}
    problems, has_adapters = [], any(hasattr(module, "peft_config") for module in modules.values())
    for pattern, style in plan.items():
        matches = matching_fqns(modules, pattern)
        if has_adapters:
            matches = list(dict.fromkeys([*matches, *matching_base_modules(modules, pattern)]))
        named_styles = (*STYLES, "replicate", PARTIAL)
        if not isinstance(style, ParallelStyle) and not (isinstance(style, str) and style in named_styles):
            if matches:
                problems.append(f"  {pattern!r}: unknown style {style!r}, expected one of {list(named_styles)}")
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


def _tied_styles(modules: dict[str, nn.Module], named: dict[str, Style], ties: list[list[str]]) -> dict[str, Style]:
    """Return styles for modules without one that share a weight with a sharded module: all must shard it alike."""
    added: dict[str, Style] = {}
    for tie in ties:
        owners = [clean_fqn(name).rpartition(".")[0] for name in tie]
        if not any(owner in named for owner in owners):
            continue
        for owner in owners:
            if owner in named or owner not in modules:
                continue
            added[owner] = "embedding_rowwise" if isinstance(modules[owner], nn.Embedding) else "colwise_gather_output"
    return added


def _check_modules(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]) -> None:
    """Raise a TopologyError for a module that its style cannot shard, before any is sharded."""
    for fqn, style in styles.items():
        module = modules[fqn]
        if is_parametrized(module) or "weight_orig" in parameter_slots(module):
            raise TopologyError(
                f"tensor_parallel_plan: the weight of {fqn} is computed from other parameters (a parametrization, "
                "weight or spectral norm, pruning), which cannot be sharded. Leave that module out of the plan."
            )
        if type(style) in (ColwiseParallel, RowwiseParallel) and not isinstance(module, nn.Linear | nn.Embedding):
            raise _unfit(fqn, style, module, "torch shards no modules of this class by it")


def _unfit(fqn: str, style: ParallelStyle, module: nn.Module, reason: object) -> TopologyError:
    return TopologyError(
        f"tensor_parallel_plan: {type(style).__name__} cannot shard {fqn} ({type(module).__name__}): {reason}. Use it "
        "on Linear or Embedding modules, or give a callable plan."
    )


def _check_sizes(modules: dict[str, nn.Module], styles: Mapping[str, ParallelStyle], size: int) -> None:
    """Check that dims divide evenly where parts are plain local tensors: torch assumes equal parts there."""
    uneven = []
    for fqn, style in styles.items():
        module = modules[fqn]
        features = None
        if isinstance(style, ColwiseParallel) and style.output_layouts[0] == Shard(-1):
            features = "out_features"
        elif isinstance(style, RowwiseParallel) and style.input_layouts[0] == Shard(-1):
            features = "in_features"
        width = getattr(module, features, None) if features else None
        if isinstance(width, int) and width % size:
            uneven.append(f"  {fqn}: {features} is {width}")
    if uneven:
        raise TopologyError(
            f"tensor_parallel_plan: these widths don't divide over tensor_parallel_size {size}\n" + "\n".join(uneven)
        )


# ── adapters of PEFT ────────────────────────────────────────────────────────────────────────────────────────────────

# A plan names the modules that adapters wrap. A LoRA layer adds ``lora_B(lora_A(dropout(x)))`` to the output of its
# base layer. A column-wise base layer has its whole input on every rank: ``lora_A`` is replicated, and ``lora_B`` is
# sharded like the base layer, so that the outputs fit. A row-wise base layer has a part of the input: ``lora_A`` is
# sharded like the base layer, with a sum over the ranks as small as the rank of the adapter, and ``lora_B`` is
# replicated. PEFT is not imported: its layers are recognized by their attributes.

_LISTED = 5


def _styles_inside_adapters(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """Replace the styles of PEFT's wrappers by styles of the modules inside; a module's own style has precedence.

    Raises:
        TopologyError: listing the wrappers that cannot be sharded: other kinds than LoRA, and variants such as DoRA.
    """
    inside: dict[str, ParallelStyle] = {}
    unfit = []
    for fqn, style in styles.items():
        module = modules[fqn]
        parts = child_slots(module)
        if not {"base_layer", "original_module"} & parts.keys():
            inside[fqn] = style
        elif not _fits(module, style):
            unfit.append(f"{fqn} ({type(module).__name__}, {type(style).__name__})")
        elif "base_layer" in parts:
            inside |= {f"{fqn}.{name}": part_style for name, part_style in _lora_styles(module, style).items()}
    if unfit:
        raise TopologyError(
            f"tensor_parallel_plan cannot shard {len(unfit)} modules with adapters: {', '.join(unfit[:_LISTED])}"
            f"{', …' if len(unfit) > _LISTED else ''}. It shards plain LoRA over Linear and Embedding, column-wise "
            "with a replicated input or row-wise with a replicated output. Use that, leave their patterns out of the "
            "plan, or give a function of (module, tensor_mesh)."
        )
    return inside | {fqn: style for fqn, style in styles.items() if fqn in inside}


def _fits(module: nn.Module, style: ParallelStyle) -> bool:
    """Return whether a wrapper can be sharded: plain LoRA over a Linear or Embedding, or ``modules_to_save``."""
    inside = child_slots(module)
    if "original_module" in inside:  # the plan has matched the wrapped module, too
        return "modules_to_save" in inside
    is_plain = "lora_A" in inside and not getattr(module, "lora_variant", None)
    if not is_plain or not isinstance(module.base_layer, nn.Linear | nn.Embedding):
        return False
    if isinstance(style, ColwiseParallel):
        return style.input_layouts[0] == Replicate()
    return isinstance(style, RowwiseParallel) and style.output_layouts[0] == Replicate()


def _lora_styles(layer: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return the styles of the modules in a LoRA layer, by name. LoRA of an embedding has only parameters."""
    styles: dict[str, ParallelStyle] = {"base_layer": style}
    sharded = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
    styles |= {f"{sharded}.{adapter}": style for adapter, _ in layer.get_submodule(sharded).named_children()}
    if isinstance(style, RowwiseParallel) and style.input_layouts[0] == Shard(-1):
        dropouts = layer.get_submodule("lora_dropout").named_children()
        styles |= {f"lora_dropout.{name}": _SharedDropout() for name, m in dropouts if isinstance(m, nn.Dropout)}
    return styles


class _SharedDropout(ParallelStyle):
    """A style for a dropout whose input is this rank's columns: it drops what a dropout of all columns would drop.

    Without it, all ranks would drop the same places of their columns.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__dict__["_shardckpt_columns"] = device_mesh.size(), device_mesh.get_local_rank()
        mix_in(module, _DropoutOfColumns)
        return module


class _DropoutOfColumns(nn.Module):
    """A mixin for dropout modules: draws for the columns of all ranks, and uses this rank's."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        (ranks, rank), width = module.__dict__["_shardckpt_columns"], x.shape[-1]
        noise = nn.functional.dropout(x.new_ones((*x.shape[:-1], ranks * width)), module.p, module.training)
        return x * noise.narrow(-1, rank * width, width)
