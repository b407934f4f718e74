"""Adapters of PEFT in a live module, and the names of their tensors. Neither torch nor PEFT is imported.

PEFT puts a model below ``base_model.model``, a module that gets an adapter below ``base_layer``, and a module that is
trained as a whole below ``original_module``, beside a copy for each adapter in ``modules_to_save``. PEFT's files omit
the name of the adapter: ``….lora_A.default.weight`` becomes ``….lora_A.weight``. A module that PEFT wrapped is
recognized by its ``peft_config``. Source: PEFT 0.21, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import parse_json, shown

if TYPE_CHECKING:
    from torch import nn

# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = "base_model.model."  # the prefix of every tensor's name in PEFT's files
_EMBEDDINGS = ("embed_tokens", "lm_head")  # EMBEDDING_LAYER_NAMES
_BASE_LAYER = ".base_layer."
_TENSOR = re.compile(r"((?:.*?\.)?)(lora_[^.]+|modules_to_save|trainable_tokens_delta)\.([^.]+)((?:\..*)?)")


def added_names(live_names: Collection[str]) -> frozenset[str]:
    """Return the names that PEFT's layers add to the names of the wrapped layers.

    >>> sorted(added_names(["q.base_layer.weight", "q.lora_A.default.weight", "norm.weight"]))
    ['q.lora_A.default.weight']
    """
    owners = {name.partition(_BASE_LAYER)[0] for name in live_names if _BASE_LAYER in name}
    beside = (name for name in live_names if owners and _BASE_LAYER not in name)
    return frozenset(n for n in beside if any(m in owners for m in accumulate(n.split("."), lambda a, b: f"{a}.{b}")))


def _adapter_and_name(name: str) -> tuple[str, str] | None:
    """Return the adapter of a tensor, and its name in PEFT's files; None for a tensor of no adapter.

    >>> _adapter_and_name("base_model.model.q_proj.lora_A.default.weight")
    ('default', 'base_model.model.q_proj.lora_A.weight')
    >>> _adapter_and_name("base_model.model.head.modules_to_save.default.dense.weight")
    ('default', 'base_model.model.head.dense.weight')
    """
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    before, kind, adapter, after = match.groups()
    if kind == "modules_to_save":
        return adapter, before + after[1:]
    return adapter, before + kind + ("" if kind == "lora_magnitude_vector" else after)


def _names_in_file(names: Collection[str], adapter: str) -> dict[str, str]:
    """Return the name in a model by name in PEFT's files of the tensors of an adapter."""
    found = ((name, _adapter_and_name(name)) for name in names)
    return {short[1]: name for name, short in found if short is not None and short[0] == adapter}


def live_names_in_file(live_names: Collection[str]) -> dict[str, str]:
    """Return the name in the model by name in PEFT's files of the tensors of an adapter; biases have their own names.

    Of several adapters it is the one that PEFT loads a file into by default.

    >>> live_names_in_file(["base_model.model.q.lora_A.default.weight", "base_model.model.q.base_layer.bias"])
    {'base_model.model.q.lora_A.weight': 'base_model.model.q.lora_A.default.weight'}
    """
    adapters = {found[0] for found in map(_adapter_and_name, live_names) if found is not None}
    adapter = "default" if "default" in adapters else next(iter(adapters)) if len(adapters) == 1 else None
    return {} if adapter is None else _names_in_file(live_names, adapter)


def stored_names(adapter: Mapping[str, str], stored: Collection[str]) -> dict[str, str]:
    """Return the stored name by name in PEFT's file of all tensors of ``PeftModel.save_pretrained``, sorted.

    Args:
        adapter: an item of the document "peft".
        stored: the names of the model's tensors.

    Raises:
        FormatError: for a kind of adapter whose file layout is not implemented.
    """
    name, prefix = adapter["name"], adapter["prefix"]
    settings = parse_json(adapter["config"].encode(), f"the configuration of adapter {name!r}")
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind != "LORA":
        raise FormatError(
            f"adapter {name!r} is of kind {shown(kind)}; only LORA is exported in PEFT's layout. Load the "
            "checkpoint into the model and call save_pretrained of PEFT."
        )
    local = {one.removeprefix(prefix): one for one in stored if one.startswith(prefix)}
    names = _names_in_file(local, name)
    if settings.get("bias") == "all":  # the base model's, trained in place
        names |= {one: one for one in local if one.endswith(".bias") and _adapter_and_name(one) is None}
    elif settings.get("bias") == "lora_only":
        names |= {one: one for one in local if one.endswith(".base_layer.bias")}
    if settings.get("trainable_token_indices") is None:  # PEFT saves embeddings that may have been resized
        adapted = (one for one in local if one.partition(_BASE_LAYER)[0].rpartition(".")[2] in _EMBEDDINGS)
        names |= {one: one for one in adapted if _BASE_LAYER in one}
    return {adapter["root"] + one: local[names[one]] for one in sorted(names)}


# ── live modules ──────────────────────────────────────────────────────────────────────────────────────────────────────


def wrapped_models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost models that PEFT wrapped, or put adapters into, each after the prefix of its names."""
    outermost: list[str] = []
    for name, sub in module.named_modules():
        prefix = f"{clean_fqn(name)}." if name else ""
        if not prefix.startswith(tuple(outermost)) and isinstance(getattr(sub, "peft_config", None), dict):
            outermost.append(prefix)
            yield prefix, sub


def describe_adapters(module: nn.Module) -> list[dict[str, str]]:
    """Return the adapters of each model in ``module`` that PEFT wrapped, or put adapters into, for the document "peft".

    The fields are the name of the adapter ("default" is PEFT's), the prefix of the wrapped model's names in the
    checkpoint, the prefix to add in PEFT's files (empty for a PeftModel, whose names have it), and the text of
    ``adapter_config.json``.
    """
    return [
        {
            "name": name,
            "prefix": prefix,
            "root": "" if "base_model" in wrapped._modules else ROOT,
            "config": _config_text(wrapped, name),
        }
        for prefix, wrapped in wrapped_models(module)
        for name in wrapped.peft_config
    ]


def _config_text(wrapped: Any, adapter: str) -> str:
    """Return the ``adapter_config.json`` of PEFT's ``save_pretrained``, with sets sorted."""
    settings: dict[str, Any] = wrapped.peft_config[adapter].to_dict()
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
        raise StateError(f"the configuration of adapter {adapter!r} cannot be written as JSON: {error}") from error


def adapter_tensors(module: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Return the names among ``names``, canonical names of a module's tensors, that belong to an adapter."""
    inside = tuple(prefix for prefix, _ in wrapped_models(module))
    return frozenset(name for name in names if inside and name.startswith(inside) and _adapter_and_name(name))


def alters_base(wrapped: Any) -> bool:
    """Return whether the initialization of an adapter changed the weights that it adapts, as in PiSSA."""
    ways = (getattr(config, "init_lora_weights", True) for config in wrapped.peft_config.values())
    return any(way not in (True, False, "gaussian", "eva", "orthogonal") for way in ways)


def made_from_base(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return the names of adapters' tensors whose first values PEFT computes from the base model's: DoRA, PiSSA, ….

    If other weights of the base model are loaded afterwards, the model does not begin as the base model.
    """
    altered = any(alters_base(wrapped) for _, wrapped in wrapped_models(module))
    parts = (".lora_magnitude_vector.", ".trainable_tokens_delta.", *((".lora_A.",) if altered else ()))
    return sorted(name for name in names if any(part in name for part in parts))
