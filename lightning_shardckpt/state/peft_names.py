"""Names of tensors in a model that PEFT wrapped. Neither torch nor PEFT is imported.

PEFT puts a model below ``base_model.model``, a module that gets an adapter below ``base_layer``, and a module that is
trained as a whole below ``original_module``, beside a copy for each adapter in ``modules_to_save``. PEFT's files omit
the name of the adapter: ``….lora_A.default.weight`` becomes ``….lora_A.weight``. Source: PEFT 0.21,
``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import parse_json, shown

ROOT = "base_model.model."
"""The prefix of every tensor's name in PEFT's files."""

_EMBEDDINGS = ("embed_tokens", "lm_head")  # EMBEDDING_LAYER_NAMES
_TUNER = "lora_"
_TOKENS = "trainable_tokens_delta"
_SAVED = "modules_to_save"
_BASE_LAYER = "base_layer"


def added_names(live_names: Collection[str]) -> frozenset[str]:
    """Return the names that PEFT's layers add to the names of the wrapped layers.

    >>> sorted(added_names(["q.base_layer.weight", "q.lora_A.default.weight", "norm.weight"]))
    ['q.lora_A.default.weight']
    """
    owners = {name.partition(f".{_BASE_LAYER}.")[0] for name in live_names if f".{_BASE_LAYER}." in name}
    beside = (name for name in live_names if f".{_BASE_LAYER}." not in name)
    return frozenset(name for name in beside if any(module in owners for module in _above(name)))


def _above(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def is_of_adapter(name: str, adapter: str) -> bool:
    """Return whether a tensor belongs to an adapter.

    >>> is_of_adapter("q_proj.lora_A.default.weight", "default"), is_of_adapter("q_proj.base_layer.weight", "default")
    (True, False)
    """
    return any(part == adapter and _is_container(before) for before, part in pairwise(name.split(".")))


def _is_container(part: str) -> bool:
    return part.startswith(_TUNER) or part in (_SAVED, _TOKENS)


def name_in_file(name: str, adapter: str) -> str:
    """Return the name of an adapter's tensor in PEFT's files.

    >>> name_in_file("base_model.model.q_proj.lora_A.default.weight", "default")
    'base_model.model.q_proj.lora_A.weight'
    >>> name_in_file("base_model.model.head.modules_to_save.default.dense.weight", "default")
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
    return {name_in_file(n, adapter): n for n in live_names if is_of_adapter(n, adapter)} if adapter else {}


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
        names = {name_in_file(name, self.name): name for name in local if is_of_adapter(name, self.name)}
        names |= {name: name for name in _biases(local, settings.get("bias"))}
        names |= {name: name for name in _embeddings(local, settings)}
        return {self.root + name: local[names[name]] for name in sorted(names)}


def _biases(names: Collection[str], which: Any) -> Iterable[str]:
    """Return the biases of the base model that ``bias="all"`` or ``"lora_only"`` trains in place."""
    if which == "all":
        biases = (name for name in names if name.endswith(".bias"))
        return [name for name in biases if not any(map(_is_container, name.split(".")))]
    if isinstance(which, str) and which.endswith("_only"):
        return [name for name in names if name.endswith(".base_layer.bias")]
    return []


def _embeddings(names: Collection[str], settings: Mapping[str, Any]) -> Iterable[str]:
    """Return the weights of adapted embeddings: PEFT saves them with the adapter, since they may have been resized."""
    if settings.get("trainable_token_indices") is not None:
        return []
    targets, owners = settings.get("target_modules"), {}
    for name in names:
        owner, wrapped, _ = name.partition(".base_layer.")
        if wrapped and owner.rpartition(".")[2] in _EMBEDDINGS:
            owners[owner] = owner.removeprefix(ROOT)
    if isinstance(targets, str):
        targeted = any(_matches(targets, inside) for inside in owners.values())
    else:
        targeted = isinstance(targets, list) and not set(_EMBEDDINGS).isdisjoint(map(str, targets))
    return [n for n in names if targeted and n.partition(".base_layer.")[0] in owners and ".base_layer." in n]


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise FormatError(f"target_modules {shown(pattern)} is not a regular expression: {error}") from None


def adapters_to_json(adapters: Iterable[Adapter]) -> dict[str, Any]:
    """Return the document "peft" of a checkpoint."""
    return {"adapters": [{"name": a.name, "prefix": a.prefix, "root": a.root, "config": a.config} for a in adapters]}


def adapters_from_json(value: Any) -> list[Adapter]:
    """Return the adapters of a document "peft".

    Raises:
        FormatError: if the document is malformed.
    """
    listed = value.get("adapters") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise FormatError(f"the document is not an object with a list of adapters: {shown(value)}")
    adapters = []
    for number, one in enumerate(listed):
        values = [one.get(key) for key in ("name", "prefix", "root", "config")] if isinstance(one, dict) else []
        texts = [text for text in values if isinstance(text, str)]
        if len(texts) != 4:
            raise FormatError(f"adapters/{number} is not an object with name, prefix, root and config: {shown(one)}")
        adapter = Adapter(*texts)
        if not re.fullmatch(r"[^./\\\x00]+", adapter.name) or adapter.root not in ("", ROOT):
            raise FormatError(f"adapters/{number} has a name or root that no adapter can have: {shown(one)}")
        adapters.append(adapter)
    return adapters
