"""Private names of transformers: names that files lack, and conversions between files and state dicts.

transformers is not imported; its functions are called only if the program has imported it. Checked with transformers
5.23; versions before 5 have no conversions, since files and models have the same tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Conversion(Protocol):
    """A step that converts tensors in files, whose names match ``source_patterns``, to tensors of a model."""

    source_patterns: Sequence[str]
    target_patterns: Sequence[str]
    operations: Sequence[object]

    def rename_source_key(self, source_key: str, /) -> tuple[str, str | None]:
        """Return the new name of a tensor in a file, and the pattern that matched, if any."""


def conversions_of(model: nn.Module) -> tuple[list[Callable[[str], tuple[str, str | None]]], list[Conversion]]:
    """Return the steps by which ``from_pretrained`` converts a model's files: renamings of keys, then conversions."""
    module = sys.modules.get("transformers.conversion_mapping")  # every model of transformers 5 and later imports it
    steps = [] if module is None else list(module.get_model_conversion_mapping(model))
    renamings = [step.rename_source_key for step in steps if not isinstance(step, Conversion)]
    return renamings, [step for step in steps if isinstance(step, Conversion)]


def revert_function() -> Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """Return the function that makes ``save_pretrained``'s state dict from a model and its state dict, or None."""
    return getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)


def names_not_saved(model: nn.Module) -> frozenset[str]:
    """Return the names that ``save_pretrained`` leaves out."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def patterns_that_may_be_unexpected(model: nn.Module) -> frozenset[str]:
    """Return regular expressions of names in files that ``from_pretrained`` accepts as unexpected.

    As in ``PreTrainedModel._adjust_missing_and_unexpected_keys``, they include buffers of older models.
    """
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    for ending, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(name.endswith(ending) for name in buffers):
            patterns.add(pattern)
    return frozenset(patterns)


def own_tied_patterns(module: nn.Module) -> tuple[str, ...]:
    """Return regular expressions of tied names below a module, from a list before version 5, else from a dict."""
    return tuple(getattr(module, "_tied_weights_keys", None) or ())


def own_tensor_parallel_plan(module: nn.Module) -> dict[str, Any]:
    """Return the styles by module pattern of a module itself; empty for other modules, and without a plan."""
    plan = vars(module).get("_tp_plan", getattr(type(module), "_tp_plan", None))  # a PeftModel forwards getattr
    return plan if isinstance(plan, dict) else {}


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(module, kind)


def initialize(model: nn.Module, module: nn.Module) -> None:
    """Initialize a module's tensors, as ``from_pretrained`` does for those missing in files, except marked ones.

    ``model`` is the innermost model of transformers that contains the module, or is it.
    """
    guard: Any = getattr(sys.modules.get("transformers.initialization"), "guard_torch_init_functions", nullcontext)
    with torch.no_grad(), guard():
        model._init_weights(module)  # type: ignore[operator]  # a method


def weights_method(module: nn.Module) -> Callable[..., Any] | None:
    """Return the method of a module that initializes a module inside it, by the name that many took over."""
    method = getattr(module, "_init_weights", None)
    return method if callable(method) else None


def was_initialized(module: nn.Module) -> bool:
    """Return whether the constructor of its model initialized a module. Relies on ``_is_hf_initialized``."""
    return bool(getattr(module, "_is_hf_initialized", False))
