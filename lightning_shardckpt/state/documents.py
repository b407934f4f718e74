"""The JSON documents of a checkpoint: their entries by name, checks of their structure, merged optimizer documents.

Checks cover the structure that readers rely on, not the values. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import check_dtype, check_shape, check_text, shown
from lightning_shardckpt.state.peft_names import adapters_from_json
from lightning_shardckpt.transfer.reader import Checkpoint

# ── entries of a document ─────────────────────────────────────────────────────────────────────────────────────────────
# Every leaf of a document has a name, as tensors in files have: ``optimizer/0/head.weight/step``,
# ``optimizer/0/param_groups/1/lr``, ``trainer/callbacks/EarlyStopping/wait_count``, ``rank/3/rng/torch``; values of
# modules have their own names. A list or tuple of plain values, such as betas, is one leaf. Nothing is decoded.


_TAG = "$"
_MAPPINGS = ("map", "odict", "counter", "namespace")
_SEQUENCES = ("tuple", "deque")
_PLAIN = ("frozen", "versions", "peft", "huggingface")
_ENCODED = ("trainer", "rank", "model", "optimizer", "versions")


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """The type of a stored value ("tensor", "int", "str", …), and the dtype and shape of a tensor or array."""

    kind: str
    dtype: str | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A value of a document: tagged JSON, see ``json_tree.decode``, or with ``is_plain`` JSON without tags."""

    info: ValueInfo
    value: Any
    is_plain: bool = False


def entries_of(role: str, document: Any, rank: int = 0) -> dict[str, DocumentEntry]:
    """Return the entries of a document by name, except references to tensors in files.

    >>> entries = entries_of("trainer", {"loops": {"step": 3}, "names": ["a"]})
    >>> {name: entry.info.kind for name, entry in entries.items()}
    {'trainer/loops/step': 'int', 'trainer/names': 'list'}
    """
    entries: dict[str, DocumentEntry] = {}
    for name, entry in _iterate_entries(role, document, rank):
        key, number = name, 1
        while key in entries:  # {"a/b": …} and {"a": {"b": …}}
            number += 1
            key = f"{name}#{number}"
        entries[key] = entry
    return entries


def _iterate_entries(role: str, document: Any, rank: int) -> Iterator[tuple[str, DocumentEntry]]:
    if document is None:
        return
    if role in _PLAIN:
        yield role, DocumentEntry(ValueInfo("dict"), document, is_plain=True)
    elif role == "model":
        for name, value in document.items():
            yield name, DocumentEntry(_info(value), value)
    elif role == "optimizer":
        for number, optimizer in document.items():
            yield from _optimizer_entries(f"optimizer/{number}", optimizer)
    else:
        yield from _leaves(document, role if role == "trainer" else f"rank/{rank}")


def _optimizer_entries(place: str, optimizer: Mapping[str, Any]) -> Iterator[tuple[str, DocumentEntry]]:
    for name, shared in optimizer["values"].items():
        for item in shared:
            for param in item["params"]:
                yield f"{place}/{param}/{name}", DocumentEntry(_info(item["value"]), item["value"])
    for number, group in optimizer["groups"].items():
        yield from _leaves(group["hyper"], f"{place}/param_groups/{number}")
        yield f"{place}/param_groups/{number}/params", DocumentEntry(ValueInfo("list"), group["params"], is_plain=True)
    for key, value in optimizer.get("own", {}).items():
        yield from _leaves(value, f"{place}/own/{key}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, DocumentEntry]]:
    tag = value.get(_TAG) if isinstance(value, dict) else None
    if tag == "stored":
        return
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, list) or tag in _SEQUENCES:
        items = value if isinstance(value, list) else _items_of(value.get("v"))
        inner = list(enumerate(items)) if any(isinstance(item, list | dict) for item in items) else []
    elif tag in _MAPPINGS:
        inner = [tuple(pair) for pair in _items_of(value.get("v")) if isinstance(pair, list) and len(pair) == 2]
    elif isinstance(value, dict) and tag is None:
        inner = list(value.items())
    for key, item in inner:
        text = str(key.get("v")) if isinstance(key, dict) else str(key)  # a key may be tagged, too
        yield from _leaves(item, f"{path}/{text}")
    if not inner:
        yield path, DocumentEntry(_info(value), value)


def _items_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _info(value: Any) -> ValueInfo:
    tag = value.get(_TAG) if isinstance(value, dict) else None
    if tag is None:
        return ValueInfo("none" if value is None else type(value).__name__)
    if tag in ("tensor", "numpy"):
        shape = tuple(n for n in _items_of(value.get("shape")) if type(n) is int)
        return ValueInfo("tensor" if tag == "tensor" else "ndarray", str(value.get("dtype")), shape)
    return ValueInfo(str(tag))


def stored_keys(value: Any) -> Iterator[Any]:
    """Yield the keys of the stored tensors that an encoded value refers to."""
    if isinstance(value, dict) and value.get(_TAG) == "stored":
        yield value.get("v")
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_keys(item)


FROZEN = "shardckpt_frozen_parameters"
"""Key of the document "frozen" in a single-file checkpoint, a dict of Lightning."""
PEFT = "peft.json"
HUGGING_FACE = "huggingface.json"
CONFIG = "config.json"
CONFIGS = (CONFIG, "generation_config.json")
"""The configuration files of a model of transformers that a checkpoint stores, in JSON."""

_PARAM_NUMBER = re.compile(r"#(0|[1-9]\d{0,8})")


def parse_document(role: str, content: bytes, where: str) -> Any:
    """Parse and check a document.

    Args:
        role: "trainer", "rank", "model", "optimizer", "frozen", "versions", "peft" or "huggingface".
        content: of the file.
        where: names the document in errors.

    Raises:
        FormatError: if the document does not have the structure of its role.
    """
    value = parse_json(content, where)
    try:
        if role == "optimizer":
            _check_optimizers(value)
        elif role == "frozen":
            check_frozen(value)
        elif role == "versions":
            for name, version in _check_object(value, "").items():
                _check_object(version, shown(name))
        elif role == "peft":
            adapters_from_json(value)
        elif role == "huggingface":
            _check_hugging_face(value)
        elif role != "rank":
            _check_object(value, "")
        if role == "model":
            _refuse_compound(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    return value


def check_readable(role: str, content: bytes, where: str) -> None:
    """Decode a document as a load does, before it becomes part of a checkpoint.

    Pickles in it are not unpickled. Imports torch.

    Raises:
        StateError: if a load would refuse the document, with the reason.
    """
    from lightning_shardckpt.state.json_tree import decode

    try:
        value = parse_document(role, content, where)
        decode(value if role in _ENCODED else {}, lambda key: key)
    except FormatError as error:
        raise StateError(f"nothing is saved, since a load would refuse it: {error}") from None


def document_of(checkpoint: Checkpoint, role: str, rank: int = 0) -> Any:
    """Return the JSON of a role, merged over groups of ranks that each store a part; None if there is none.

    For "versions" the result is never None, since a module without an entry has version 1.
    """
    known = checkpoint.root.documents
    single = {"trainer": "trainer-state.json", "rank": f"trainer-state-dist-{rank:05d}.json"}
    single |= {"peft": PEFT, "huggingface": HUGGING_FACE}
    if role in single:
        name = single[role]
        names = [name] if name in known else []
    else:
        names = sorted(n for n in known if n.startswith(f"{role}-state-dist-"))
    parsed = [parse_document(role, checkpoint.document(name), f"{checkpoint.path!r}, {name}") for name in names]
    if role == "optimizer" and len(parsed) > 1:
        return merge_optimizers(parsed)
    parsed += [{}] if role == "versions" else []
    return {name: value for one in reversed(parsed) for name, value in one.items()} if parsed else None


def check_frozen(value: Any) -> None:
    """Check that the document "frozen" holds a dtype and a shape by name.

    Raises:
        FormatError: if it does not.
    """
    for name, spec in _check_object(value, "").items():
        dtype, shape = spec if isinstance(spec, list) and len(spec) == 2 else (None, None)
        if not isinstance(dtype, str) or not isinstance(shape, list):
            raise FormatError(f"{shown(name)} is not described by a dtype and a shape: {shown(spec)}")
        check_dtype(dtype)
        check_shape(shape)


def _check_object(value: Any, place: str, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict) or "$" in value or not value.keys() >= set(keys):
        wanted = f" with {', '.join(keys)}" if keys else ""
        raise FormatError(f"{place or 'the document'} is not an object{wanted}: {shown(value)}")
    return value


def _refuse_compound(values: Mapping[str, Any]) -> None:
    if name := next((name for name in values if name.endswith("#")), None):  # see FORMAT.md
        raise FormatError(f"{shown(name)} describes a tensor made of others, which this version does not read")


def _check_list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{place} is not a list: {shown(value)}")
    return value


def _check_numbered(value: Any, place: str) -> list[tuple[str, Any]]:
    """Return the items of an object whose keys are 0, 1, 2 …"""
    keys = _check_object(value, place).keys()
    if keys != {str(i) for i in range(len(keys))}:
        raise FormatError(f"{place or 'the document'} has keys {shown(list(keys))}, expected 0 to {len(keys) - 1}")
    return [(f"{place}/{key}" if place else key, item) for key, item in value.items()]


def _check_optimizers(value: Any) -> None:
    for place, optimizer in _check_numbered(value, ""):
        _check_object(optimizer, place, "groups", "values", "numbered")
        own = _check_object(optimizer.get("own", {}), f"{place}/own")
        _check_object(own.get("state", {}), f"{place}/own/state")
        numbered = optimizer["numbered"]
        if type(numbered) is not bool:
            raise FormatError(f"{place}/numbered is not true or false: {shown(numbered)}")
        for where, group in _check_numbered(optimizer["groups"], f"{place}/groups"):
            hyper = _check_object(group, where, "hyper", "params")["hyper"]
            if not isinstance(hyper, dict) or hyper.get("$", "map") != "map":
                raise FormatError(f"{where}/hyper is not an object: {shown(hyper)}")
            _check_params(group["params"], f"{where}/params", numbered)
        _refuse_compound(_check_object(optimizer["values"], f"{place}/values"))
        for name, shared in optimizer["values"].items():
            where = f"{place}/values/{shown(name)}"
            for item in _check_list(shared, where):
                _check_params(_check_object(item, where, "value", "params")["params"], where, numbered)


def _check_params(value: Any, place: str, numbered: bool) -> None:
    for name in _check_list(value, place):
        if not isinstance(name, str) or (numbered and not _PARAM_NUMBER.fullmatch(name)):
            raise FormatError(f"{place} has {shown(name)}, which names no parameter")


def _check_hugging_face(value: Any) -> None:
    _check_object(value, "", "models")
    for number, model in enumerate(_check_list(value["models"], "models")):
        place = f"models/{number}"
        _check_object(model, place, "prefix", "class", "adapter", "ties", "ignored", "names", "files")
        texts = [model["prefix"], model["class"], *_check_list(model["ties"], f"{place}/ties")]
        texts += _check_list(model["ignored"], f"{place}/ignored")
        for text in texts if model["adapter"] is None else [*texts, model["adapter"]]:
            check_text(text)
        files = _check_object(model["files"], f"{place}/files")
        for name in {CONFIG, *files}.intersection(CONFIGS):
            if not isinstance(parse_json(check_text(files.get(name)).encode(), name), dict):
                raise FormatError(f"{place}/files/{name} is not an object")
        for name, parts in _check_object(model["names"], f"{place}/names").items():
            for part in _check_list(parts, f"{place}/names/{shown(name)}"):
                _check_part(part, f"{place}/names/{shown(name)}")


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, list) or len(part) != 4 or not all(isinstance(one, list) for one in part[1:]):
        raise FormatError(f"{place} has {shown(part)}, expected a name, start, stop and shape")
    check_text(part[0])
    start, stop, _ = (check_shape(one) for one in part[1:])
    if len(start) != len(stop) or any(a > b for a, b in zip(start, stop, strict=True)):
        raise FormatError(f"{place} has {shown(part)}, which is no box")


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_value(values: dict[str, Any], name: str, param: str, value: Any) -> list[str]:
    """Add a parameter to those that share an equal value, such as the step counter; return the list of them."""
    text = json.dumps(value, sort_keys=True)
    params: list[str] = values.setdefault(name, {}).setdefault(text, {"value": value, "params": []})["params"]
    params.append(param)
    return params


def merge_optimizers(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the optimizer documents of pipeline stages into the document of a single process, see FORMAT.md.

    Hyper-parameters and the optimizer's own entries come from the first document that has them. Parameters are in the
    order of the documents, each once: several stages may have parameters of containers, and tied ones.
    """
    merged: dict[str, Any] = {}
    for number in dict.fromkeys(n for document in documents for n in document):
        parts = [document[number] for document in documents if number in document]
        groups: dict[str, Any] = {}
        grouped: set[str] = set()
        for i in dict.fromkeys(i for part in parts for i in part["groups"]):
            same = [part["groups"][i] for part in parts if i in part["groups"]]
            params = [p for p in dict.fromkeys(p for group in same for p in group["params"]) if p not in grouped]
            grouped.update(params)
            groups[i] = {"hyper": same[0]["hyper"], "params": params}
        values: dict[str, Any] = {}
        seen: set[tuple[str, str]] = set()
        entries = [(name, entry) for part in parts for name, shared in part["values"].items() for entry in shared]
        for name, param, value in ((name, p, entry["value"]) for name, entry in entries for p in entry["params"]):
            if (name, param) not in seen:
                add_value(values, name, param, value)
            seen.add((name, param))
        shared = {name: list(by_value.values()) for name, by_value in values.items()}
        merged[number] = {"groups": groups, "values": shared, "numbered": any(part["numbered"] for part in parts)}
        if own := next((part["own"] for part in parts if "own" in part), None):
            merged[number]["own"] = own
    return merged


class StoredOptimizer:
    """One optimizer of a checkpoint: its groups, its values, and the names of its tensors.

    Args:
        number: of the optimizer.
        document: its part of the document "optimizer".
        component: the tensors of all optimizers; None if there are none.
        decode: decodes the result of ``encode_small``.

    Attributes:
        own: state without a parameter (``optimizer.state["k"]``) and extra entries, like a state dict.
    """

    def __init__(
        self,
        number: int,
        document: dict[str, Any],
        component: Component | None,
        decode: Callable[[Any], Any],
    ) -> None:
        groups = [document["groups"][str(i)] for i in range(len(document["groups"]))]
        self.groups: list[list[str]] = [group["params"] for group in groups]
        self.hyper: list[dict[str, Any]] = [decode(group["hyper"]) for group in groups]
        self.numbered: bool = document["numbered"]
        self.own: dict[str, Any] = decode(document.get("own", {}))
        self.values: dict[str, dict[str, Any]] = {}
        for name, shared in document["values"].items():
            for item in shared:
                for param in item["params"]:  # which share no mutable memory
                    self.values.setdefault(param, {})[name] = decode(item["value"])
        self.specs = component.tensors if component is not None else {}
        self.tensors: dict[str, dict[str, str]] = {}
        prefix = f"{number}/"
        for key in self.specs:
            if key.startswith(prefix):
                param, _, name = key[len(prefix) :].rpartition("/")
                self.tensors.setdefault(param, {})[name] = key

    def name(self, groups: Sequence[Sequence[str]]) -> str | None:
        """Name the parameters of state that was saved by number; the keys of tensors stay.

        Args:
            groups: the names in each param group of the whole model.

        Returns:
            The reason if the groups cannot be those that were saved; None if the parameters have names now.
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

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter in torch's state dicts."""
        return {param: number for number, param in enumerate(param for group in self.groups for param in group)}

    def state_dict(self, tensors: Mapping[str, Any], *, by_number: bool = False) -> dict[str, Any]:
        """Return a state dict like ``Optimizer.state_dict``.

        Args:
            tensors: by stored key; may be placeholders.
            by_number: key parameters by number, as torch does; else as they were saved.
        """
        numbers = self.numbers if by_number else {}

        def as_saved(param: str) -> str | int:
            return numbers.get(param, param) if not self.numbered else int(param[1:])

        state = {
            as_saved(p): {
                **self.values.get(p, {}),
                **{name: tensors[key] for name, key in self.tensors.get(p, {}).items()},
            }
            for group in self.groups
            for p in group
            if p in self.values or p in self.tensors
        }
        groups = [{**h, "params": [as_saved(p) for p in g]} for h, g in zip(self.hyper, self.groups, strict=True)]
        if not groups and not state:
            return {}  # as in Lightning, for a LightningModule without optimizers
        return {**self.own, "state": {**state, **self.own.get("state", {})}, "param_groups": groups}
