"""The JSON documents of a checkpoint: checks of their structure, their entries by name, merged optimizer documents.

Checks cover the structure that readers rely on, not the values. No torch.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.value_checks import check_dtype, check_shape, check_text, parse_json, shown
from lightning_shardckpt.transfer.reader import Checkpoint

FROZEN = "shardckpt_frozen_parameters"
"""Key of the document "frozen" in a single-file checkpoint, a dict of Lightning."""
PEFT = "peft.json"
ROOT = "base_model.model."
"""The prefix of every tensor's name in PEFT's files."""
HUGGING_FACE = "huggingface.json"
CONFIG = "config.json"
CONFIGS = (CONFIG, "generation_config.json")
"""The configuration files of a model of transformers that a checkpoint stores, in JSON."""
TAG = "$"
MAPPINGS = ("map", "odict", "counter", "namespace")
"""Tags whose content is a list of pairs."""

# ── structure ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A schema is a function that checks a value; a list of one schema, for every item of a list; a tuple, for a list of as
# many items; or a dict, for an object without a tag: by the names of its fields, with "*" for all other names, "#" for
# the names 0, 1, 2 …, and None for a schema of the whole object, which is checked last.

_ADAPTER_NAME = re.compile(r"[^./\\\x00]+")
_PARAM_NUMBER = re.compile(r"#(0|[1-9]\d{0,8})")


def _anything(value: Any) -> None:
    pass


def _require(expected: str, is_right: Callable[[Any], bool]) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not is_right(value):
            raise FormatError(f"{shown(value)} is not {expected}")

    return check


def _check_numbers(optimizer: Mapping[str, Any]) -> None:
    of_groups = chain.from_iterable(group["params"] for group in optimizer["groups"].values())
    names = chain(of_groups, (param for param, _, _ in values_of(optimizer))) if optimizer["numbered"] else ()
    for name in names:
        _require("a parameter's number", lambda v: _PARAM_NUMBER.fullmatch(v) is not None)(name)


_OBJECT: dict[Any, Any] = {"*": _anything}
_TEXTS = [check_text]
_OPTIMIZER = {
    "groups": {
        "#": {
            "hyper": _require("an object", lambda v: isinstance(v, dict) and v.get(TAG, "map") == "map"),
            "params": _TEXTS,
        }
    },
    "values": {"*": [{"value": _anything, "params": _TEXTS}]},
    "numbered": _require("true or false", lambda v: type(v) is bool),
    None: _check_numbers,
}
_HUGGING_FACE = {
    "prefix": check_text, "class": check_text, "ties": _TEXTS, "ignored": _TEXTS,
    "adapter": _require("text", lambda v: v is None or check_text(v) == v),
    "names": {"*": [(check_text, check_shape, check_shape, check_shape)]},
    "files": {
        CONFIG: _require("an object", lambda v: isinstance(parse_json(check_text(v).encode(), "the text"), dict)),
        "*": check_text,
    },
}
_ADAPTER = {
    "name": _require("the name of an adapter", lambda v: _ADAPTER_NAME.fullmatch(check_text(v)) is not None),
    "root": _require("a prefix of PEFT", lambda v: v in ("", ROOT)),
    "prefix": check_text, "config": check_text,
}
_SCHEMAS: dict[str, Any] = {
    "trainer": _OBJECT,
    "model": _OBJECT,
    "optimizer": {"#": _OPTIMIZER},
    "frozen": {"*": (check_dtype, check_shape)},
    "versions": {"*": _OBJECT},
    "huggingface": {"models": [_HUGGING_FACE]},
    "peft": {"adapters": [_ADAPTER]},
}


def _check(value: Any, schema: Any, place: str = "") -> None:
    """Check a value, and all that is in it, against a schema; errors name the place, such as ``0/groups``."""
    where = place or "the document"
    if callable(schema):
        try:
            schema(value)
        except (FormatError, TypeError) as error:
            raise FormatError(f"{where}: {error}") from None
    elif isinstance(schema, dict):
        required = schema.keys() - {"*", "#", None}
        if not isinstance(value, dict) or TAG in value or not value.keys() >= required:
            wanted = f" with {', '.join(sorted(required))}" if required else ""
            raise FormatError(f"{where} is not an object{wanted}: {shown(value)}")
        if "#" in schema and value.keys() != {str(number) for number in range(len(value))}:
            raise FormatError(f"{where} has keys {shown(list(value))}, expected 0 to {len(value) - 1}")
        others = schema.get("*", schema.get("#", _anything))
        for name, item in value.items():
            _check(item, schema.get(name, others), f"{place}/{name[:200]}".lstrip("/"))
        _check(value, schema.get(None, _anything), place)
    else:
        count = len(schema) if isinstance(schema, tuple) else None
        if not isinstance(value, list) or count not in (None, len(value)):
            raise FormatError(f"{where} is not a list{f' of {count} items' if count else ''}: {shown(value)}")
        for number, item in enumerate(value):
            _check(item, schema[number if count else 0], f"{place}/{number}")


def check_document(role: str, value: Any) -> None:
    """Raise a FormatError if a document does not have the structure of its role."""
    _check(value, _SCHEMAS.get(role, _anything))


def parse_document(role: str, content: bytes, where: str) -> Any:
    """Parse and check the content of a document; ``where`` names it in errors.

    Raises:
        FormatError: if the document does not have the structure of its role.
    """
    value = parse_json(content, where)
    try:
        check_document(role, value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    return value


def document_of(checkpoint: Checkpoint, role: str, rank: int = 0) -> Any:
    """Return the JSON of a role, merged over groups of ranks that each store a part; None if there is none.

    For "versions" the result is never None, since a module without an entry has version 1.
    """
    known = checkpoint.root.documents
    single = {"trainer": "trainer-state.json", "rank": f"trainer-state-dist-{rank:05d}.json"}
    single |= {"peft": PEFT, "huggingface": HUGGING_FACE}
    names = {single[role]} & known.keys() if role in single else {n for n in known if n.startswith(f"{role}-state-")}
    parsed = [parse_document(role, checkpoint.document(n), f"{checkpoint.path!r}, {n}") for n in sorted(names)]
    if role == "optimizer" and len(parsed) > 1:
        return merge_optimizers(parsed)
    return dict(ChainMap(*parsed)) if parsed or role == "versions" else None


def stored_keys(value: Any) -> Iterator[Any]:
    """Yield the keys of the stored tensors that an encoded value refers to."""
    if isinstance(value, dict) and value.get(TAG) == "stored":
        yield value.get("v")
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_keys(item)


# ── entries of a document ─────────────────────────────────────────────────────────────────────────────────────────────
# Every leaf of a document has a name, as tensors in files have: ``optimizer/0/head.weight/step``,
# ``optimizer/0/param_groups/1/lr``, ``trainer/callbacks/EarlyStopping/wait_count``, ``rank/3/rng/torch``; values of
# modules have their own names. A list or tuple of plain values, such as betas, is one leaf. Nothing is decoded.


def entries_of(role: str, document: Any, rank: int = 0) -> dict[str, Any]:
    """Return the values of a document by name, as tagged JSON, except references to tensors in files.

    >>> entries_of("trainer", {"loops": {"step": 3}, "names": ["a"]})
    {'trainer/loops/step': 3, 'trainer/names': ['a']}
    """
    entries: dict[str, list[Any]] = {}
    parts = _parts(role, document, rank) if document is not None else ()
    for name, value in chain.from_iterable(_leaves(value, path) for path, value in parts):
        entries.setdefault(name, []).append(value)
    # {"a/b": …} and {"a": {"b": …}} have the same name
    return {name: values[0] if len(values) == 1 else values for name, values in entries.items()}


def _parts(role: str, document: Any, rank: int) -> Iterator[tuple[str, Any]]:
    if role == "model":
        yield from document.items()
    elif role != "optimizer":
        yield role if role == "trainer" else f"rank/{rank}", document
    else:
        for number, optimizer in document.items():
            place = f"optimizer/{number}"
            yield from ((f"{place}/{param}/{name}", value) for param, name, value in values_of(optimizer))
            for i, group in optimizer["groups"].items():
                yield f"{place}/param_groups/{i}", group["hyper"]
                yield f"{place}/param_groups/{i}/params", group["params"]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    tag, content = (value.get(TAG), value.get("v")) if isinstance(value, dict) else (None, value)
    inner: list[tuple[Any, Any]] = []
    if isinstance(content, list) and tag in (None, "tuple", "deque"):
        inner = list(enumerate(content)) if any(isinstance(item, list | dict) for item in content) else []
    elif isinstance(content, list) and tag in MAPPINGS:
        inner = [tuple(pair) for pair in content if isinstance(pair, list) and len(pair) == 2]
    elif isinstance(value, dict) and tag is None:
        inner = list(value.items())
    for key, item in inner:  # a key may be tagged, too
        yield from _leaves(item, f"{path}/{key.get('v') if isinstance(key, dict) else key}")
    if not inner and tag != "stored":
        yield path, value


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def values_of(optimizer: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield parameter, name and value of the state of an optimizer that is in its document."""
    for name, shared in optimizer["values"].items():
        yield from ((param, name, entry["value"]) for entry in shared for param in entry["params"])


def merge_optimizers(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the optimizer documents of pipeline stages into the document of a single process, see FORMAT.md.

    Hyper-parameters come from the first document that has them. Parameters are in the order of the documents, each
    once: several stages may have parameters of containers, and tied ones.
    """
    merged: dict[str, Any] = {}
    seen: set[tuple[str, ...]] = set()
    for number, part in chain.from_iterable(document.items() for document in documents):
        one = merged.setdefault(number, {"groups": {}, "values": {}, "numbered": False})
        one["numbered"] |= part["numbered"]
        for i, group in part["groups"].items():
            params = one["groups"].setdefault(i, {"hyper": group["hyper"], "params": []})["params"]
            params += [param for param in group["params"] if (number, param) not in seen]
            seen.update((number, param) for param in params)
        for name, entry in ((name, entry) for name, shared in part["values"].items() for entry in shared):
            params = [param for param in entry["params"] if (number, name, param) not in seen]
            one["values"].setdefault(name, []).append({**entry, "params": params})
            seen.update((number, name, param) for param in params)
    return merged


class StoredOptimizer:
    """One optimizer of a checkpoint: its groups, its values, and the names of its tensors.

    Made of its part of the document "optimizer", and of the tensors of all optimizers.

    Attributes:
        groups: the names of the parameters in each param group, with ``hyper``, its settings.
        values: state that is not a tensor in files, by parameter and name.
        specs: the stored tensors of all optimizers, of which ``tensors`` has the keys, by parameter and name.
    """

    def __init__(
        self, number: int, document: dict[str, Any], component: Component, decode: Callable[[Any], Any]
    ) -> None:
        groups = [document["groups"][str(i)] for i in range(len(document["groups"]))]
        self.groups: list[list[str]] = [group["params"] for group in groups]
        self.hyper: list[dict[str, Any]] = [decode(group["hyper"]) for group in groups]
        self.numbered: bool = document["numbered"]
        self.values: dict[str, dict[str, Any]] = {}
        for param, name, value in values_of(document):
            self.values.setdefault(param, {})[name] = decode(value)  # for each: they share no mutable memory
        self.specs = component.tensors
        self.tensors: dict[str, dict[str, str]] = {}
        prefix = f"{number}/"
        for key in self.specs:
            if key.startswith(prefix):
                param, _, name = key.removeprefix(prefix).rpartition("/")
                self.tensors.setdefault(param, {})[name] = key

    def name(self, groups: Sequence[Sequence[str]]) -> str | None:
        """Name the parameters of state that was saved by number; the keys of tensors stay.

        Returns the reason if ``groups``, the names in each param group of the whole model, cannot be those of the save.
        """
        sizes, live = ([*map(len, of)] for of in (self.groups, groups))
        if sizes != live:
            return (
                f"numbers its parameters in the checkpoint, in param groups of {sizes} parameters; the model has "
                f"{live} in the order of its parameters"
            )
        names = dict(zip(chain(*self.groups), chain(*groups), strict=True))
        self.groups, self.numbered = [[*group] for group in groups], False
        self.values = {names.get(param, param): values for param, values in self.values.items()}
        self.tensors = {names.get(param, param): keys for param, keys in self.tensors.items()}
        return None

    def state_dict(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict like ``Optimizer.state_dict``, with parameters by name or number, as they were saved.

        ``tensors``, by stored key, may be placeholders.
        """
        as_saved = {param: int(param[1:]) if self.numbered else param for param in chain(*self.groups)}
        state = dict[str | int, Any]()
        for param, saved in as_saved.items():
            entries = {name: tensors[key] for name, key in self.tensors.get(param, {}).items()}
            if entries := {**self.values.get(param, {}), **entries}:
                state[saved] = entries
        groups = [{**h, "params": [as_saved[p] for p in g]} for h, g in zip(self.hyper, self.groups, strict=True)]
        if not groups and not state:
            return {}  # as in Lightning, for a LightningModule without optimizers
        return {"state": state, "param_groups": groups}
