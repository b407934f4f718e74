"""Private names of transformers' models: names that files don't have, and how files differ from state dicts.

transformers is not imported: its functions are called where the program has imported it. Checked with transformers
5.23; versions before 5 have no conversions, since their files are as the models are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


class Renaming(Protocol):
    """A step from the names in files to those of a model."""

    def rename_source_key(self, source_key: str, /) -> tuple[str, str | None]:
        """The new name of a tensor in a file, and the pattern that it had if any did."""


@runtime_checkable
class Conversion(Renaming, Protocol):
    """A step that makes tensors of a model of those in files, whose names match ``source_patterns``."""

    source_patterns: Sequence[str]
    target_patterns: Sequence[str]
    operations: Sequence[object]


def conversions_of(model: nn.Module) -> list[Renaming]:
    """Return what ``from_pretrained`` does to the names and tensors of a model's files, in order.

    Those that change tensors, too, are each a ``Conversion``. Empty without transformers. Relies on
    ``get_model_conversion_mapping``.
    """
    if "transformers" not in sys.modules:
        return []
    try:
        found: Any = import_module("transformers.conversion_mapping")
    except ImportError:  # transformers before 5
        return []
    return list(found.get_model_conversion_mapping(model))


def revert_function() -> Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """Return the function that makes a ``save_pretrained`` state dict from a model and its own; None if there is none.

    Relies on ``transformers.core_model_loading.revert_weight_conversion``.
    """
    module = sys.modules.get("transformers.core_model_loading")
    found: Callable[[nn.Module, Mapping[str, Tensor]], dict[str, Tensor]] | None
    found = getattr(module, "revert_weight_conversion", None)
    return found


def names_not_saved(model: nn.Module) -> frozenset[str]:
    """The names that ``save_pretrained`` leaves out."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def patterns_that_may_be_missing(model: nn.Module) -> frozenset[str]:
    """Regular expressions of names that ``from_pretrained`` does not miss in files."""
    return frozenset(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def patterns_that_may_be_unexpected(model: nn.Module) -> frozenset[str]:
    """Regular expressions of names in files that ``from_pretrained`` does not mind though the model has none such.

    As in ``PreTrainedModel._adjust_missing_and_unexpected_keys``, these include buffers that older models had.
    """
    found = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    for ending, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(name.endswith(ending) for name in buffers):
            found.add(pattern)
    return frozenset(found)


def own_tied_patterns(module: nn.Module) -> tuple[str, ...]:
    """Regular expressions of names below a module that are tied to others; a list before version 5, now a dict."""
    return tuple(getattr(module, "_tied_weights_keys", None) or ())


def own_tensor_parallel_plan(module: nn.Module) -> dict[str, Any]:
    """Module pattern → style, from the module itself; empty if it is no model of transformers or has no plan.

    Not by ``getattr``: a PeftModel passes on what it is asked for to the model that it wraps.
    """
    found = vars(module).get("_tp_plan", getattr(type(module), "_tp_plan", None))
    return found if isinstance(found, dict) else {}


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(module, kind)


def mark_initialized(tensor: Tensor) -> None:
    """Keep `initialize` from filling a tensor, with transformers 5 and later. Relies on ``_is_hf_initialized``."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def initialize(model: nn.Module, modules: Collection[nn.Module]) -> None:
    """Fill the tensors of some modules of a model, as ``from_pretrained`` does those that are not in its files.

    Relies on ``initialize_weights``, which leaves modules with ``_is_hf_initialized`` alone, and gives it to others.

    Args:
        model: of transformers.
        modules: those to fill, with all that contain them.
    """
    for module in model.modules():
        module.__dict__["_is_hf_initialized"] = module not in modules
    model.initialize_weights()  # type: ignore[operator]  # a method


def has_own_code(kind: type) -> bool:
    """Return whether a class of a model is one of ``register_for_auto_class``, whose code lies beside the weights.

    Relies on ``_auto_class``.
    """
    return getattr(kind, "_auto_class", None) is not None
