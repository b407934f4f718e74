"""Flatten the hyper-parameters of a checkpoint, the model's and the optimizers', into text that can be compared.

They are JSON with tags, which ``state/json_tree.py`` writes; tags are only shown, nothing is built from them. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.transfer.reader import Checkpoint

_TRAINER, _OPTIMIZER = "trainer-state.json", "optimizer-state-dist-"
_SAVED = ("hyper_parameters", "datamodule_hyper_parameters")
_PAIRS = ("map", "odict", "counter", "namespace")
_PLAIN = ("tuple", "set", "frozenset", "int", "float", "path")
_SHOWN = 200


def hyper_parameters(checkpoint: Checkpoint) -> dict[str, str]:
    """Return values as text, by paths such as ``hyper_parameters/lr`` and ``optimizer 0/group 0/lr``.

    Raises:
        CorruptionError: if a document is not what was saved.
        FormatError: if it is no JSON that this package writes.
    """
    found: dict[str, set[str]] = {}
    documents = checkpoint.root.documents
    for name in sorted(documents):
        if name == _TRAINER:
            pairs = _of_trainer(_parsed(checkpoint, name))
        elif name.startswith(_OPTIMIZER):
            pairs = _of_optimizers(_parsed(checkpoint, name))
        else:
            continue
        for path, text in pairs:
            found.setdefault(path, set()).add(text)
    return {path: " or ".join(sorted(texts)) for path, texts in found.items()}  # pipeline stages may differ


def _parsed(checkpoint: Checkpoint, name: str) -> Any:
    return parse_json(checkpoint.document(name), f"checkpoint {checkpoint.path!r}, file {name}")


def _of_trainer(value: Any) -> Iterator[tuple[str, str]]:
    for key in _SAVED if isinstance(value, dict) else ():
        if key in value:
            yield from flat(value[key], key)


def _of_optimizers(value: Any) -> Iterator[tuple[str, str]]:
    for number, optimizer in _items(value):
        for group, content in _items(dict(_items(optimizer)).get("groups")):
            yield from flat(dict(_items(content)).get("hyper", {}), f"optimizer {number}/group {group}")


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every value below ``value`` as text, with its path.

    >>> list(flat({"lr": 0.1, "betas": {"$": "tuple", "v": [0.9, 0.99]}}, "x"))
    [('x/lr', '0.1'), ('x/betas', '[0.9,0.99]')]
    """
    tag = value.get("$") if isinstance(value, dict) else None
    if isinstance(value, dict) and tag is None:
        for key, item in value.items():
            yield from flat(item, f"{path}/{key}")
    elif isinstance(value, dict) and tag in _PAIRS and isinstance(value.get("v"), list):
        for pair in value["v"]:
            key, item = pair if isinstance(pair, list) and len(pair) == 2 else ("?", pair)
            yield from flat(item, f"{path}/{key if isinstance(key, str) else _text(key)}")
    else:
        yield path, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, dict) and "v" in value and value.get("$") in _PLAIN:
        value = value["v"]
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
