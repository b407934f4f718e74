"""Match the model of a checkpoint with the live one, on one rank: names, ties, adapters, skips, code of modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_shardckpt.checkpoint.load_targets import LoadTargets, Skips
from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.format.clean_fqn import base_fqn
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.equal_tensors import are_equal
from lightning_shardckpt.sources.set_aside import SetAside
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.source_view import converts
from lightning_shardckpt.state.compound_tensors import MARK, described
from lightning_shardckpt.state.load_code import NO_CODE
from lightning_shardckpt.state.model import Differences, match_model, names_of, same_tensor
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES


class ModelMatch:
    """The stored tensor that each live one takes, and what differs; changes nothing.

    Args:
        source: what is stored, under the names of the model.
        targets: what is live.
        skips: notes which patterns are the name of something.
        elsewhere: names of what only other pipeline stages have.
        strict: whether differences are errors.

    Attributes:
        stored: the model as it is stored.
        found: the differences.
        kept: keys of adapters that the checkpoint does not have.
        keys: live name → stored key of the tensors that are filled in place.
        aside: what is left to code of the modules.
    """

    def __init__(
        self, source: Source, targets: LoadTargets, skips: Skips, elsewhere: frozenset[str], *, strict: bool
    ) -> None:
        self._source, self._targets, self._skips = source, targets, skips
        self._elsewhere, self._strict = elsewhere, strict
        self.stored, self.found = source.components().get("model", Component({})), Differences()
        self._live, self.kept = self._without_adapters()
        self.names = names_of(self._live, targets.whole.ties)
        code = targets.code if self.is_loaded else NO_CODE
        self.aside = SetAside(code, source, self._live, targets.extra_state, self.names, elsewhere)
        self.keys = self._match(self.aside.rest_of(self._live))
        self._taken = self.keys | self.aside.matched()

    @property
    def is_loaded(self) -> bool:
        """Whether the model is loaded, and not its optimizers alone."""
        return "model" in self._targets.parts

    def same_tensor(self) -> Callable[[str], Sequence[str]]:
        """Return the rule by which state of parameters is found, see ``model.same_tensor``."""
        return same_tensor(self.names, self._targets.whole.ties, self.stored)

    def dtype(self, name: str) -> str | None:
        """Return the stored dtype of a live tensor; None if it takes nothing."""
        return self.stored.tensors[self._taken[name]].dtype if name in self._taken else None

    def casts(self) -> list[str]:
        """Return which dtypes are converted to which, as people read it."""
        tensors = self._live.tensors
        pairs = {(self.stored.tensors[key].dtype, local_tensor(tensors[name]).dtype) for name, key in self.keys.items()}
        return sorted({f"{a} to {DTYPES[b]}" for a, b in pairs if a != DTYPES[b]})

    def reshaped(self) -> frozenset[str]:
        """Return the names of live tensors that are stored with another shape."""
        if len(self._taken) == len(self._live.tensors):
            return frozenset()
        known = {**{key: key for key in self.stored.tensors}, **self.stored.aliases}
        found = set[str]()
        for key, tensor in self._live.tensors.items():
            there = next((self.stored.tensors[known[name]] for name in self.names[key] if name in known), None)
            if there is not None and there.shape != shape_of(tensor):
                found.update(self.names[key])
        return frozenset(found)

    def _match(self, live: Leaves) -> dict[str, str]:
        """Return the stored key of each live tensor that can be loaded, and is not to be skipped; note the rest."""
        stored, found = self.stored, self.found
        document, left_out = self._source.document("model") or {}, self._source.document("frozen")
        bases = {key.partition(MARK)[0] for key in left_out or ()}
        records = {k: v for k, v in self._targets.model.records.items() if k.partition(MARK)[0] not in bases}
        aside = self.aside
        extra = aside.outside(document), aside.outside({*self._targets.extra_state, *records})
        matched = match_model(
            stored,
            live,
            self.names,
            extra,
            found,
            elsewhere=self._elsewhere | aside.names,
            left_out=left_out,
            alike=partial(are_equal, self._source, "model"),
            converts=converts if self._targets.cast else operator.eq,
        )
        for name in [name for name, record in records.items() if document.get(name, record) != record]:
            found.add(name, f"{described(document[name])} in checkpoint, {described(records[name])} in model")
        if not self._targets.cast:
            aside.compare_dtypes(found)
        aside.note_absent(live, matched, left_out or (), found)
        if self._strict:
            aside.leave_to_hooks(found)
        if not self._targets.skip:
            return matched
        aside.skip(self._skips)
        known = {*stored.tensors, *stored.aliases, *extra[0], *extra[1], *(left_out or {})}
        return self._without_skipped(matched, known)

    def _without_skipped(self, matched: dict[str, str], known: set[str]) -> dict[str, str]:
        """Return what matches, without what is to be left as it is, which may then differ."""
        names, found = self.names, self.found
        skipped = {name for name in sorted(known.union(*names.values())) if self._skips(name)}
        found.problems = [line for line in found.problems if line.partition("  ")[0] not in skipped]
        for tied in names.values():
            left = [name for name in tied if name in skipped]
            if 0 < len(left) < len(tied):
                found.add(left[0], f"is to be skipped, but is one with {[*{*tied} - {*left}]}: skip all names, or none")
        return {key: stored for key, stored in matched.items() if not skipped.intersection(names[key])}

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
