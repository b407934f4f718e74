"""Shard modules with adapters of PEFT over the tensor axis, by a plan that speaks of the modules that they wrap.

A LoRA layer adds ``lora_B(lora_A(dropout(x)))`` to the output of its base layer. A column-wise base layer has its whole
input on every rank: ``lora_A`` is kept whole and ``lora_B`` is sharded like the base layer, so that the outputs fit. A
row-wise one has a part of the input: ``lora_A`` is sharded like the base layer, its sum over the ranks is as small as
the rank of the adapter, and ``lora_B`` is kept whole. PEFT is not imported: its layers are known by what they have.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_shardckpt.compat.torch_modules import child_slots
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.keyed_dropout import ShardedDropout

_LISTED = 5


def has_adapters(modules: Mapping[str, nn.Module]) -> bool:
    """Return whether PEFT wrapped one of these modules."""
    return any(hasattr(module, "peft_config") for module in modules.values())


def styles_inside_adapters(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """The styles of what wrappers of PEFT wrap and add, in place of those of the wrappers.

    Args:
        modules: every module by clean FQN.
        styles: by clean FQN, of wrappers and of others; what is named itself keeps its own style.

    Raises:
        TopologyError: listing the wrappers that cannot be sharded: other kinds than LoRA, and variants such as DoRA.
    """
    found: dict[str, ParallelStyle] = {}
    problems = []
    for fqn, style in styles.items():
        module = modules[fqn]
        parts = child_slots(module)
        if not {"base_layer", "original_module"} & parts.keys():
            found[fqn] = style
        elif (why := _why_not(module, style)) is not None:
            problems.append(f"  {fqn} ({type(module).__module__}.{type(module).__name__}): {why}")
        elif "base_layer" in parts:
            found |= {f"{fqn}.{name}": part_style for name, part_style in _parts(module, style).items()}
    if problems:
        more = [f"  … and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise TopologyError(
            "tensor_parallel_plan cannot shard these modules with adapters:\n"
            + "\n".join(problems[:_LISTED] + more)
            + "\nUse plain LoRA, leave their patterns out of the plan, or give a function of (module, tensor_mesh)."
        )
    return found | {fqn: style for fqn, style in styles.items() if fqn in found}


def _why_not(module: nn.Module, style: ParallelStyle) -> str | None:
    """Return why a wrapper cannot be sharded; None if it can."""
    inside = child_slots(module)
    if "original_module" in inside:  # what it wraps has the style, too: the plan matched it
        return None if "modules_to_save" in inside else "only modules_to_save can be sharded"
    if "lora_A" not in inside:
        return "only LoRA can be sharded"
    if variants := getattr(module, "lora_variant", None):
        names = sorted({type(variant).__name__ for variant in variants.values()})
        return f"only plain LoRA can be sharded, not {', '.join(names)}"
    base = module.base_layer
    if not isinstance(base, nn.Linear | nn.Embedding):
        return f"only LoRA over Linear or Embedding can be sharded, not over {type(base).__name__}"
    if isinstance(style, ColwiseParallel) and style.input_layouts[0] == Replicate():
        return None
    if isinstance(style, RowwiseParallel) and style.output_layouts[0] == Replicate():
        return None
    return (
        "LoRA can be sharded by ColwiseParallel with a replicated input or RowwiseParallel with a replicated output, "
        f"not by {type(style).__name__} with other layouts"
    )


def _parts(module: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Styles of the modules in a LoRA layer, by name. LoRA of an embedding is kept whole: it is made of parameters."""
    parts: dict[str, ParallelStyle] = {"base_layer": style}
    sharded = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
    parts |= {f"{sharded}.{adapter}": style for adapter in _by_adapter(module, sharded)}
    if isinstance(style, RowwiseParallel) and style.input_layouts[0] == Shard(-1):
        dropouts = _by_adapter(module, "lora_dropout").items()
        parts |= {f"lora_dropout.{name}": ShardedDropout() for name, m in dropouts if isinstance(m, nn.Dropout)}
    return parts


def _by_adapter(layer: nn.Module, name: str) -> dict[str, nn.Module]:
    found = layer.get_submodule(name)
    assert isinstance(found, nn.ModuleDict)
    return dict(found.items())
