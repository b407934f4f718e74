"""Names and files of a Hugging Face model directory, from a checkpoint's document.

The document was written when the model was at hand, see ``state.hf_document``; so no transformers and no torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.safetensors_files import OutputTensor
from lightning_shardckpt.state.documents import CONFIG, CONFIGS
from lightning_shardckpt.state.dtype_names import TORCH_NAMES

# ── patterns of names ─────────────────────────────────────────────────────────────────────────────────────────────────
# Let one rule stand for the names of all layers, which differ in numbers alone. No torch.


NamedBoxes: TypeAlias = "list[list[Any]]"
"""Of one entry of a state dict: name, start and stop of the box, shape, of each tensor that it becomes."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def pattern_of(name: str) -> str:
    """The name with ``#`` for each number between dots.

    >>> pattern_of("layers.7.conv1.0.w")
    'layers.#.conv1.#.w'
    """
    return _NUMBER.sub("#", name)


def general(name: str, found: NamedBoxes) -> NamedBoxes:
    """The parts of a name with ``#`` for the numbers that the name has, in its order."""
    numbers = _NUMBER.findall(name)
    alike: NamedBoxes = []
    for to, *box in found:
        left = list(numbers)

        def replaced(match: re.Match[str], left: list[str] = left) -> str:
            return "#" if left and left.pop(0) == match[0] else match[0]

        text = _NUMBER.sub(replaced, to)
        alike.append([text, *box])
    return alike


def apply_pattern(pattern: str, parts: NamedBoxes, name: str) -> NamedBoxes | None:
    """The parts of ``name``, if the pattern, a name with ``#`` for numbers, is one of it.

    >>> apply_pattern("layers.#.w", [["layers.#.0.w", [0], [2], [2]]], "layers.7.w")
    [['layers.7.0.w', [0], [2], [2]]]
    """
    if "#" not in pattern:
        return parts if pattern == name else None
    numbers = _NUMBER.findall(name)
    if pattern_of(name) != pattern:
        return None
    return [[_fill(to, numbers), *box] for to, *box in parts]


def _fill(text: str, numbers: list[str]) -> str:
    pieces = text.split("#")
    return "".join(a + b for a, b in zip(pieces, [*numbers, *[""] * len(pieces)], strict=False))


CONFIG_DTYPES = {name: TORCH_NAMES[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")}
"""Floating dtypes by their names in safetensors, as a config has them."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ADAPTED = ".base_layer."


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the document."""

    recorded: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """The text before the names of its tensors."""
        return str(self.recorded["prefix"])

    def own(self, name: str) -> str | None:
        """The name of a tensor within the model; None if it is none of it, or none of its weights."""
        if not name.startswith(self.prefix):
            return None
        own = name.removeprefix(self.prefix)
        return None if own in self.recorded["ignored"] else own

    def check_adapter(self, names: Sequence[str]) -> None:
        """Make sure that nothing of an adapter is among the names.

        Raises:
            ValueError: saying what to do with it.
        """
        mark = self.recorded["adapter"]
        adapters = [name for name in names if mark and any(part.startswith(mark) for part in name.split("."))]
        if adapters:
            raise ValueError(
                f"the model has an adapter of PEFT, such as {adapters[0]!r}, which is not merged into its weights: "
                f"merge it before saving (merge_and_unload), or pass --exclude '*.{mark}*' for the base model alone"
            )

    def kept(self, names: Sequence[str]) -> list[str]:
        """Return the names under which tensors are written: as in ``save_pretrained``, without those that it ties
        again.

        It ties no others; a tensor that the module around it tied is written once for each.
        """
        return [name for name in names if name not in self.recorded["ties"]] or [max(names)]

    def tensors(self, component: Component) -> Iterator[OutputTensor]:
        """Yield all tensors of the model but adapters, as ``from_pretrained`` takes them, in their stored order."""
        names: dict[str, list[str]] = {key: [key] for key in component.tensors}
        for alias, key in component.aliases.items():
            names[key].append(alias)
        mark = self.recorded["adapter"]
        for key, spec in component.tensors.items():
            own = [found for name in names[key] if (found := self.own(name)) is not None]
            own = [name for name in own if not (mark and any(part.startswith(mark) for part in name.split(".")))]
            for name in self.kept(own) if own else ():
                yield from self.parts(OutputTensor(name, spec.dtype, spec.shape, ("model", key)))

    def parts(self, tensor: OutputTensor) -> Iterator[OutputTensor]:
        """Yield what a tensor becomes in a file for ``from_pretrained``, which may name and split it otherwise.

        Raises:
            FormatError: if the document's boxes do not tile the tensor.
        """
        own = tensor.name.replace(_ADAPTED, ".") if self.recorded["adapter"] else tensor.name
        names, rule = self.recorded["names"], own if own in self.recorded["names"] else pattern_of(own)
        found = apply_pattern(rule, names[rule], own) if rule in names else None
        if found is None:
            found = [[own, [0] * len(tensor.shape), list(tensor.shape), list(tensor.shape)]]
        total = 0
        for name, start, stop, shape in found:
            part = OutputTensor(name, tensor.dtype, tuple(shape), tensor.source, Box(tuple(start), tuple(stop)))
            fits = len(start) == len(tensor.shape) and all(b <= n for b, n in zip(stop, tensor.shape, strict=True))
            if not fits or part.box is None or part.box.numel != prod(shape):
                raise FormatError(f"huggingface.json: {name!r} is no part of {tensor.name!r}, {tensor.shape}")
            if part.box == Box.whole(tensor.shape):
                part = replace(part, box=None)
            total += part.nbytes
            yield part
        if total != tensor.nbytes:
            problem = f"what {tensor.name!r} is to become has {total} of {tensor.nbytes} bytes"
            raise FormatError(f"huggingface.json: {problem}")

    def files(self, dtype: str | None, converted: bool) -> dict[str, bytes]:
        """The configs beside the weights; they tell ``dtype``, by its name in safetensors, if all is of it now."""
        found = {name: text.encode() for name, text in self.recorded["files"].items() if name in CONFIGS}
        config = json.loads(found[CONFIG])
        if dtype in CONFIG_DTYPES and (converted or not any(key in config for key in _DTYPE_KEYS)):
            _set_dtype(config, CONFIG_DTYPES[dtype])
        found[CONFIG] = (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        return found


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Have the config tell a dtype, and configs within it that tell one."""
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    config.update(dict.fromkeys(keys, dtype))
    for inner in config.values():
        if isinstance(inner, dict) and any(key in inner for key in _DTYPE_KEYS):
            _set_dtype(inner, dtype)


def pick(document: Mapping[str, Any] | None, prefix: str) -> Model | None:
    """The model of a checkpoint's document; the one of a prefix, if one is given. None if there is none.

    Raises:
        ValueError: listing the models, if it cannot be told which one is meant.
    """
    models = document["models"] if document is not None else []
    chosen = [model for model in models if not prefix or model["prefix"] == prefix]
    if document is None or not models:
        return None
    if len(chosen) != 1:
        listed = ", ".join(f"{model['class']} under {model['prefix']!r}" for model in models)
        problem = f"none of them is under {prefix!r}" if prefix else "say which one, by --strip_prefix"
        raise ValueError(f"the checkpoint has the models {listed}; {problem}")
    return Model(chosen[0])
