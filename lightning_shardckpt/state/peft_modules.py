"""Adapters of PEFT in a live module, and the base parameters that PEFT froze.

PEFT is not imported: a module that it wrapped is recognized by its ``peft_config``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.model import is_elsewhere
from lightning_shardckpt.state.peft_names import ROOT, Adapter, is_of_adapter
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import dtype_name


def adapters_of(module: nn.Module) -> list[Adapter]:
    """Return the adapters of every model in ``module`` that PEFT wrapped, or put adapters into."""
    adapters = []
    for name, wrapped in _wrapped(module):
        prefix = f"{name}." if name else ""
        root = "" if "base_model" in wrapped._modules else ROOT
        for adapter, config in wrapped.peft_config.items():
            adapters.append(Adapter(adapter, prefix, root, _config_text(wrapped, config, f"{prefix}{adapter}")))
    return adapters


def _wrapped(module: nn.Module) -> Iterator[tuple[str, Any]]:
    outermost: list[str] = []
    for name, sub in module.named_modules():
        clean = clean_fqn(name)
        if any(clean.startswith(f"{outer}.") or not outer for outer in outermost):
            continue
        if isinstance(_config(sub), dict):
            outermost.append(clean)
            yield clean, sub


def _config(sub: nn.Module) -> Any:
    """Return the ``peft_config`` of a module, or None, without the AttributeError of ``nn.Module.__getattr__``."""
    kind = type(sub)
    if "peft_config" in vars(sub) or hasattr(kind, "peft_config") or kind.__getattr__ is not nn.Module.__getattr__:
        return getattr(sub, "peft_config", None)
    return None


def _config_text(wrapped: Any, config: Any, where: str) -> str:
    """Return the ``adapter_config.json`` of PEFT's ``save_pretrained``, with sets sorted."""
    settings: dict[str, Any] = config.to_dict()
    settings = {key: sorted(v) if isinstance(v, set | frozenset) else v for key, v in settings.items()}
    model = wrapped.base_model.model if "base_model" in wrapped._modules else wrapped
    if settings.get("base_model_name_or_path") is None:
        settings["base_model_name_or_path"] = vars(model).get("name_or_path") or None
    if settings.get("task_type") is None:
        kind = type(model)
        settings["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    settings["inference_mode"] = True
    try:
        return json.dumps(settings, indent=2, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StateError(f"the configuration of adapter {where!r} cannot be written as JSON: {error}") from error


def adapter_tensors(module: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Return the names among ``names``, canonical names of a module's tensors, that belong to an adapter."""
    wrapped = [(f"{name}." if name else "", list(sub.peft_config)) for name, sub in _wrapped(module)]
    return frozenset(
        name
        for prefix, adapters in wrapped
        for name in names
        if name.startswith(prefix) and any(is_of_adapter(name.removeprefix(prefix), one) for one in adapters)
    )


def _alters_base(config: Any) -> bool:
    """Return whether the initialization of an adapter changed the weights that it adapts, as in PiSSA."""
    return getattr(config, "init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal")


def made_from_base(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return the names of adapters' tensors whose first values PEFT computes from the base model's: DoRA, PiSSA, ….

    If other weights of the base model are loaded afterwards, the model does not begin as the base model.
    """
    altered = any(_alters_base(config) for _, wrapped in _wrapped(module) for config in wrapped.peft_config.values())
    parts = (".lora_magnitude_vector.", ".trainable_tokens_delta.", *((".lora_A.",) if altered else ()))
    return sorted(name for name in names if any(part in name for part in parts))


def frozen_base_parameters(module: nn.Module, optimizers: Collection[Mapping[str, Any]] = ()) -> frozenset[str]:
    """Return the canonical FQNs of base parameters that PEFT froze, whose values the pretrained model has, too.

    Leaves out parameters with optimizer state, which were trained, base weights that an adapter's initialization
    changed, and frozen parameters outside of models with adapters, such as averages.
    """
    frozen: set[str] = set()
    inside_of = tuple(f"{name}." if name else "" for name, _ in _wrapped(module))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and not is_elsewhere(parameter) and clean_fqn(name).startswith(inside_of):
            frozen.add(clean_fqn(name))
    for name, wrapped in _wrapped(module):
        if any(map(_alters_base, wrapped.peft_config.values())):
            inside = f"{name}." if name else ""
            frozen -= {one for one in frozen if one.startswith(inside) and ".base_layer." in one}
    trained = {str(name) for state in optimizers for name, values in state.get("state", {}).items() if values}
    return frozenset(frozen - trained - adapter_tensors(module, frozen))


def leave_out(leaves: Leaves, names: Collection[str]) -> tuple[Leaves, dict[str, Any]]:
    """Return leaves without the tensors called ``names``, and the document "frozen", which describes these.

    A tied tensor is left out if ``names`` has one of its names.
    """
    out = leaves.tensors.keys() & {leaves.aliases.get(name, name) for name in names}
    document: dict[str, Any] = {}
    for key in [*sorted(out), *sorted(alias for alias, of in leaves.aliases.items() if of in out)]:
        tensor = leaves.tensors[leaves.aliases.get(key, key)]
        document[key] = [dtype_name(local_tensor(tensor), f"model/{shown(key)}"), list(tensor.shape)]
    kept = Leaves(
        {key: tensor for key, tensor in leaves.tensors.items() if key not in out},
        {alias: of for alias, of in leaves.aliases.items() if of not in out},
        leaves.pinned - out,
    )
    return kept, document
