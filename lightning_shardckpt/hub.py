"""Which tensors do the files of a Hugging Face model have, of those that a checkpoint stores? Pure, without torch.

The checkpoint's document ``huggingface.json`` has what the model knew when it was saved: see FORMAT.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from lightning_shardckpt.box import Box
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.index import Component, TensorSpec
from lightning_shardckpt.mirror import Exported

Parts: TypeAlias = "list[list[Any]]"
"""Of one entry of a state dict: name, start and stop of the box, shape, of each tensor that it becomes."""

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
"""The number of a layer in a name."""


def one_model(document: Mapping[str, Any] | None, prefix: str | None = None) -> dict[str, Any]:
    """The only model of a document, or the one with that prefix.

    Raises:
        StateError: if there is none, or several, naming them.
    """
    models: list[dict[str, Any]] = document["models"] if document is not None else []
    found = [model for model in models if prefix is None or model["prefix"] == prefix]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{model['class']} under {model['prefix']!r}" for model in models) or "none"
    raise StateError(f"one model of transformers in the LightningModule is what Hugging Face can load; found {listed}")


def exported(component: Component, model: Mapping[str, Any]) -> list[Exported]:
    """The tensors of the files, in the order in which they are stored.

    Of a tied tensor, one name is left: not one that the model says can be left out.
    """
    prefix, left_out = model["prefix"], {*model["ignored"]}
    aliases: dict[str, list[str]] = {}
    for alias, of in component.aliases.items():
        aliases.setdefault(of, []).append(alias)
    found: list[Exported] = []
    for key, spec in component.tensors.items():
        names = [name.removeprefix(prefix) for name in (key, *aliases.get(key, ())) if name.startswith(prefix)]
        names = [name for name in names if name not in left_out]
        names.sort(key=lambda name: name in model["ties"])
        if names:
            found += _parts(names[0], key, spec, model["names"])
    return found


def _parts(name: str, key: str, spec: TensorSpec, patterns: Mapping[str, Parts]) -> Iterator[Exported]:
    for pattern in (name, NUMBER.sub("#", name)):
        parts = applied(pattern, patterns[pattern], name) if pattern in patterns else None
        if parts is not None:
            for to, start, stop, shape in parts:
                yield Exported(to, tuple(shape), spec.dtype, key, Box(tuple(start), tuple(stop)))
            return
    yield Exported(name, spec.shape, spec.dtype, key, Box.whole(spec.shape))


def applied(pattern: str, parts: Parts, name: str) -> Parts | None:
    """The parts of ``name``, if the pattern, a name with ``#`` for numbers, is one of it.

    >>> applied("layers.#.w", [["layers.#.0.w", [0], [2], [2]]], "layers.7.w")
    [['layers.7.0.w', [0], [2], [2]]]
    """
    if "#" not in pattern:
        return parts if pattern == name else None
    numbers = NUMBER.findall(name)
    if NUMBER.sub("#", name) != pattern:
        return None
    return [[_filled(to, numbers), *box] for to, *box in parts]


def _filled(text: str, numbers: list[str]) -> str:
    pieces = text.split("#")
    return "".join(a + b for a, b in zip(pieces, [*numbers, *[""] * len(pieces)], strict=False))
