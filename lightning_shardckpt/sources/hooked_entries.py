"""Stored entries that a load reads beside the modules, since the modules' own code loads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.state.dtensor_layout import new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import HookedState, Prefixes
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

_MOST_WHOLE_BYTES = 4 << 30
"""The largest total size of entries that every rank may read whole, since no live tensor tells how to shard them."""


def allocate_entries(
    source: Source,
    live: Leaves,
    names: Mapping[str, list[str]],
    matched: Mapping[str, str],
    seen: Prefixes,
    *,
    absent: Collection[str] = (),
    unexpected: Collection[str] = (),
    reported: Collection[str] = (),
    whole: WholeNames,
    most_bytes: int = _MOST_WHOLE_BYTES,
) -> tuple[HookedState, list[ReadTarget]]:
    """Allocate memory for stored entries, sharded like the live tensor of the same name and shape if there is one.

    Args:
        source: the stored state.
        live: the leaves of the modules.
        names: all names of each live tensor, by its key.
        matched: the stored key of each live tensor that will be loaded, by its key.
        seen: names that hooks see before the load; such entries are read, whatever the model has.
        absent: names of the modules' entries that are not stored.
        unexpected: stored names that the model does not have; unless ``seen``, they get no memory.
        reported: names whose differences have been reported.
        whole: names of the model over all pipeline stages.
        most_bytes: the largest total size of entries that every rank reads whole.

    Returns:
        The entries, and the tensors to fill.

    Raises:
        StateError: if more must be read whole.
    """
    component, document = source.components().get("model", Component({})), source.document("model") or {}
    entries = {name: decode_small(value) for name, value in document.items() if seen(name) or name in unexpected}
    targets, read = list[ReadTarget](), dict[str, torch.Tensor]()
    own, loaded = {*live.tensors, *live.aliases, *whole.state}, set[str]()  # names may be from before PEFT, too
    for name, key in matched.items():
        read[key] = new_like(live.tensors[name], TORCH_DTYPES[component.tensors[key].dtype])
        targets.append(ReadTarget("model", key, read[key]))
        entries |= dict.fromkeys((other for other in names[name] if other in own), read[key])
        loaded.update(names[name])

    group_of = {name: (key, group) for key, group in names.items() for name in group}
    elsewhere, whole_keys = whole.elsewhere(group_of), list[str]()

    def allocate(name: str, key: str) -> torch.Tensor:
        spec, dtype = component.tensors[key], TORCH_DTYPES[component.tensors[key].dtype]
        like = live.tensors[group_of[name][0]] if name in group_of else None
        if like is not None and spec.shape == tuple(shape_of(like)):
            return new_like(like, dtype)
        if name in elsewhere or not seen(name):
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        whole_keys.append(key)
        return torch.empty(source.checked_shape("model", key), dtype=dtype)

    stored = {**{key: key for key in component.tensors}, **component.aliases}
    rest = (name for name in stored if (seen(name) or name in unexpected) and name not in loaded)
    for name in sorted(rest, key=lambda name: (name not in group_of, name)):
        key = stored[name]
        if key not in read:
            read[key] = allocate(name, key)
            targets += [ReadTarget("model", key, read[key])] if not read[key].is_meta else []
        entries[name] = read[key]
        for other in group_of[name][1] if name in group_of else ():
            entries.setdefault(other, read[key])
    _refuse_large(source.path, {key: read[key].nbytes for key in whole_keys}, most_bytes)
    versions = source.document("versions")
    decoded = None if versions is None else {name: decode_small(value) for name, value in versions.items()}
    return HookedState(entries, frozenset(absent), frozenset(reported), decoded), targets


def _refuse_large(path: str, whole: Mapping[str, int], most_bytes: int) -> None:
    if sum(whole.values()) > most_bytes:
        largest = max(whole, key=lambda key: whole[key])
        raise StateError(
            f"cannot load {path!r}: load hooks of the model need {len(whole)} stored tensors, "
            f"{sum(whole.values()):,} bytes, that the model has under other names or in other shapes, so that "
            f"every rank would read them whole; the largest is {largest!r}. Load it once in one process "
            "(load_from_checkpoint), and save it again."
        )
