"""Stored entries that a load reads beside the module, since code of the module must see them before they are in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch

from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.state.compound_tensors import MARK
from lightning_shardckpt.state.dtensor_layout import new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.module_io import ForCode, LoadCode, Scopes
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES

_MOST_WHOLE_BYTES = 4 << 30
"""So much may be read whole on every rank, of entries that no tensor of the module says how to shard."""


class SetAside:
    """What of a checkpoint is set aside, found before anything is read.

    Args:
        code: of the modules.
        source: what is stored.
        live: the leaves of the modules.
        values: names of their entries that are no tensors.
        names: all names of each live tensor, see ``names_of``.
        elsewhere: names of what only other pipeline stages have.
    """

    def __init__(
        self,
        code: LoadCode,
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
        scopes = Scopes(())
        if code.before or code.of_libraries:
            shapes = {name: self._stored.tensors[key].shape for name, key in known.items()}
            here = {name: tuple(shape_of(live.tensors[key])) for key, group in names.items() for name in group}
            stored_values = dict.fromkeys(self._document, ())
            scopes = code.scopes(shapes | stored_values, here | dict.fromkeys(values, ()), elsewhere)
        self._scopes: Callable[[str], bool] = lambda name: MARK not in name and scopes(name)
        self._live = {
            name: live.tensors[key]
            for key, group in (names.items() if scopes else ())
            if MARK not in key and any(map(scopes, group))
            for name in group
        }
        inside = {name for name in (*known, *self._document) if self._scopes(name)}
        self.names = frozenset(inside | (self._live.keys() & known.keys()))
        """Stored names."""
        self._strangers, self._kept = set[str](), set[str]()
        self._absent = {name for name in values if self._scopes(name) and name not in self._document}
        self.is_needed = bool(self.names or code.before or code.after)

    def rest_of(self, live: Leaves) -> Leaves:
        """Return the live tensors that are filled in place."""
        if not self._live:
            return live
        tensors = {key: tensor for key, tensor in live.tensors.items() if key not in self._live}
        aliases = {alias: of for alias, of in live.aliases.items() if of in tensors}
        return replace(live, tensors=tensors, aliases=aliases)

    def live(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return the live tensors that are not filled in place, by component and name."""
        return [("model", name, tensor) for name, tensor in self._live.items()]

    def outside(self, values: Collection[str]) -> set[str]:
        """Return the names of values that are matched as usual."""
        return {name for name in values if not self._scopes(name)}

    def matched(self) -> dict[str, str]:
        """Live key → stored key of tensors that are set aside and will most likely be loaded as they are."""
        found = {name: self._known[name] for name in self._live.keys() & self.names if name in self._names}
        return {n: k for n, k in found.items() if self._stored.tensors[k].shape == tuple(shape_of(self._live[n]))}

    def differing_dtypes(self) -> Iterator[tuple[str, str]]:
        """Yield the names of tensors whose dtype differs, which is to be an error, and what differs."""
        for name, key in self.matched().items():
            there, here = self._stored.tensors[key].dtype, DTYPES.get(local_tensor(self._live[name]).dtype)
            if there != here:
                yield name, f"dtype {there} in checkpoint, {here} in model"

    def note_absent(
        self, live: Leaves, matched: Collection[str], left_out: Collection[str], strangers: Collection[str]
    ) -> None:
        """Take note of what matched nothing, among what is filled in place: live names, and ``strangers``, stored ones.
        """
        if not self.is_needed:
            return
        there = {*matched, *self.names, *left_out}
        groups = [group for key, group in self._names.items() if key in live.tensors or key in self._live]
        self._absent |= {name for group in groups if not there.intersection(group) for name in group}
        self._strangers = {*strangers}

    def skip(self, skips: Callable[[str], bool]) -> None:
        """Leave out what is to stay as it is."""
        self._kept = {name for name in self.names | self._live.keys() if skips(name)}
        self.names -= self._kept
        self._absent = {name for name in self._absent if not skips(name)}
        self._strangers = {name for name in self._strangers if not skips(name)}

    def allocate(self, most_bytes: int = _MOST_WHOLE_BYTES) -> tuple[ForCode, list[ReadTarget]]:
        """Make memory for what is set aside, laid out like the module's tensors where those have its name and shape.

        Args:
            most_bytes: may be whole on every rank.

        Raises:
            StateError: if that is not enough.
        """
        there = ForCode(self.is_needed, absent=frozenset(self._absent), kept=frozenset(self._kept))
        by_key: dict[str, torch.Tensor] = {}
        names = sorted(self.names | (self._strangers & self._known.keys()))
        for name in sorted(names, key=lambda name: name not in self._live):
            if name not in self._known:
                there.entries[name] = decode_small(self._document[name])
                continue
            key = self._known[name]
            if key not in by_key:
                by_key[key] = self._memory(name, key, is_read=name in self.names)
            there.entries[name] = by_key[key]
        self._refuse_large(by_key, most_bytes)
        for group in self._names.values():
            one = next((name for name in group if name in there.entries), None)
            if one is not None:
                there.entries |= dict.fromkeys(group, there.entries[one])
        versions = self._source.document("versions") if self.is_needed else None
        there.versions = None if versions is None else {name: decode_small(value) for name, value in versions.items()}
        read = [(key, tensor) for key, tensor in by_key.items() if not tensor.is_meta]
        return there, [ReadTarget("model", key, tensor, fresh=True) for key, tensor in read]

    def _memory(self, name: str, key: str, *, is_read: bool) -> torch.Tensor:
        spec, live = self._stored.tensors[key], self._live.get(name)
        dtype = TORCH_DTYPES[spec.dtype]
        if live is not None and spec.shape == tuple(shape_of(live)):
            return new_like(live, dtype)
        if not is_read or name in self._elsewhere:
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        return torch.empty(self._source.backed("model", key), dtype=dtype)

    def _refuse_large(self, by_key: Mapping[str, torch.Tensor], most_bytes: int) -> None:
        like = {self._known[name] for name in self._live.keys() & self._known.keys()}
        whole = {key: tensor.nbytes for key, tensor in by_key.items() if key not in like and not tensor.is_meta}
        if sum(whole.values()) > most_bytes:
            largest = max(whole, key=lambda key: whole[key])
            raise StateError(
                f"cannot load {self._source.path!r}: {len(whole)} stored tensors, {sum(whole.values()):,} bytes, are "
                "for hooks of the model that run when it is loaded, since the model has them under other names or in "
                f"other shapes, so that every rank would read them whole; the largest is {largest!r}. Load it once in "
                "one process (load_from_checkpoint), and save it anew."
            )
