"""The match table of a load: which stored tensor each live one of the model takes, or why it takes none.

It is made once; ties, adapters, code of modules, dtypes and skips are filters over it. Changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_shardckpt.checkpoint.load_targets import LoadTargets, Skips
from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.format.clean_fqn import base_fqn
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.set_aside import SetAside
from lightning_shardckpt.sources.source import Source, are_equal
from lightning_shardckpt.sources.source_view import converts
from lightning_shardckpt.state.compound_tensors import MARK, describe_record
from lightning_shardckpt.state.model import names_of
from lightning_shardckpt.state.module_io import NO_CODE, Scopes
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES

_IN_MODEL, _IN_CHECKPOINT = "in model only", "in checkpoint only"


@dataclass(slots=True, eq=False)
class MatchRow:
    """A live tensor of the model.

    Attributes:
        key: its name.
        names: all its names: of ties, of other pipeline stages, and from before PEFT wrapped the model.
        tensor: the live tensor.
        stored: key of the stored tensor that it takes; None if it takes none.
        problems: the differences between the two.
    """

    key: str
    names: list[str]
    tensor: torch.Tensor
    stored: str | None = None
    problems: list[str] = field(default_factory=list)


class ModelMatch:
    """The rows of the model, and differences in what is no tensor of it.

    Args:
        source: what is stored, under the names of the model.
        targets: what is live.
        skips: notes which patterns are the name of something.
        elsewhere: names of what only other pipeline stages have.
        strict: whether differences are errors.

    Attributes:
        stored: the model as it is stored.
        kept: keys of adapters that the checkpoint does not have.
        rows: of the tensors that are filled in place.
        aside: what is left to code of the modules.
    """

    def __init__(
        self, source: Source, targets: LoadTargets, skips: Skips, elsewhere: frozenset[str], *, strict: bool
    ) -> None:
        self._source, self._targets, self._skips, self._elsewhere = source, targets, skips, elsewhere
        self.stored = source.components().get("model", Component({}))
        self._known = {key: key for key in self.stored.tensors} | self.stored.aliases
        self._left_out: Mapping[str, Any] = source.document("frozen") or {}
        self._live, self.kept = self._without_adapters()
        self._names = names_of(self._live, targets.whole.ties)
        code = targets.code if self.is_loaded else NO_CODE
        self.aside = SetAside(code, source, self._live, targets.extra_state, self._names, elsewhere)
        rest = self.aside.rest_of(self._live)
        self.rows = [self._row(key, tensor) for key, tensor in rest.tensors.items()]
        self._others = self._compare_others(rest)  # names and what is wrong
        if strict:
            self._leave_to_hooks(Scopes(code.after))
        if targets.skip:
            self._leave_skipped()
        self._taken = self.keys | self.aside.matched()

    @property
    def is_loaded(self) -> bool:
        """Whether the model is loaded, and not its optimizers alone."""
        return "model" in self._targets.parts

    @property
    def keys(self) -> dict[str, str]:
        """Live name → stored key of the tensors that are filled in place."""
        return {row.key: row.stored for row in self.rows if row.stored is not None}

    @property
    def problems(self) -> list[str]:
        """The differences, a line each."""
        lines = [f"{row.key}  {problem}" for row in self.rows for problem in row.problems]
        return lines + [f"{name}  {problem}" for name, problem in self._others]

    def same_tensor(self) -> Callable[[str], Sequence[str]]:
        """Return the rule by which state of parameters is found: by any name of the parameter, live or stored.

        Which name of a tie a model registers first, and which one a checkpoint stores it under, is of no consequence.

        Returns:
            From the name of a live parameter to all names of the tensor, its own first.
        """
        groups = (*self._targets.whole.ties, *self._names.values())  # the latter may have nothing of a lone optimizer
        live = {name: group for group in groups if len(group) > 1 for name in group}
        there: dict[str, list[str]] = {}
        for alias, of in self.stored.aliases.items():
            there.setdefault(of, [of]).append(alias)
        there |= {alias: there[of] for alias, of in self.stored.aliases.items()}

        def same(name: str) -> Sequence[str]:
            own = (name, *live.get(name, ()))
            return list(dict.fromkeys([*own, *(other for one in own for other in there.get(one, ()))]))

        return same

    def dtype(self, name: str) -> str | None:
        """Return the stored dtype of a live tensor; None if it takes nothing."""
        return self.stored.tensors[self._taken[name]].dtype if name in self._taken else None

    def casts(self) -> list[str]:
        """Return which dtypes are converted to which, as people read it."""
        pairs = {
            (self.stored.tensors[row.stored].dtype, local_tensor(row.tensor).dtype)
            for row in self.rows
            if row.stored is not None
        }
        return sorted({f"{a} to {DTYPES[b]}" for a, b in pairs if a != DTYPES[b]})

    def reshaped(self) -> frozenset[str]:
        """Return the names of live tensors that are stored with another shape."""
        if len(self._taken) == len(self._live.tensors):
            return frozenset()
        found = set[str]()
        for key, tensor in self._live.tensors.items():
            stored = next((self._known[name] for name in self._names[key] if name in self._known), None)
            if stored is not None and self.stored.tensors[stored].shape != shape_of(tensor):
                found.update(self._names[key])
        return frozenset(found)

    def _without_adapters(self) -> tuple[Leaves, list[str]]:
        """Return what to look for, and the adapters that are not: of a checkpoint without any, when weights alone are
        loaded.

        What an adapter trains as a whole is a copy of what the base has.
        """
        model, adapters, stored = self._targets.model, self._targets.adapters, self.stored
        if not adapters or self._targets.optimizers is not None:
            return model, []
        if self._source.document("peft") or adapters & stored.tensors.keys():
            return model, []
        kept = {key for key in adapters & model.tensors.keys() if base_fqn(key) not in stored.tensors}
        tensors = {key: tensor for key, tensor in model.tensors.items() if key not in kept}
        aliases = {alias: of for alias, of in model.aliases.items() if of not in kept}
        return replace(model, tensors=tensors, aliases=aliases, pinned=model.pinned - kept), sorted(kept)

    def _row(self, key: str, tensor: torch.Tensor) -> MatchRow:
        """Return the row of a live tensor.

        One that is not stored under any of its names is taken by the name that it had before PEFT wrapped the model.
        """
        row, known, left_out = MatchRow(key, self._names[key], tensor), self._known, self._left_out
        if key in known and len(row.names) == 1:  # a shortcut: nearly all have one name
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
        here = DTYPES.get(dtype)
        if spec.shape != shape_of(tensor):
            row.problems.append(f"shape {spec.shape} in checkpoint, {tuple(tensor.shape)} in model")
            return row
        if len(keys) > 1 and not are_equal(self._source, "model", keys, tensor):
            row.problems.append(f"tied to {row.names[1:]} in the model, stored apart in the checkpoint")
        if spec.dtype == here or (self._targets.cast and converts(spec.dtype, here)):
            row.stored = keys[0]
        else:
            row.problems.append(f"dtype {spec.dtype} in checkpoint, {here or dtype} in model")
        return row

    def _absent(self, key: str, tensor: torch.Tensor, left_out: Any) -> Iterator[str]:
        """Yield what is wrong with a live tensor that is not stored: nothing, if it was left out and is as it was."""
        live = [DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)]
        if left_out is None:
            near = difflib.get_close_matches(key, self._known, n=1, cutoff=0.75)
            yield f"{_IN_MODEL}; the checkpoint has {near[0]!r}" if near else _IN_MODEL
        elif left_out != live:
            there, here = (f"{dtype} {tuple(shape)}" for dtype, shape in (left_out, live))
            yield f"{there} when the checkpoint left it out, {here} in model"

    def _compare_others(self, rest: Leaves) -> list[tuple[str, str]]:
        """Return the differences in values, and what is stored and no live tensor takes."""
        document, bases = self._source.document("model") or {}, {key.partition(MARK)[0] for key in self._left_out}
        records = {k: v for k, v in self._targets.model.records.items() if k.partition(MARK)[0] not in bases}
        there, here = self.aside.outside(document), self.aside.outside({*self._targets.extra_state, *records})
        self._values = there | here
        elsewhere, wanted = self._elsewhere | self.aside.names, {n for names in self._names.values() for n in names}
        unwanted = (((self._known.keys() | self._left_out.keys()) - wanted) | (there - here)) - elsewhere
        strangers = sorted(unwanted - {base_fqn(name) for name in elsewhere} if unwanted else ())
        self.aside.note_absent(rest, self.keys, self._left_out, strangers)
        changed = [
            (name, f"{describe_record(document[name])} in checkpoint, {describe_record(record)} in model")
            for name, record in records.items()
            if document.get(name, record) != record
        ]
        return [
            *((name, _IN_CHECKPOINT) for name in strangers),
            *((name, _IN_MODEL) for name in sorted(here - there)),
            *changed,
            *(self.aside.differing_dtypes() if not self._targets.cast else ()),
        ]

    def _leave_to_hooks(self, after: Scopes) -> None:
        """Take out what is missing or unexpected in modules whose hooks may say that this is right."""
        for row in self.rows if after else ():
            if after(row.key):
                row.problems = [problem for problem in row.problems if not problem.startswith(_IN_MODEL)]
        only = (_IN_MODEL, _IN_CHECKPOINT)
        self._others = [(name, what) for name, what in self._others if not (after(name) and what.startswith(only))]

    def _leave_skipped(self) -> None:
        """Leave what is to be left as it is, which may then differ."""
        self.aside.skip(self._skips)
        names = {*self._known, *self._values, *self._left_out}.union(*self._names.values())
        skipped = {name for name in sorted(names) if self._skips(name)}
        for row in self.rows:
            row.problems = [] if row.key in skipped else row.problems
            row.stored = None if skipped.intersection(row.names) else row.stored
        self._others = [(name, what) for name, what in self._others if name not in skipped]
        for tied in self._names.values():
            left = [name for name in tied if name in skipped]
            if 0 < len(left) < len(tied):
                what = f"is to be skipped, but is one with {[*{*tied} - {*left}]}: skip all names, or none"
                self._others.append((left[0], what))
