"""The match table of a load: the stored tensor for each live tensor of the model, or the reason for none.

It is built once; ties, adapters, load hooks and dtypes are filters over it. Changes no live object.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_shardckpt.checkpoint.load_targets import LoadTargets
from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.format.clean_fqn import base_fqn
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.reading import ReadTarget, are_equal, converts
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.dtensor_layout import new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.load_hooks import NO_HOOKS, HookedState, LoadHooks
from lightning_shardckpt.state.model import names_of
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES

_IN_MODEL, _IN_CHECKPOINT = "in model only", "in checkpoint only"


@dataclass(slots=True, eq=False)
class MatchRow:
    """A live tensor of the model.

    Attributes:
        key: its name.
        names: all its names: of ties, on other pipeline stages, and before PEFT wrapped the model.
        tensor: the live tensor.
        stored: key of the matching stored tensor, or None.
        problems: the differences between the two.
        left_to_hooks: True if code of the model may remove the differences when it is loaded.
    """

    key: str
    names: list[str]
    tensor: torch.Tensor
    stored: str | None = None
    problems: list[str] = field(default_factory=list)
    left_to_hooks: bool = False

    @property
    def is_missing(self) -> bool:
        """True if the checkpoint does not have the tensor."""
        return any(problem.startswith(_IN_MODEL) for problem in self.problems)


class ModelMatch:
    """The rows of the model's tensors, and the differences in its other entries.

    Args:
        source: the stored state, under the names of the model.
        targets: the live objects.
        elsewhere: names that only other pipeline stages have.

    Attributes:
        stored: the stored model.
        kept: keys of adapters that the checkpoint does not have.
        rows: of the tensors.
        is_hooked: True if the model's own code loads its entries; otherwise they are filled in place.
        unexpected: names that only the checkpoint has.
    """

    def __init__(self, source: Source, targets: LoadTargets, elsewhere: frozenset[str] = frozenset()) -> None:
        self._source, self._targets, self._elsewhere = source, targets, elsewhere
        self.stored = source.components().get("model", Component({}))
        self._known = {key: key for key in self.stored.tensors} | self.stored.aliases
        self._left_out: Mapping[str, Any] = source.document("frozen") or {}
        self._live, self.kept = self._without_adapters()
        self._names = names_of(self._live, targets.whole.ties)
        hooks = targets.hooks if self.is_loaded else NO_HOOKS
        self.rows = [self._row(key, tensor) for key, tensor in self._live.tensors.items()]
        stored = {*(source.document("model") or {})}
        self.unexpected = self._unexpected_names(stored)
        self._missing_values = sorted(targets.extra_state - stored)
        self._seen = self._seen_by_hooks(hooks) if hooks.before or hooks.of_libraries else ()
        self.is_hooked = bool(self._seen or hooks.after or hooks.of_all)
        self._left_to_hooks = list[str]()
        self._leave_to_hooks((*self._seen, *hooks.after))
        self._matched = self.keys

    @property
    def is_loaded(self) -> bool:
        """True if the model is loaded, False if only its optimizers are."""
        return self._targets.has_model

    @property
    def is_full(self) -> bool:
        """True if every live tensor gets a value, unless there are problems: none was left out by the save."""
        return not self.kept and not self._left_out

    @property
    def keys(self) -> dict[str, str]:
        """The stored keys of the tensors that are loaded, by live name."""
        return {row.key: row.stored for row in self.rows if row.stored is not None}

    @property
    def problems(self) -> list[str]:
        """The differences, a line each."""
        lines = [f"{row.key}  {problem}" for row in self.rows for problem in row.problems]
        lines += [f"{name}  {_IN_CHECKPOINT}" for name in self.unexpected]
        return lines + [f"{name}  {_IN_MODEL}" for name in self._missing_values]

    def same_tensor(self) -> Callable[[str], Sequence[str]]:
        """Return a function that maps the name of a live parameter to all names of its tensor, its own first.

        The state of a parameter is found by any of these names, live or stored, so it does not matter under which name
        of a tie the model registers it or the checkpoint stores it.
        """
        groups = (*self._targets.whole.ties, *self._names.values())  # the latter is empty if only optimizers are loaded
        live = {name: group for group in groups if len(group) > 1 for name in group}
        stored: dict[str, list[str]] = {}
        for alias, key in self.stored.aliases.items():
            stored.setdefault(key, [key]).append(alias)
        stored |= {alias: stored[key] for alias, key in self.stored.aliases.items()}

        def names_of_tensor(name: str) -> Sequence[str]:
            own = (name, *live.get(name, ()))
            return list(dict.fromkeys([*own, *(other for alias in own for other in stored.get(alias, ()))]))

        return names_of_tensor

    def dtype(self, name: str) -> str | None:
        """Return the dtype of the stored tensor that a live one matches; None without a match."""
        return self.stored.tensors[self._matched[name]].dtype if name in self._matched else None

    def casts(self) -> list[str]:
        """Return the dtype conversions of the load, as readable text."""
        pairs = {
            (self.stored.tensors[row.stored].dtype, local_tensor(row.tensor).dtype)
            for row in self.rows
            if row.stored is not None
        }
        return sorted({f"{a} to {DTYPES[b]}" for a, b in pairs if a != DTYPES[b]})

    def reshaped(self) -> frozenset[str]:
        """Return the names of live tensors whose stored shape differs."""
        if len(self._matched) == len(self._live.tensors):
            return frozenset()
        names = set[str]()
        for key, tensor in self._live.tensors.items():
            stored = next((self._known[name] for name in self._names[key] if name in self._known), None)
            if stored is not None and self.stored.tensors[stored].shape != shape_of(tensor):
                names.update(self._names[key])
        return frozenset(names)

    def _without_adapters(self) -> tuple[Leaves, list[str]]:
        """Return the live tensors to load, and the keys of adapters that keep their values.

        Adapters keep them if only weights are loaded from a checkpoint without adapters. A module that an adapter
        trains as a whole is a copy of the base's, and takes the base's values.
        """
        model, adapters, stored = self._targets.model, self._targets.adapters, self.stored
        if not adapters or self._targets.optimizers is not None:
            return model, []
        copies = {key for key in adapters & stored.tensors.keys() if ".modules_to_save." in key}  # by name
        if self._source.document("peft") or adapters & stored.tensors.keys() - copies:
            return model, []
        kept = {key for key in adapters & model.tensors.keys() - copies if base_fqn(key) not in stored.tensors}
        tensors = {key: tensor for key, tensor in model.tensors.items() if key not in kept}
        aliases = {alias: of for alias, of in model.aliases.items() if of not in kept}
        return replace(model, tensors=tensors, aliases=aliases, pinned=model.pinned - kept), sorted(kept)

    def _row(self, key: str, tensor: torch.Tensor) -> MatchRow:
        """Return the row of a live tensor.

        A tensor that is not stored under any of its names is matched by its name before PEFT wrapped the model.
        """
        row, known, left_out = MatchRow(key, self._names[key], tensor), self._known, self._left_out
        if key in known and len(row.names) == 1:  # a shortcut: nearly all tensors have one name
            keys = [known[key]]
        else:
            keys = list(dict.fromkeys(known[name] for name in row.names if name in known))
        absent = next((left_out[name] for name in row.names if name in left_out), None) if left_out else None
        if not keys and absent is None:
            row.names.extend([name for name in map(base_fqn, row.names) if name in known])
            keys = [known[name] for name in row.names if name in known][:1]
        if not keys:
            row.problems += self._absent(key, tensor, absent)
            return row
        spec, dtype = self.stored.tensors[keys[0]], local_tensor(tensor).dtype
        live_dtype = DTYPES.get(dtype)
        if spec.shape != shape_of(tensor):
            row.problems.append(f"shape {spec.shape} in checkpoint, {tuple(tensor.shape)} in model")
            return row
        if len(keys) > 1 and not are_equal(self._source, "model", keys, tensor):
            row.problems.append(f"tied to {row.names[1:]} in the model, stored apart in the checkpoint")
        if spec.dtype == live_dtype or converts(spec.dtype, live_dtype):
            row.stored = keys[0]
        else:
            row.problems.append(f"dtype {spec.dtype} in checkpoint, {live_dtype or dtype} in model")
        return row

    def _absent(self, key: str, tensor: torch.Tensor, left_out: Any) -> Iterator[str]:
        """Yield the problem of a live tensor that is not stored; none if it was left out with this dtype and shape."""
        live = [DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)]
        if left_out is None:
            near = difflib.get_close_matches(key, self._known, n=1, cutoff=0.75)
            yield f"{_IN_MODEL}; the checkpoint has {near[0]!r}" if near else _IN_MODEL
        elif left_out != live:
            before, now = (f"{dtype} {tuple(shape)}" for dtype, shape in (left_out, live))
            yield f"{before} when the checkpoint left it out, {now} in model"

    def _unexpected_names(self, values: set[str]) -> list[str]:
        """Return the stored entries without a live one; ``values`` are those that are not tensors."""
        names = {name for group in self._names.values() for name in group}
        unexpected = (self._known.keys() | self._left_out.keys()) - names | values - self._targets.extra_state
        unexpected -= self._elsewhere
        return sorted(unexpected - {base_fqn(name) for name in self._elsewhere} if unexpected else ())

    def _seen_by_hooks(self, hooks: LoadHooks) -> tuple[str, ...]:
        """Return the prefixes of entries that hooks see before the load."""
        document, names = self._source.document("model") or {}, self._names
        stored = {name: self.stored.tensors[key].shape for name, key in self._known.items()}
        live = {name: tuple(shape_of(self._live.tensors[key])) for key, group in names.items() for name in group}
        values = dict.fromkeys(self._targets.extra_state, ())
        return hooks.prefixes_seen(stored | dict.fromkeys(document, ()), live | values, self._elsewhere)

    def is_seen(self, row: MatchRow) -> bool:
        """Return True if hooks see a tensor before it is loaded."""
        return any(name.startswith(self._seen) for name in row.names)

    def _leave_to_hooks(self, scope: tuple[str, ...]) -> None:
        """Drop the differences that hooks may remove before the load, and those that hooks after it may accept."""
        for row in self.rows if scope else ():
            if self.is_seen(row):
                row.problems, row.left_to_hooks = [], row.stored is None
            elif row.key.startswith(scope) and row.is_missing:
                row.problems, row.left_to_hooks = [], True
        self._left_to_hooks = [name for name in self.unexpected if name.startswith(scope)]
        self.unexpected = [name for name in self.unexpected if not name.startswith(scope)]
        self._missing_values = [name for name in self._missing_values if not name.startswith(scope)]

    def allocate(self) -> tuple[HookedState, list[ReadTarget]]:
        """Allocate memory for the entries that the model's own code loads, sharded like the live tensors.

        Entries that hooks see under names or in shapes that no live tensor has are whole on every rank.

        Returns:
            The entries, and the tensors to fill.
        """
        source, specs, targets = self._source, self.stored.tensors, list[ReadTarget]()
        read, kept, reported = dict[str, torch.Tensor](), {*self.kept}, {*self._missing_values}
        document, hidden = source.document("model") or {}, {*self.unexpected}
        entries = {name: decode_small(value) for name, value in document.items() if name not in hidden}
        own = {*self._live.tensors, *self._live.aliases, *self._targets.whole.state}  # not names before PEFT
        for row in self.rows:
            if row.stored is not None:
                tensor = read[row.stored] = new_like(row.tensor, TORCH_DTYPES[specs[row.stored].dtype])
                targets.append(ReadTarget("model", row.stored, tensor))
                entries |= dict.fromkeys((name for name in row.names if name in own), tensor)
            elif not row.left_to_hooks:
                (reported if row.problems else kept).update(row.names)
        rows = {name: row for row in self.rows for name in row.names}
        loaded = {name for name, row in rows.items() if row.stored is not None}
        rest = {*self._left_to_hooks, *(name for name in self._known if name.startswith(self._seen))}
        for name in sorted((rest & self._known.keys()) - loaded, key=lambda name: (name not in rows, name)):
            key = self._known[name]
            if key not in read:
                read[key] = self._allocate_other(name, rows.get(name))
                targets += [ReadTarget("model", key, read[key])] if not read[key].is_meta else []
            entries[name] = read[key]
            for other in rows[name].names if name in rows else ():
                entries.setdefault(other, read[key])
        versions = source.document("versions")
        decoded = None if versions is None else {name: decode_small(value) for name, value in versions.items()}
        return HookedState(entries, frozenset(kept), frozenset(reported), decoded), targets

    def _allocate_other(self, name: str, row: MatchRow | None) -> torch.Tensor:
        """Return memory for an entry that fits no live tensor; on the meta device if no hook of this rank sees it."""
        key = self._known[name]
        spec, dtype = self.stored.tensors[key], TORCH_DTYPES[self.stored.tensors[key].dtype]
        if row is not None and spec.shape == tuple(shape_of(row.tensor)):
            return new_like(row.tensor, dtype)
        if name in self._elsewhere or not name.startswith(self._seen):
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        return torch.empty(self._source.checked_shape("model", key), dtype=dtype)
