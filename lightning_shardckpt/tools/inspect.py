"""Contents of a checkpoint: ``python -m lightning_shardckpt inspect PATH``. Reads indexes only; no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME, Component
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.system.text import count_text, shape_text, size_text, table
from lightning_shardckpt.transfer.reader import Checkpoint

_LISTED = 20


def inspect(
    path: str | os.PathLike[str],
    tensors: str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of a checkpoint, as values that JSON can hold.

    Args:
        path: the checkpoint.
        tensors: list only tensors whose name matches this pattern (``*``, ``?``, ``[…]``) or contains this text.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
    """
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        root = checkpoint.root
        listed = [t for t in _tensors(checkpoint) if is_selected((t["name"], *t["aliases"]), tensors)]
        problems: list[str] = []
        files = list(_files(checkpoint, problems))
        return {
            "path": os.fspath(path),
            "save_id": root.save_id,
            "step": root.step,
            "epoch": root.epoch,
            "world_size": root.world_size,
            "topology": root.topology,
            "software": root.software,
            "bytes": sum(file["bytes"] for file in files),
            "components": {name: _component(checkpoint, name) for name in root.components},
            "tensors": listed,
            "files": files,
            "problems": problems,
        }


def _component(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    component = checkpoint.root.components[name]
    return {
        "tensors": len(component.tensors),
        "aliases": len(component.aliases),
        "bytes": sum(bytes_in(spec.shape, spec.dtype) for spec in component.tensors.values()),
        "dtypes": dict(Counter(spec.dtype for spec in component.tensors.values()).most_common()),
        "ranks": sorted(component.indexes),
    }


def _tensors(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    for name, component in checkpoint.root.components.items():
        aliases = aliases_by_key(component)
        for key, spec in component.tensors.items():
            axes = spec.layout.axes
            yield {
                "component": name,
                "name": key,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "bytes": bytes_in(spec.shape, spec.dtype),
                "cuts": [
                    {"dim": c.dim, "axis": axes[c.axis].name, "parts": axes[c.axis].size, "blocks": c.blocks}
                    for c in spec.layout.cuts
                ],
                "ranks": [list(ranks) for ranks in spec.holders],
                "aliases": aliases.get(key, []),
            }


def _files(checkpoint: Checkpoint, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield every file with its size from the indexes; an unreadable index goes to ``problems``."""
    root = checkpoint.root
    yield {"name": ROOT_NAME, "rank": None, "bytes": checkpoint.reader.size(ROOT_NAME)}
    for name, component in root.components.items():
        for rank, info in sorted(component.indexes.items()):
            yield {"name": info.name, "rank": rank, "bytes": info.nbytes}
            try:
                files = checkpoint.index(name, rank).files.values()
            except ShardCkptError as error:
                problems.append(str(error))
                continue
            yield from ({"name": file.name, "rank": rank, "bytes": file.nbytes} for file in files)
    for document in sorted(root.documents.values(), key=lambda d: d.name):
        rank_text = document.name.rpartition("-dist-")[2].removesuffix(".json")
        yield {"name": document.name, "rank": int(rank_text) if rank_text.isdigit() else None, "bytes": document.nbytes}


def is_selected(names: Iterable[str], pattern: str | None) -> bool:
    """Return whether one of a tensor's names matches a pattern (``*``, ``?``, ``[…]``) or contains it as text.

    >>> is_selected(["a.weight"], "a.*"), is_selected(["a.weight"], "weigh"), is_selected(["a.weight"], "b.*")
    (True, True, False)
    """
    return pattern is None or any(fnmatchcase(name, pattern) or pattern in name for name in names)


def aliases_by_key(component: Component) -> dict[str, list[str]]:
    """Return the aliases of each tied tensor, by its stored name."""
    names: dict[str, list[str]] = {}
    for alias, key in component.aliases.items():
        names.setdefault(key, []).append(alias)
    return names


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``inspect`` as text for people.

    Args:
        report: the result.
        everything: show long tables in full.
    """
    limit = None if everything else _LISTED
    tensors, files, all_ranks = report["tensors"], report["files"], [[0, report["world_size"]]]
    blocks = [_summary(report), _components_table(report), "no tensor matches"]
    if tensors:
        rows = [
            (t["name"], t["dtype"], shape_text(t["shape"]), size_text(t["bytes"]), _cuts_text(t, all_ranks))
            for t in tensors
        ]
        header, hint = ("tensor", "dtype", "shape", "size", "cut"), "--tensors '*' lists them, --tensors PATTERN picks"
        blocks[-1] = table(header, rows, limit=limit, noun="tensor", hint=hint)
    places = [(f["name"], "" if f["rank"] is None else str(f["rank"]), size_text(f["bytes"])) for f in files]
    blocks.append(table(("file", "rank", "size"), places, ("rank", "size"), limit=limit, noun="file"))
    if report["problems"]:
        blocks.append("\n".join(["problems (`python -m lightning_shardckpt verify` finds all):", *report["problems"]]))
    return "\n\n".join(blocks)


def _summary(report: dict[str, Any]) -> str:
    axes = [f"{axis} {size}" for axis, size in report["topology"].items()]
    when = [f"{name} {report[name]}" for name in ("step", "epoch") if report[name] is not None]
    lines = [
        ("checkpoint", report["path"]),
        ("holds", ", ".join([f"{size_text(report['bytes'])} in {count_text(len(report['files']), 'file')}", *when])),
        ("world", count_text(report["world_size"], "rank") + (f": {' × '.join(axes)}" if axes else "")),
        ("saved with", ", ".join(f"{name} {version}" for name, version in report["software"].items()) or "?"),
        ("save id", report["save_id"]),
    ]
    return "\n".join(f"{name:<12}{value}" for name, value in lines)


def _components_table(report: dict[str, Any]) -> str:
    rows = []
    for name, component in report["components"].items():
        dtypes = ", ".join(f"{dtype} ({count:,})" for dtype, count in component["dtypes"].items())
        aliases = f" + {count_text(component['aliases'], 'alias', 'aliases')}" if component["aliases"] else ""
        rows.append((name, f"{component['tensors']:,}{aliases}", size_text(component["bytes"]), dtypes))
    return table(("component", "tensors", "in tensors", "dtypes"), rows, right=("in tensors",))


def _cuts_text(tensor: dict[str, Any], all_ranks: list[list[int]]) -> str:
    """Return a text of a tensor's cuts, the ranks that hold it if these are not all, and its aliases."""
    cuts = [
        f"dim {c['dim']} / {c['parts']} over {c['axis']}" + (f" in {c['blocks']} blocks" if c["blocks"] > 1 else "")
        for c in tensor["cuts"]
    ]
    text = ", ".join(cuts) or "whole"
    if tensor["ranks"] != all_ranks and cuts:
        text += f" on ranks {_ranges_text(tensor['ranks'])}"
    return text + (f"; also {', '.join(tensor['aliases'])}" if tensor["aliases"] else "")


def _ranges_text(ranges: list[list[int]]) -> str:
    return ", ".join(f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in ranges)
