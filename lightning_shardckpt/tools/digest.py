"""Digests that are equal on every topology and in every format: ``python -m lightning_shardckpt digest PATH``.

Every byte is read and verified. A tensor's digest is the xxh3-64 of its bytes; FORMAT.md defines the others.
Checkpoints of this package need no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import xxhash

from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.safetensors_header import OutputTensor
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state import hf_directory
from lightning_shardckpt.storage.router import StorageRouter, file_path
from lightning_shardckpt.system.text import count_text, shape_text, table
from lightning_shardckpt.tools.inspect import is_selected
from lightning_shardckpt.transfer.shard_reader import WindowReader

Names = Literal["stored", "huggingface"]
"""Names of tensors: as stored, or as in a Hugging Face export."""
_WINDOW_BYTES = 8 << 20
_LISTED = 20
_DIGESTED = ("model", "optimizer")  # not the trainer's tensors: random states and callbacks, some of a single rank
_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, order=True)
class NamedDigest:
    """A tensor under one of its names, and its digest."""

    name: str
    dtype: str
    shape: Shape
    digest: str


def component_digest(tensors: Iterable[NamedDigest]) -> str:
    """Return the digest of a component from its tensors, each under each of its names."""
    return checksum(*(_line([of.name, of.dtype, of.shape, of.digest]) for of in sorted(tensors)))


def values_digest(values: Iterable[tuple[Any, ...]]) -> str:
    """Return the digest of values with the names of their places, in any order."""
    return checksum(*sorted(map(_line, values)))


def whole_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a checkpoint from the digests of its components."""
    return checksum(_line(dict(digests)))


def _line(value: Any) -> bytes:
    return f"{_to_json(value)}\n".encode()


def digest(
    path: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    names: Names = "stored",
    advance: Callable[[int], Any] = lambda nbytes: None,
    expect: Callable[[int], Any] = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return digests of a checkpoint, as values that JSON can hold: 16 hexadecimal digits each.

    Equal state has equal digests on any topology, and in any format that is read (DCP, Lightning, a file of
    ``torch.save``, Hugging Face). ``components`` has the digests of ``model`` and ``optimizer``, of all their tensors
    under all names; ``optimizer_values`` covers the rest of the optimizers' state (steps, param groups); ``whole``
    covers these three. ``tensors`` does not change them.

    Args:
        path: a checkpoint of this package or of another program, or a URL.
        tensors: list only tensors whose name matches this pattern (``*``, ``?``, ``[…]``) or contains this text.
        names: ``"huggingface"`` for the model alone, named and split as by ``consolidate --format huggingface``.
        advance: called with the bytes of tensors as they are read.
        expect: called once before with the total of these bytes.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
        CorruptionError: naming file, tensor and rank of corrupted data.
        ValueError: for Hugging Face names of a checkpoint without a model of transformers, or if no name matches
            ``tensors``.
    """
    if names not in get_args(Names):
        raise ValueError(f"names is one of {get_args(Names)}, got {names!r}")
    where = file_path(path)
    source, _ = open_source(where, StorageRouter(storage_options=storage_options), for_export=True)
    with closing(source) as stored:
        outputs = _tensors(stored, names)
        places = {(one.source, one.box): one.nbytes for every in outputs.values() for one in every}
        expect(sum(places.values()))
        reader = WindowReader(stored, _WINDOW_BYTES)
        digests = {place: _digest_tensor(reader, *place, advance) for place in places}
        rows_of = {
            name: [NamedDigest(one.name, one.dtype, one.shape, digests[one.source, one.box]) for one in every]
            for name, every in outputs.items()
        }
        components = {name: component_digest(rows) for name, rows in rows_of.items()}
        every = dict(components)
        if names == "stored" and stored.document("optimizer"):
            every["optimizer_values"] = _digest_values(stored.document("optimizer"))
        listed = [(of, row) for of, rows in rows_of.items() for row in rows if is_selected([row.name], tensors)]
        if tensors is not None and not listed:
            raise ValueError(f"{os.fspath(path)} has no tensor whose name matches {tensors!r} or contains it")
        return {
            "path": os.fspath(path),
            "tensors": [{"component": of, **asdict(row), "shape": list(row.shape)} for of, row in listed],
            "components": components,
            "counts": {name: len(rows) for name, rows in rows_of.items()},
            "optimizer_values": every.get("optimizer_values"),
            "whole": whole_digest(every),
        }


# ── computing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(stored: Source, names: Names) -> dict[str, list[OutputTensor]]:
    """Return the tensors of each component, under each of their names."""
    components, outputs = stored.components(), dict[str, list[OutputTensor]]()
    if names == "huggingface":
        keys = components["model"].names if "model" in components else {}
        model = hf_directory.pick_model(stored.document("huggingface"), keys)
        if model is None:
            raise ValueError("the checkpoint has no model of transformers, so it has no names of Hugging Face")
        return {"model": list(model.tensors(keys, components["model"]))}
    for name in filter(components.__contains__, _DIGESTED):
        specs = ((new, key, components[name].tensors[key]) for new, key in components[name].names.items())
        outputs[name] = [OutputTensor(new, spec.dtype, spec.shape, (name, key)) for new, key, spec in specs]
    return outputs


def _digest_tensor(
    reader: WindowReader, source: tuple[str, str], box: Box | None, advance: Callable[[int], Any]
) -> str:
    """Return the digest of a stored tensor, or of a part of it; every byte is verified if it has a checksum."""
    hasher = xxhash.xxh3_64()
    for data in reader.read(*source, box):
        hasher.update(data)
        advance(len(data))
    return hasher.hexdigest()


def _digest_values(document: Mapping[str, Any]) -> str:
    """Return the digest of the optimizers' state except tensors: each value under its parameter's name."""
    values = list[tuple[Any, ...]]()
    for number, optimizer in document.items():
        for group in optimizer["groups"].values():
            hyper = [(key, value, group["params"]) for key, value in group["hyper"].items()]
            values += [(number, name, key, value) for key, value, names in hyper for name in names]
        for state, shared in optimizer["values"].items():
            stored = [(entry["value"], name) for entry in shared for name in entry["params"]]
            values += [(number, name, f"state {state}", value) for value, name in stored]
        values += [(number, "", key, value) for key, value in optimizer.get("own", {}).items()]
    return values_digest(values)


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``digest`` as text for people."""
    blocks = []
    for component in report["components"]:
        own = [t for t in report["tensors"] if t["component"] == component]
        rows = [(t["name"], t["dtype"], shape_text(t["shape"]), t["digest"]) for t in own]
        if own:
            header = (component, "dtype", "shape", "digest")
            blocks.append(table(header, rows, limit=None if everything else _LISTED))
    lines = [(f"{n} ({count_text(report['counts'][n], 'tensor')})", d) for n, d in report["components"].items()]
    if report["optimizer_values"] is not None:
        lines.append(("values of optimizers", report["optimizer_values"]))
    lines.append(("whole", report["whole"]))
    return "\n\n".join([*blocks, table(("", "digest"), lines)])
