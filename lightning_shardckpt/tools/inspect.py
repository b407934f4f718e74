"""Contents of a checkpoint: ``python -m lightning_shardckpt inspect PATH``. Reads indexes only; no torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightning_shardckpt.format.index import ROOT_NAME, Component
from lightning_shardckpt.format.layout import Layout
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.system.text import count_text, shape_text, size_text, table
from lightning_shardckpt.transfer.reader import Checkpoint

LISTED = 20
"""The rows of long tables that are shown by default."""


def inspect(
    path: str | os.PathLike[str], tensors: str | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the contents of a checkpoint, as values that JSON can hold.

    Args:
        path: the checkpoint.
        tensors: list only tensors whose name matches this pattern (``*``, ``?``, ``[…]``) or contains this text.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint.
        CorruptionError: if an index is damaged; ``verify`` lists all damage.
    """
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        root, files = checkpoint.root, _files(checkpoint)
        every = [t for name, component in root.components.items() for t in _tensors(name, component)]
        return {
            "path": os.fspath(path),
            "save_id": root.save_id,
            "step": root.step,
            "epoch": root.epoch,
            "world_size": root.world_size,
            "topology": root.topology,
            "software": root.software,
            "bytes": sum(file["bytes"] for file in files),
            "components": {name: _totals(name, every) for name in root.components},
            "tensors": [t for t in every if is_selected((t["name"], *t["aliases"]), tensors)],
            "files": files,
        }


def _totals(component: str, every: list[dict[str, Any]]) -> dict[str, Any]:
    tensors = [t for t in every if t["component"] == component]
    return {
        "tensors": len(tensors),
        "aliases": sum(len(t["aliases"]) for t in tensors),
        "bytes": sum(t["bytes"] for t in tensors),
        "dtypes": dict(Counter(t["dtype"] for t in tensors).most_common()),
    }


def _tensors(component: str, of: Component) -> Iterator[dict[str, Any]]:
    aliases = aliases_by_key(of)
    for key, spec in of.tensors.items():
        yield {
            "component": component,
            "name": key,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": bytes_in(spec.shape, spec.dtype),
            "cuts": cuts_of(spec.layout),
            "ranks": [list(ranks) for ranks in spec.holders],
            "aliases": aliases.get(key, []),
        }


def _files(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return every file with its size from the indexes, and the rank that wrote it, which its name has."""
    sizes = {ROOT_NAME: checkpoint.reader.size(ROOT_NAME)}
    for name, component in checkpoint.root.components.items():
        for rank, info in sorted(component.indexes.items()):
            sizes |= {file.name: file.nbytes for file in (info, *checkpoint.index(name, rank).files.values())}
    sizes |= {name: info.nbytes for name, info in sorted(checkpoint.root.documents.items())}
    ranks = {name: re.search(r"-dist-(\d+)", name) for name in sizes}
    return [{"name": name, "rank": int(m[1]) if (m := ranks[name]) else 0, "bytes": n} for name, n in sizes.items()]


def is_selected(names: Iterable[str], pattern: str | None) -> bool:
    """Return whether one of a tensor's names matches a pattern (``*``, ``?``, ``[…]``) or contains it as text.

    >>> is_selected(["a.weight"], "a.*"), is_selected(["a.weight"], "weigh"), is_selected(["a.weight"], "b.*")
    (True, True, False)
    """
    return pattern is None or any(fnmatchcase(name, pattern) or pattern in name for name in names)


def cuts_of(layout: Layout) -> list[dict[str, Any]]:
    """Return how a layout cuts a tensor, as values that JSON can hold."""
    cuts = [(cut, layout.axes[cut.axis]) for cut in layout.cuts]
    return [{"dim": cut.dim, "axis": axis.name, "parts": axis.size, "blocks": cut.blocks} for cut, axis in cuts]


def aliases_by_key(component: Component) -> dict[str, list[str]]:
    """Return the aliases of each tied tensor, by its stored name."""
    names: dict[str, list[str]] = {}
    for alias, key in component.aliases.items():
        names.setdefault(key, []).append(alias)
    return names


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Return the result of ``inspect`` as text for people, long tables in full with ``everything``."""
    limit, axes = None if everything else LISTED, [f"{axis} {size}" for axis, size in report["topology"].items()]
    lines = [
        ("checkpoint", report["path"]),
        ("holds", f"{size_text(report['bytes'])} in {count_text(len(report['files']), 'file')}"),
        ("saved at", f"step {report['step']}, epoch {report['epoch']}"),
        ("world", ": ".join([count_text(report["world_size"], "rank"), " × ".join(axes)])),
        ("saved with", ", ".join(f"{name} {version}" for name, version in report["software"].items())),
        ("save id", report["save_id"]),
    ]
    components = [
        (name, f"{of['tensors']:,}", f"{of['aliases']:,}", size_text(of["bytes"]), ", ".join(of["dtypes"]))
        for name, of in report["components"].items()
    ]
    tensors = [
        (t["name"], t["dtype"], shape_text(t["shape"]), size_text(t["bytes"]), _place(t)) for t in report["tensors"]
    ]
    files = [(f["name"], str(f["rank"]), size_text(f["bytes"])) for f in report["files"]]
    blocks = [
        "\n".join(f"{name:<12}{value}" for name, value in lines),
        table(("component", "tensors", "aliases", "size", "dtypes"), components, ("tensors", "aliases", "size")),
        table(("tensor", "dtype", "shape", "size", "cut"), tensors, limit=limit),
        table(("file", "rank", "size"), files, ("rank", "size"), limit=limit),
    ]
    return "\n\n".join(blocks)


def cuts_text(cuts: Sequence[Mapping[str, Any]]) -> str:
    """Return the result of ``cuts_of`` as readable text, without cuts into one part."""
    texts = list[str]()
    for cut in cuts:
        blocks = f" in {cut['blocks']} blocks" if cut["blocks"] > 1 else ""
        texts += [f"dim {cut['dim']} / {cut['parts']} over {cut['axis']}{blocks}"] if cut["parts"] > 1 else []
    return ", ".join(texts) or "whole"


def _place(tensor: dict[str, Any]) -> str:
    """Return a text of a tensor's cuts, the ranks that hold it, and its aliases."""
    ranks = ", ".join(f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in tensor["ranks"])
    also = f"; also {', '.join(tensor['aliases'])}" if tensor["aliases"] else ""
    return f"{cuts_text(tensor['cuts'])} on ranks {ranks}{also}"
