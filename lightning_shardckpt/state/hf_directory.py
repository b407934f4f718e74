"""Names and files of a Hugging Face model directory, from the document "huggingface" of a checkpoint.

The document is written while the model exists, see ``state.hf_document``. Neither transformers nor torch is used here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import Box, find_cover_error
from lightning_shardckpt.format.safetensors_header import OutputTensor
from lightning_shardckpt.format.value_checks import TORCH_NAMES
from lightning_shardckpt.state.documents import CONFIG, CONFIGS

NamedBoxes: TypeAlias = "list[list[Any]]"
"""The tensors that one entry of a state dict becomes: name, start and stop of the box, and shape of each."""

CONFIG_DTYPES = {name: TORCH_NAMES[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")}
"""Names of floating dtypes in a config, by their names in safetensors."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the document "huggingface"."""

    recorded: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """The prefix of its tensors' names in the checkpoint."""
        return str(self.recorded["prefix"])

    def tensors(
        self,
        keys: Mapping[str, str],
        component: Component,
        output_dtype: Callable[[str], str] = str,
        *,
        refuses_adapters: bool = False,
    ) -> Iterator[OutputTensor]:
        """Yield tensors as ``save_pretrained`` writes them: without names that the model ties.

        A tensor that another module tied is written under each name. Tensors of other modules are left out.

        Args:
            keys: of stored tensors, by name.
            component: of the tensors.
            output_dtype: returns the written dtype of a stored one.
            refuses_adapters: raise for tensors of adapters; else they are left out.

        Raises:
            ValueError: for an adapter.
            FormatError: if the document's boxes do not tile a tensor.
        """
        names, adapter = dict[str, list[str]](), self.recorded["adapter"]
        for name, key in keys.items():
            own = name.removeprefix(self.prefix)
            if not name.startswith(self.prefix) or own in self.recorded["ignored"]:
                continue
            if not (adapter and any(part.startswith(adapter) for part in own.split("."))):
                names.setdefault(key, []).append(own)
            elif refuses_adapters:
                raise ValueError(
                    f"the model has an adapter of PEFT, such as {own!r}, which is not merged into its weights: "
                    "merge it before saving (merge_and_unload), or leave it out for the base model alone: "
                    rf"--key_mapping '\.{adapter}=null'"
                )
        for key, own_names in names.items():
            spec = component.tensors[key]
            for name in [name for name in own_names if name not in self.recorded["ties"]] or [max(own_names)]:
                name = name.replace(".base_layer.", ".") if adapter else name
                yield from self._parts(OutputTensor(name, output_dtype(spec.dtype), spec.shape, ("model", key)))

    def _parts(self, tensor: OutputTensor) -> Iterator[OutputTensor]:
        """Yield the tensors of a file for ``from_pretrained`` that a tensor becomes; it may be renamed and split.

        Raises:
            FormatError: if the document's boxes do not tile the tensor.
        """
        unchanged = [[tensor.name, [0] * len(tensor.shape), tensor.shape, tensor.shape]]
        parts: NamedBoxes = self.recorded["names"].get(tensor.name, unchanged)
        boxes = [Box(tuple(start), tuple(stop)) for _, start, stop, _ in parts]
        sizes = [(box.numel, prod(part[-1])) for box, part in zip(boxes, parts, strict=True)]
        if find_cover_error(tensor.shape, boxes) is not None or any(a != b for a, b in sizes):
            raise FormatError(f"huggingface.json: the parts of {tensor.name!r}, {tensor.shape}, do not tile it")
        for (name, _, _, shape), box in zip(parts, boxes, strict=True):
            whole = box == Box.whole(tensor.shape)
            yield OutputTensor(name, tensor.dtype, tuple(shape), tensor.source, None if whole else box)

    def files(self, dtype: str | None, converted: bool) -> dict[str, bytes]:
        """Return the configs beside the weights.

        Args:
            dtype: the dtype of all weights, by its name in safetensors; None if they differ.
            converted: whether weights were converted to it, so that it replaces the config's dtype.
        """
        files = {name: text.encode() for name, text in self.recorded["files"].items() if name in CONFIGS}
        config = json.loads(files[CONFIG])
        if dtype in CONFIG_DTYPES and (converted or not any(key in config for key in _DTYPE_KEYS)):
            _set_dtype(config, CONFIG_DTYPES[dtype])
        files[CONFIG] = (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        return files


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of a config, and of nested configs that have one."""
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    config.update(dict.fromkeys(keys, dtype))
    for inner in config.values():
        if isinstance(inner, dict) and any(key in inner for key in _DTYPE_KEYS):
            _set_dtype(inner, dtype)


def pick_model(document: Mapping[str, Any] | None, names: Iterable[str]) -> Model | None:
    """Return the document's only model that has a tensor among the names; None if the document has no models.

    Raises:
        ValueError: listing the models, if not exactly one has.
    """
    models = [Model(model) for model in document["models"]] if document is not None else []
    known = list(names)
    chosen = [model for model in models if any(name.startswith(model.prefix) for name in known)]
    if models and len(chosen) != 1:
        listed = ", ".join(f"{model.recorded['class']} under {model.prefix!r}" for model in models)
        example = {f"^{re.escape(models[0].prefix)}": None}
        problem = f"leave out all but one by the key_mapping of consolidate, such as {example}"
        raise ValueError(f"the checkpoint has the models {listed}; {problem if chosen else 'all are left out'}")
    return chosen[0] if chosen else None
