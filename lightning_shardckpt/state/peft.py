"""Adapters of PEFT in a live module, and the names of their tensors. Neither torch nor PEFT is imported.

PEFT puts a model below ``base_model.model``, a module that gets an adapter below ``base_layer``, and a module that is
trained as a whole below ``original_module``, beside a copy for each adapter in ``modules_to_save``. PEFT's files omit
the name of the adapter: ``….lora_A.default.weight`` becomes ``….lora_A.weight``. A module that PEFT wrapped is
recognized by its ``peft_config``. Source: PEFT 0.21, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import parse_json, shown

if TYPE_CHECKING:
    from torch import nn

# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = "base_model.model."  # the prefix of every tensor's name in PEFT's files
_EMBEDDINGS = ("embed_tokens", "lm_head")  # EMBEDDING_LAYER_NAMES
_SAVED = "modules_to_save"
_BASE_LAYER = ".base_layer."


def added_names(live_names: Collection[str]) -> frozenset[str]:
    """Return the names that PEFT's layers add to the names of the wrapped layers.

    >>> sorted(added_names(["q.base_layer.weight", "q.lora_A.default.weight", "norm.weight"]))
    ['q.lora_A.default.weight']
    """
    owners = {name.partition(_BASE_LAYER)[0] for name in live_names if _BASE_LAYER in name}
    beside = (name for name in live_names if owners and _BASE_LAYER not in name)
    return frozenset(n for n in beside if any(m in owners for m in accumulate(n.split("."), lambda a, b: f"{a}.{b}")))


def _is_of_adapter(name: str, adapter: str) -> bool:
    return any(part == adapter and _is_container(before) for before, part in pairwise(name.split(".")))


def _is_container(part: str) -> bool:
    return part.startswith("lora_") or part in (_SAVED, "trainable_tokens_delta")


def _name_in_file(name: str, adapter: str) -> str:
    """Return the name of an adapter's tensor in PEFT's files.

    >>> _name_in_file("base_model.model.q_proj.lora_A.default.weight", "default")
    'base_model.model.q_proj.lora_A.weight'
    >>> _name_in_file("base_model.model.head.modules_to_save.default.dense.weight", "default")
    'base_model.model.head.dense.weight'
    """
    before, saved, after = f".{name}".partition(f".{_SAVED}.{adapter}.")
    if saved:
        return f"{before[1:]}.{after}" if before else after
    name = name.removesuffix(".weight") if name.endswith(f".lora_magnitude_vector.{adapter}.weight") else name
    if name.endswith(f".{adapter}"):
        return name.removesuffix(f".{adapter}")
    owner, _, last = name.rpartition(".")
    return f"{owner.removesuffix(f'.{adapter}')}.{last}"


def live_names_in_file(live_names: Collection[str]) -> dict[str, str]:
    """Return the name in the model by name in PEFT's files of the tensors of an adapter; biases have their own names.

    Of several adapters it is the one that PEFT loads a file into by default.

    >>> live_names_in_file(["base_model.model.q.lora_A.default.weight", "base_model.model.q.base_layer.bias"])
    {'base_model.model.q.lora_A.weight': 'base_model.model.q.lora_A.default.weight'}
    """
    adapters = {part for name in live_names for before, part in pairwise(name.split(".")) if _is_container(before)}
    adapter = "default" if "default" in adapters else next(iter(adapters)) if len(adapters) == 1 else None
    return {_name_in_file(n, adapter): n for n in live_names if _is_of_adapter(n, adapter)} if adapter else {}


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a wrapped model, as the document "peft" describes it.

    Attributes:
        name: of the adapter; PEFT's default is "default".
        prefix: of the wrapped model's names in the checkpoint; empty, or with a trailing dot.
        root: the prefix to add in PEFT's files; empty for a PeftModel, whose names have it already.
        config: the text of ``adapter_config.json``.
    """

    name: str
    prefix: str
    root: str
    config: str

    def names(self, stored: Collection[str]) -> dict[str, str]:
        """Return the stored name by name in PEFT's file of all tensors of ``PeftModel.save_pretrained``, sorted.

        Raises:
            FormatError: for a kind of adapter whose file layout is not implemented.
        """
        settings = parse_json(self.config.encode(), f"the configuration of adapter {self.name!r}")
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        if kind != "LORA":
            raise FormatError(
                f"adapter {self.name!r} is of kind {shown(kind)}; only LORA is exported in PEFT's layout. Load the "
                "checkpoint into the model and call save_pretrained of PEFT."
            )
        local = {name.removeprefix(self.prefix): name for name in stored if name.startswith(self.prefix)}
        names = {_name_in_file(name, self.name): name for name in local if _is_of_adapter(name, self.name)}
        if settings.get("bias") == "all":  # the base model's, trained in place
            biases = (name for name in local if name.endswith(".bias"))
            names |= {name: name for name in biases if not any(map(_is_container, name.split(".")))}
        elif settings.get("bias") == "lora_only":
            names |= {name: name for name in local if name.endswith(".base_layer.bias")}
        names |= {name: name for name in _embeddings(local, settings)}
        return {self.root + name: local[names[name]] for name in sorted(names)}


def _embeddings(names: Collection[str], settings: Mapping[str, Any]) -> Iterable[str]:
    """Return the weights of adapted embeddings: PEFT saves them with the adapter, since they may have been resized."""
    wrapped = {name: name.partition(_BASE_LAYER)[0] for name in names if _BASE_LAYER in name}
    wrapped = {name: owner for name, owner in wrapped.items() if owner.rpartition(".")[2] in _EMBEDDINGS}
    targets = settings.get("target_modules")
    if settings.get("trainable_token_indices") is not None or not wrapped:
        return []
    if not isinstance(targets, str):
        return wrapped if isinstance(targets, list) and not set(_EMBEDDINGS).isdisjoint(map(str, targets)) else []
    try:
        is_target = any(re.fullmatch(targets, owner.removeprefix(ROOT)) for owner in wrapped.values())
    except re.error as error:
        raise FormatError(f"target_modules {shown(targets)} is not a regular expression: {error}") from None
    return wrapped if is_target else []


def adapters_to_json(adapters: Iterable[Adapter]) -> dict[str, Any]:
    """Return the document "peft" of a checkpoint."""
    return {"adapters": [asdict(adapter) for adapter in adapters]}


def adapters_from_json(document: Mapping[str, Any]) -> list[Adapter]:
    """Return the adapters of a document "peft", which has been checked."""
    return [Adapter(one["name"], one["prefix"], one["root"], one["config"]) for one in document["adapters"]]


# ── live modules ──────────────────────────────────────────────────────────────────────────────────────────────────────


def wrapped_models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost models that PEFT wrapped, or put adapters into, each after the prefix of its names."""
    outermost: list[str] = []
    for name, sub in module.named_modules():
        prefix = f"{clean_fqn(name)}." if name else ""
        if not prefix.startswith(tuple(outermost)) and isinstance(getattr(sub, "peft_config", None), dict):
            outermost.append(prefix)
            yield prefix, sub


def adapters_of(module: nn.Module) -> list[Adapter]:
    """Return the adapters of every model in ``module`` that PEFT wrapped, or put adapters into."""
    return [
        Adapter(name, prefix, "" if "base_model" in wrapped._modules else ROOT, _config_text(wrapped, name))
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
    wrapped = [(prefix, list(model.peft_config)) for prefix, model in wrapped_models(module)]
    return frozenset(
        name
        for prefix, adapters in wrapped
        for name in names
        if name.startswith(prefix) and any(_is_of_adapter(name.removeprefix(prefix), one) for one in adapters)
    )


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
