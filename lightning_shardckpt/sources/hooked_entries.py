"""Stored entries that a load reads beside the module, since load hooks of the module see them first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.state.dtensor_layout import new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.module_io import HookedState, LoadHooks, Prefixes
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

_MOST_WHOLE_BYTES = 4 << 30
"""The largest total size of entries that every rank may read whole, since no live tensor tells how to shard them."""


class HookedEntries:
    """The entries of a checkpoint that load hooks see, known before anything is read.

    Args:
        hooks: of the modules.
        source: the stored state.
        live: the leaves of the modules.
        values: names of the modules' entries that are not tensors.
        names: all names of each live tensor, see ``names_of``.
        elsewhere: names of entries that only other pipeline stages have.

    Attributes:
        names: the stored names.
    """

    def __init__(
        self,
        hooks: LoadHooks,
        source: Source,
        live: Leaves,
        values: Collection[str],
        names: Mapping[str, list[str]],
        elsewhere: frozenset[str],
    ) -> None:
        self._source, self._elsewhere, self._names = source, elsewhere, names
        self._stored = source.components().get("model", Component({}))
        known = {key: key for key in self._stored.tensors} | dict(self._stored.aliases)
        self._known, self._document = known, source.document("model") or {}
        prefixes = Prefixes(())
        if hooks.before or hooks.of_libraries:
            shapes = {name: self._stored.tensors[key].shape for name, key in known.items()}
            here = {name: tuple(shape_of(live.tensors[key])) for key, group in names.items() for name in group}
            stored_values = dict.fromkeys(self._document, ())
            prefixes = hooks.prefixes_seen(shapes | stored_values, here | dict.fromkeys(values, ()), elsewhere)
        self._is_hooked: Callable[[str], bool] = prefixes
        self._live = {
            name: live.tensors[key]
            for key, group in (names.items() if prefixes else ())
            if any(map(prefixes, group))
            for name in group
        }
        inside = {name for name in (*known, *self._document) if self._is_hooked(name)}
        self.names = frozenset(inside | (self._live.keys() & known.keys()))
        self._unmatched = set[str]()
        self._absent = {name for name in values if self._is_hooked(name) and name not in self._document}
        self._is_needed = bool(self.names or hooks.before or hooks.after)

    def filled_in_place(self, live: Leaves) -> Leaves:
        """Return the live tensors that are filled in place."""
        if not self._live:
            return live
        tensors = {key: tensor for key, tensor in live.tensors.items() if key not in self._live}
        aliases = {alias: of for alias, of in live.aliases.items() if of in tensors}
        return replace(live, tensors=tensors, aliases=aliases)

    def live(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return the live tensors that are not filled in place, by component and name."""
        return [("model", name, tensor) for name, tensor in self._live.items()]

    def unhooked(self, values: Collection[str]) -> set[str]:
        """Return the names of values that no hook sees."""
        return {name for name in values if not self._is_hooked(name)}

    def matched(self) -> dict[str, str]:
        """Return the stored key by live key of tensors that hooks will most likely load unchanged."""
        keys = {name: self._known[name] for name in self._live.keys() & self.names if name in self._names}
        return {n: k for n, k in keys.items() if self._stored.tensors[k].shape == tuple(shape_of(self._live[n]))}

    def note_unmatched(
        self, live: Leaves, matched: Collection[str], left_out: Collection[str], unexpected: Collection[str]
    ) -> None:
        """Record the live names that are not stored, and the stored names that are ``unexpected``, for the hooks."""
        if not self._is_needed:
            return
        stored = {*matched, *self.names, *left_out}
        groups = [group for key, group in self._names.items() if key in live.tensors or key in self._live]
        self._absent |= {name for group in groups if not stored.intersection(group) for name in group}
        self._unmatched = {*unexpected}

    def allocate(self, most_bytes: int = _MOST_WHOLE_BYTES) -> tuple[HookedState, list[ReadTarget]]:
        """Allocate memory for the entries, sharded like the live tensor of the same name and shape if there is one.

        Args:
            most_bytes: the largest total size of entries that every rank reads whole.

        Raises:
            StateError: if more must be read whole.
        """
        state = HookedState(self._is_needed, absent=frozenset(self._absent))
        by_key: dict[str, torch.Tensor] = {}
        names = sorted(self.names | (self._unmatched & self._known.keys()))
        for name in sorted(names, key=lambda name: name not in self._live):
            if name not in self._known:
                state.entries[name] = decode_small(self._document[name])
                continue
            key = self._known[name]
            if key not in by_key:
                by_key[key] = self._allocate_one(name, key, is_read=name in self.names)
            state.entries[name] = by_key[key]
        self._refuse_large(by_key, most_bytes)
        for group in self._names.values():
            one = next((name for name in group if name in state.entries), None)
            if one is not None:
                state.entries |= dict.fromkeys(group, state.entries[one])
        versions = self._source.document("versions") if self._is_needed else None
        state.versions = None if versions is None else {name: decode_small(value) for name, value in versions.items()}
        read = [(key, tensor) for key, tensor in by_key.items() if not tensor.is_meta]
        return state, [ReadTarget("model", key, tensor) for key, tensor in read]

    def _allocate_one(self, name: str, key: str, *, is_read: bool) -> torch.Tensor:
        spec, live = self._stored.tensors[key], self._live.get(name)
        dtype = TORCH_DTYPES[spec.dtype]
        if live is not None and spec.shape == tuple(shape_of(live)):
            return new_like(live, dtype)
        if not is_read or name in self._elsewhere:
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        return torch.empty(self._source.checked_shape("model", key), dtype=dtype)

    def _refuse_large(self, by_key: Mapping[str, torch.Tensor], most_bytes: int) -> None:
        like = {self._known[name] for name in self._live.keys() & self._known.keys()}
        whole = {key: tensor.nbytes for key, tensor in by_key.items() if key not in like and not tensor.is_meta}
        if sum(whole.values()) > most_bytes:
            largest = max(whole, key=lambda key: whole[key])
            raise StateError(
                f"cannot load {self._source.path!r}: load hooks of the model need {len(whole)} stored tensors, "
                f"{sum(whole.values()):,} bytes, that the model has under other names or in other shapes, so that "
                f"every rank would read them whole; the largest is {largest!r}. Load it once in one process "
                "(load_from_checkpoint), and save it again."
            )
