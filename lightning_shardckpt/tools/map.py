"""Draw which rank has which slice of every tensor, as one HTML page: ``python -m lightning_shardckpt map PATH``.

The page loads nothing else. It holds layouts, not boxes, so it stays small for any number of ranks: its script does
the arithmetic of ``layout.py``. Names are data in it, never markup. Reads indexes only; no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME, Component, TensorSpec
from lightning_shardckpt.format.layout import Holders, Layout, as_holders
from lightning_shardckpt.format.plan import shared_dim
from lightning_shardckpt.format.root_index_json import COMPONENTS
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.tools.explain import explain
from lightning_shardckpt.tools.ownership import Owned, held, written
from lightning_shardckpt.tools.tensor_names import aliases_by_key
from lightning_shardckpt.tools.topology_arguments import topology_text
from lightning_shardckpt.transfer.reader import Checkpoint

_INDEX_BYTES = 64 << 20  # of rank indexes: more take long to read, and would tell of more files than a page can hold
_PLACES = 100_000  # of tensors in files of which a rank has several
_SOURCES = 20_000  # pairs of ranks, one of which reads what the other wrote
_LISTED = 5
_TEMPLATE = Path(__file__).with_name("map.html")


def write_map(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    onto: str | None = None,
    tp_plan: Sequence[str] = (),
    layers: Sequence[str] = (),
    index_bytes: int = _INDEX_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page about a checkpoint and return its path; a file that is there is replaced.

    Args:
        path: the checkpoint.
        output: the page; may not lie inside a checkpoint, where nothing else belongs.
        onto: a topology such as ``tp=4,fsdp=2``; the page then shows what a resume there would read.
        tp_plan: as for ``explain``.
        layers: as for ``explain``.
        index_bytes: if the rank indexes are larger together, they are not read; then the page does not always show
            which file a slice is in.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if there is none; says what is there instead.
        TopologyError: if ``onto`` fits neither itself nor the checkpoint.
        ValueError: if the page would lie inside a checkpoint.
    """
    target = Path(output)
    if (target.absolute().parent / ROOT_NAME).exists():
        raise ValueError(f"{os.fspath(output)!r} lies inside a checkpoint: write the page somewhere else")
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        about = described(checkpoint, index_bytes)
    if onto is not None:
        about["onto"] = _target(explain(path, onto, tp_plan=tp_plan, layers=layers, storage_options=storage_options))
    target.write_text(page(about), encoding="utf-8")
    return target


def page(about: dict[str, Any]) -> str:
    """Return the page for what ``described`` returned."""
    title, data, rest = "<!--title-->", "<!--data-->", _TEMPLATE.read_text(encoding="utf-8")
    before, _, rest = rest.partition(title)
    between, _, after = rest.partition(data)
    text = json.dumps(about, separators=(",", ":"))  # ASCII; only its strings can have these:
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    name = escape(about["name"]).encode("ascii", "xmlcharrefreplace").decode()
    return "".join((before, name, between, text, after))


def described(checkpoint: Checkpoint, index_bytes: int = _INDEX_BYTES) -> dict[str, Any]:
    """Return what the page shows, as values that JSON can hold, without a list of boxes."""
    root, problems = checkpoint.root, list[str]()
    layouts: dict[tuple[Layout, Holders], int] = {}
    reads = sum(info.nbytes for c in root.components.values() for info in c.indexes.values()) <= index_bytes
    names = [name for name in COMPONENTS if name in root.components]  # the model first
    components = [_component(checkpoint, name, layouts, problems if reads else None) for name in names]
    return {
        "name": Path(checkpoint.path).name or checkpoint.path,
        "path": str(checkpoint.path),
        "saveId": root.save_id,
        "step": root.step,
        "epoch": root.epoch,
        "world": root.world_size,
        "topology": list(root.topology.items()),
        "software": list(root.software.items()),
        "itemBytes": DTYPE_BYTES,
        "layouts": [_layout(layout, holders) for layout, holders in layouts],
        "components": components,
        "indexesRead": reads,
        "problems": problems[:_LISTED] + ([f"… and {len(problems) - _LISTED} more"] if problems[_LISTED:] else []),
    }


def _layout(layout: Layout, holders: Holders) -> dict[str, Any]:
    found: dict[str, Any] = {
        "axes": [[axis.name, axis.size, axis.stride] for axis in layout.axes],
        "cuts": [[cut.axis, cut.dim, cut.blocks] for cut in layout.cuts],
        "holders": holders,
    }
    return found if layout.order is None else {**found, "order": layout.order}


def _component(
    checkpoint: Checkpoint, name: str, layouts: dict[tuple[Layout, Holders], int], problems: list[str] | None
) -> dict[str, Any]:
    """Describe a component; ``problems`` takes those of indexes that cannot be read, None leaves them unread."""
    component, chosen = checkpoint.root.components[name], checkpoint.replicas(name)
    in_memory, stored = held(component.tensors), written(component.tensors, chosen)
    every = range(checkpoint.root.world_size)
    aliases = aliases_by_key(component)
    rows = []
    for key, spec in component.tensors.items():
        number = layouts.setdefault((spec.layout, spec.holders), len(layouts))
        rows.append([key, spec.dtype, spec.shape, number, _writer(spec, chosen[key])])
        if key in aliases:
            rows[-1].append(aliases[key])
    return {
        "name": name,
        "tensors": rows,
        "held": [in_memory.get(rank, Owned()).nbytes for rank in every],
        "written": [stored.get(rank, Owned()).nbytes for rank in every],
        "files": {} if problems is None else _files(checkpoint, name, component, problems),
    }


def _writer(spec: TensorSpec, replica: int | None) -> int:
    """Return which replica wrote each shard, by position among its holders; -1 - dim where each wrote a share."""
    return replica if replica is not None else -1 - shared_dim(spec)


def _files(
    checkpoint: Checkpoint, name: str, component: Component, problems: list[str]
) -> dict[int, dict[str, Any]]:
    """Return the names of each rank's files; where these are several, also the number of each tensor's file."""
    found: dict[int, dict[str, Any]] = {}
    numbers = {key: number for number, key in enumerate(component.tensors)}
    left = _PLACES
    for rank in component.indexes:
        try:
            index = checkpoint.index(name, rank)
        except ShardCkptError as error:
            problems.append(str(error))
            continue
        files = {file: number for number, file in enumerate(index.files)}
        found[rank] = {"names": list(files)}
        left -= len(index.shards) if len(files) > 1 else 0
        if len(files) > 1 and left >= 0:
            entries = [(numbers[key], shards) for key, shards in index.shards.items() if key in numbers]
            found[rank]["of"] = {n: _one_or_all([files[e.file] for e in shards]) for n, shards in entries}
    return found


def _target(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part of what ``explain`` returned that the page shows."""
    ranks = []
    left = _SOURCES
    for one in found["ranks"]:
        row = {"rank": one["rank"], "needed": one["needs"], "read": one["reads"], "files": one["files"]}
        ranks.append({**row, "from": as_holders(list(one["from"]))})
        left -= len(one["from"])
        if left >= 0:
            ranks[-1]["parts"] = list(one["from"].items())
    totals = {"needed": found["totals"]["needs"], "read": found["totals"]["reads"]}
    about = {"topology": topology_text(found["onto"]), "imbalance": found["imbalance"]}
    return {**about, **totals, "ranks": ranks, "notes": found["assumed"] + found["continues"]}


def _one_or_all(numbers: Sequence[int]) -> int | list[int]:
    distinct = sorted(set(numbers))
    return distinct[0] if len(distinct) == 1 else distinct
