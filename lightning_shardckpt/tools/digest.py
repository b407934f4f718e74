"""Digests that are equal on every topology and in every format: ``python -m lightning_shardckpt digest PATH``.

Every byte is read and verified. A tensor's digest is the xxh3-64 of its bytes; FORMAT.md defines the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, Literal, get_args

import xxhash

from lightning_shardckpt.format.layout import Shape
from lightning_shardckpt.format.safetensors_header import OutputTensor
from lightning_shardckpt.format.value_checks import bytes_in, checksum
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.source import Source, read_windows
from lightning_shardckpt.state import libraries
from lightning_shardckpt.state.documents import values_of
from lightning_shardckpt.storage.router import StorageRouter, file_path
from lightning_shardckpt.system.text import count_text, progress, shape_text, table
from lightning_shardckpt.tools.inspect import LISTED, is_selected

Names = Literal["stored", "huggingface"]
"""Names of tensors: as stored, or as in a Hugging Face export."""
_DIGESTED = ("model", "optimizer")  # not the trainer's tensors: random states and callbacks, some of a single rank
_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def component_digest(tensors: Iterable[tuple[str, str, Shape, str]]) -> str:
    """Return the digest of a component from name, dtype, shape and digest of its tensors, under each of their names."""
    return checksum(b"".join(map(_line, sorted(tensors))))


def values_digest(values: Iterable[tuple[Any, ...]]) -> str:
    """Return the digest of values with the names of their places, in any order."""
    return checksum(b"".join(sorted(map(_line, values))))


def _line(value: Any) -> bytes:
    return f"{_to_json(value)}\n".encode()


def digest(
    path: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    names: Names = "stored",
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return digests of a checkpoint, as values that JSON can hold: 16 hexadecimal digits each.

    Equal state has equal digests on any topology, and in any format that is read. ``components`` has the digests of
    ``model`` and ``optimizer``, of all their tensors under all names; ``optimizer_values`` covers the rest of the
    optimizers' state; ``whole`` covers these three. ``tensors`` does not change them.

    Args:
        path: a checkpoint of this package or of another program, or a URL.
        tensors: list only tensors whose name matches this pattern (``*``, ``?``, ``[…]``) or contains this text.
        names: ``"huggingface"`` for the model alone, named and split as by ``consolidate --format huggingface``.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CorruptionError: naming file, tensor and rank.
        ValueError: for Hugging Face names without a model of transformers, or if no name matches ``tensors``.
    """
    if names not in get_args(Names):
        raise ValueError(f"names is one of {get_args(Names)}, got {names!r}")
    source, _ = open_source(file_path(path), StorageRouter(storage_options=storage_options), for_export=True)
    with closing(source) as stored:
        outputs = _tensors(stored, names)
        places = list(dict.fromkeys((*one.source, one.box) for every in outputs.values() for one in every))
        hashers = [xxhash.xxh3_64() for _ in places]
        specs = [(stored.table[component][key].spec, box) for component, key, box in places]
        with progress(sum(bytes_in(box.shape if box else spec.shape, spec.dtype) for spec, box in specs)) as advance:
            for number, data in read_windows(stored, places):
                hashers[number].update(data)
                advance(len(data))
        digests = {place: hasher.hexdigest() for place, hasher in zip(places, hashers, strict=True)}
        rows = {
            component: [(one.name, one.dtype, one.shape, digests[*one.source, one.box]) for one in every]
            for component, every in outputs.items()
        }
        components = {component: component_digest(own) for component, own in rows.items()}
        document = stored.document("optimizer") if names == "stored" else None
        values = {"optimizer_values": values_digest(_values(document))} if document else {}
        listed = [
            {"component": component, "name": name, "dtype": dtype, "shape": list(shape), "digest": of}
            for component, own in rows.items()
            for name, dtype, shape, of in own
            if is_selected([name], tensors)
        ]
        if tensors is not None and not listed:
            raise ValueError(f"{os.fspath(path)} has no tensor whose name matches {tensors!r} or contains it")
        return {
            "path": os.fspath(path),
            "tensors": listed,
            "components": components,
            "counts": {component: len(own) for component, own in rows.items()},
            "optimizer_values": values.get("optimizer_values"),
            "whole": checksum(_line(components | values)),
        }


def _tensors(stored: Source, names: Names) -> dict[str, list[OutputTensor]]:
    """Return the tensors of each component, under each of their names."""
    if names == "huggingface":
        keys = (component := stored.component("model")).names
        model = libraries.pick_model(stored.document("huggingface"), keys)
        if model is None:
            raise ValueError("the checkpoint has no model of transformers, so it has no names of Hugging Face")
        return {"model": list(libraries.list_tensors(model, keys, component))}
    outputs = dict[str, list[OutputTensor]]()
    for name in filter(stored.table.__contains__, _DIGESTED):
        component = stored.component(name)
        specs = ((new, key, component.tensors[key]) for new, key in component.names.items())
        outputs[name] = [OutputTensor(new, spec.dtype, spec.shape, (name, key)) for new, key, spec in specs]
    return outputs


def _values(document: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the optimizers' state except tensors: each value under its parameter's name."""
    values = list[tuple[Any, ...]]()
    for number, optimizer in document.items():
        for group in optimizer["groups"].values():
            values += [(number, name, key, value) for key, value in group["hyper"].items() for name in group["params"]]
        values += [(number, name, f"state {state}", value) for name, state, value in values_of(optimizer)]
    return values


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``digest`` as text for people."""
    limit = None if everything else LISTED
    rows = [(t["name"], t["dtype"], shape_text(t["shape"]), t["digest"]) for t in report["tensors"]]
    totals = [(f"{n} ({count_text(report['counts'][n], 'tensor')})", d) for n, d in report["components"].items()]
    totals += [("values of optimizers", report["optimizer_values"])] * (report["optimizer_values"] is not None)
    totals.append(("whole", report["whole"]))
    tensors = table(("tensor", "dtype", "shape", "digest"), rows, limit=limit)
    return f"{tensors}\n\n{table(('', 'digest'), totals)}"
