"""Matching of a model's tensors with stored tensors by name, for the whole model, before it is sharded.

The saved model may be a part of the LightningModule, the base of a model with a head, or not yet wrapped. All ways of
matching names are tried, and the one that matches most tensors is used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_shardckpt.compat.transformers import patterns_that_may_be_missing, patterns_that_may_be_unexpected
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.clean_fqn import without_peft_layers
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.foreign_source import ForeignTensor, ForeignTensors
from lightning_shardckpt.sources.hf_conversion import (
    Conversions,
    JoinedSource,
    UnsupportedError,
    convert,
    hugging_face_models,
)
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.reading import are_equal
from lightning_shardckpt.sources.source import Source, StoredTensor
from lightning_shardckpt.sources.source_view import model_names, rename_source
from lightning_shardckpt.state.json_tree import refuse_tensor
from lightning_shardckpt.state.model import WholeNames, is_extra_state
from lightning_shardckpt.state.module_versions import rename_versions
from lightning_shardckpt.state.peft_names import added_names, live_names_in_file
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import VERSION
from lightning_shardckpt.system.text import count_text, list_some

# ── as a source ───────────────────────────────────────────────────────────────────────────────────────────────────────


def has_weights_only(source: Source) -> bool:
    """Return whether a source has only weights from another program, whose names may differ from the model's.

    Checkpoints of Lightning and of this package have the model's names, and so have those with optimizer state.
    """
    stored = source.original or source
    if stored.is_own or stored.document("optimizer") is not None:
        return False
    return "model" in stored.components() and VERSION not in stored.trainer(refuse_tensor)


def fit_to(source: Source, *, module: nn.Module, live: Leaves, whole: WholeNames) -> tuple[Source, list[str]]:
    """Return the source under the model's names, and problems, a line each.

    Args:
        source: the stored state; returned unchanged unless it ``has_weights_only``.
        module: the live model.
        live: its tensors.
        whole: its names over all pipeline stages.
    """
    if not has_weights_only(source):
        return source, []
    ties = whole.ties or [(key, *(a for a, of in live.aliases.items() if of == key)) for key in live.tensors]
    ties = tuple(tie for tie in ties if len(tie) > 1)
    match = match_model(source, module, WholeNames(whole.state or frozenset((*live.tensors, *live.aliases)), ties))
    problems = match.problems + [f"{tie}  tied in the model, stored apart in the checkpoint" for tie in match.untied]
    return apply_match(source, match, ties), problems


def map_names(
    source: Source,
    mapping: KeyMapping,
    *,
    prefix: str = "",
    move: Callable[[str], str | None] | None = None,
    optimizers: Sequence[int] | None = None,
) -> tuple[Source, list[str]]:
    """Return the source under the names that the user's mapping gives, and its unused entries, a line each.

    Args:
        source: the stored state.
        mapping: of the user, from stored names without ``prefix``.
        prefix: of the stored names; others are left out.
        move: returns the name in the result by mapped name, None to leave it out.
        optimizers: the numbers of the stored optimizers that are 0, 1, … in the result; all by default.

    Raises:
        MismatchError: if entries of the mapping are the wrong way round, or give a name several times.
    """
    if mapping.is_empty and move is None:
        return source, []
    known = sorted(name.removeprefix(prefix) for name in model_names(source) if name.startswith(prefix))
    if suggestions := mapping.suggest(known):
        raise MismatchError(f"cannot load {source.path!r}: {mapping.option}: " + "\n  ".join(suggestions))
    problems = [f"{mapping.option}: {old!r}  matches no name in the checkpoint" for old in mapping.unused(known)]
    names = ((move(new) if move else new, prefix + stored) for new, stored in mapping.apply(known).items())
    kept = {name: stored for name, stored in names if name is not None}
    left_out = [prefix + name for name in known if mapping(name) is None]
    numbers = range(len(source.document("optimizer") or ())) if optimizers is None else optimizers
    return rename_source(source, kept, numbers, left_out), problems


def apply_match(source: Source, match: Match, ties: Iterable[tuple[str, ...]] = ()) -> Source:
    """Return a source under the names of a model; tensors that the model lacks get the names they would have there.

    Args:
        source: the stored state, which the caller closes.
        match: of the stored tensors with the model's.
        ties: of the whole model, as names.
    """
    aliases = {name: tie[0] for tie in ties for name in tie[1:] if name in match.names}
    others = {name: key for name, (_, key) in match.others.items() if name not in match.names}
    table = {name: source.table["model"][key] for name, key in {**others, **match.stored}.items()}
    if match.converted:
        converted = ForeignTensors(source.path, source.tensors.reader, {"model": match.converted})
        specs = converted.components["model"].tensors
        table |= {name: StoredTensor(converted, "model", name, spec) for name, spec in specs.items()}
    table = {name: place for name, place in table.items() if name not in aliases}
    values = source.document("model")
    documents = {"versions": rename_versions(source.document("versions"), match.stored)}
    if values:
        documents["model"] = {name: values[old] for name, old in match.values.items()}
    return source.with_names({"model": table}, {"model": aliases}, documents)


# ── matching ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Match:
    """Stored tensors matched with the model's.

    Attributes:
        stored: keys of stored tensors, by name in the model.
        converted: tensors that conversions make, by name in the model.
        missing: names in the model that are not stored, one of each tie, without adapters.
        unexpected: stored names that the model does not have.
        others: stored name and key of the unexpected tensors, by the name that they would have in the model.
        values: stored names of entries that are not tensors, by name in the model.
        problems: tensors that cannot be loaded and why, a line each.
        untied: names that are tied in the model and stored with several values; the first is used.
        unused: entries of the user's mapping that match no stored name, a line each.
    """

    stored: dict[str, str] = field(default_factory=dict)
    converted: dict[str, ForeignTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    others: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        """Names in the model that get a value."""
        return frozenset(self.stored) | frozenset(self.converted)


@dataclass(slots=True)
class _Candidate:
    """One way to match names.

    Attributes:
        live: names in the model, by name relative to ``module_name``.
        hits: the stored name or the stored tensors to join, by relative name.
        module_name: of the matched part of the model.
        model: of transformers, if its conversions are applied.
        stored_prefix: is removed from stored names.
        has_adapter: whether tensors of an adapter match.
    """

    live: Mapping[str, list[str]]
    hits: Mapping[str, str | JoinedSource]
    module_name: str
    model: nn.Module | None = None
    stored_prefix: str = ""
    has_adapter: bool = False

    def name(self, stored: str) -> str:
        """Return the name in the model of a stored name."""
        return (f"{self.module_name}." if self.module_name else "") + stored.removeprefix(self.stored_prefix)

    @property
    def score(self) -> int:
        return sum(len(self.live[name]) for name in self.hits)


def match_model(source: Source, module: nn.Module, whole: WholeNames, option: str = "key_mapping") -> Match:
    """Match the stored tensors with those of a model.

    Args:
        source: of the component "model".
        module: the LightningModule, or any stage of a pipeline.
        whole: names of the whole model.
        option: the name of the user's mapping, for errors.

    Raises:
        MismatchError: if nothing matches, or several parts of the model match equally.
    """
    component = source.components().get("model", Component({}))
    keys = {key: key for key in component.tensors} | component.aliases
    state = [name for name in whole.state if not is_extra_state(name)]
    candidates = list(_candidates(keys, state, module))
    best = max(candidates, key=lambda candidate: candidate.score)  # the first of several
    with_adapter = [c for c in candidates if c.has_adapter and len(c.hits) >= len(best.hits)]
    best = max(with_adapter, key=lambda candidate: candidate.score, default=best)
    part = best.module_name
    rivals = [c for c in candidates if c.score == best.score and part and not _nested(c.module_name, part)]
    if rivals and best.score:
        raise MismatchError(
            f"the weights at {source.path!r} fit {part!r} and {rivals[0].module_name!r} of {type(module).__name__} "
            f'alike; say which is meant, such as {option}={{"^": "{part}."}}'
        )
    if not best.score:
        raise MismatchError(
            f"no tensor at {source.path!r} has a name that {type(module).__name__} has. Stored are, for example, "
            f"{sorted(keys)[:3]}; the model has {sorted(state)[:3]}. Give a {option}."
        )
    match = _make_match(best, keys, source, whole)
    match.values = {best.name(name): name for name in source.document("model") or {}}
    return match


def _nested(a: str, b: str) -> bool:
    """Return whether one of two module names contains the other one, or both are equal."""
    return not a or f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _candidates(names: Mapping[str, str], state: Collection[str], module: nn.Module) -> Iterator[_Candidate]:
    everything = _relative(state, "")
    yield _Candidate(everything, {n: n for n in names if n in everything}, "")
    children = dict.fromkeys(f"{name}." for name, _ in module.named_children())
    yield from (_of_adapter(names, state, prefix) for prefix in ["", *children])
    for prefix, model in hugging_face_models(module).items():
        live = _relative(state, f"{prefix}." if prefix else "")
        sources = Conversions(model).apply(names, live.__contains__)
        yield _Candidate(live, {name: where for name, where in sources.items() if name in live}, prefix, model)
    prefixes = {common_prefix(state), *children} - {""}
    for prefix in ["", *sorted(prefixes)]:
        live = _relative(state, prefix)
        for stored_prefix in dict.fromkeys(["", common_prefix(names)]):
            hits = {short: n for n in names if (short := n.removeprefix(stored_prefix)) in live}
            yield _Candidate(live, hits, prefix[:-1], stored_prefix=stored_prefix)


def _of_adapter(names: Mapping[str, str], state: Collection[str], prefix: str) -> _Candidate:
    """Return the match with a model of PEFT below a prefix, by its own names or those in PEFT's files."""
    inside = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    in_file = live_names_in_file(inside)
    live = {name: [prefix + name] for name in inside} | {short: [prefix + name] for short, name in in_file.items()}
    adapters = added_names(inside)
    hits = {n: n for n in names if n in live}
    has_adapter = any(name in adapters or in_file.get(name) in adapters for name in hits)
    return _Candidate(live, hits, prefix[:-1], has_adapter=has_adapter)


def _relative(state: Collection[str], prefix: str) -> dict[str, list[str]]:
    """Return the names in the model below a prefix, by name without the prefix and PEFT's wrappers."""
    relative: dict[str, list[str]] = defaultdict(list)
    adapters = added_names(state)
    for name in sorted(state):
        if name.startswith(prefix) and name not in adapters:
            relative[without_peft_layers(name.removeprefix(prefix))].append(name)
    return dict(relative)


def _make_match(candidate: _Candidate, keys: Mapping[str, str], source: Source, whole: WholeNames) -> Match:
    """Return the match of a candidate; ``keys`` has the stored keys by new name."""
    match, used = Match(), set[str]()
    for relative, where in candidate.hits.items():
        if isinstance(where, str):
            used.add(where)
            match.stored |= dict.fromkeys(candidate.live[relative], keys[where])
            continue
        used.update(name for part in where.parts.values() for name in part)
        try:
            converted = convert(where.converter, _parts(where, keys, source), relative)
        except UnsupportedError as error:
            name = candidate.live[relative][0]
            match.problems.append(f"{name}  needs a conversion of transformers that is not supported: {error}")
            continue
        for name, tensor in converted.items():
            if name in candidate.live:
                match.converted |= dict.fromkeys(candidate.live[name], tensor)
    for tie in whole.ties:
        first = next((name for name in tie if name in match.stored or name in match.converted), None)
        kept = list(dict.fromkeys(match.stored[name] for name in tie if name in match.stored))
        if len(kept) > 1 and not are_equal(source, "model", kept):
            match.untied.append(", ".join(tie))
        if first in match.stored:
            match.stored |= dict.fromkeys(tie, match.stored[first])
        elif first is not None:
            match.converted |= dict.fromkeys(tie, match.converted[first])
    state = [name for name in whole.state if not is_extra_state(name)]
    later = {name for tie in whole.ties for name in tie[1:]}
    absent = set(state) - match.names - added_names(state) - later
    may_be_missing, may_be_unexpected = _ignored(candidate.model)
    match.missing = sorted(name for name in absent if not may_be_missing(name))
    match.unexpected = sorted(name for name in keys if name not in used and not may_be_unexpected(name))
    match.others = {candidate.name(name): (name, keys[name]) for name in match.unexpected}
    return match


def _parts(where: JoinedSource, keys: Mapping[str, str], source: Source) -> dict[str, list[ForeignTensor]]:
    tensors = source.tensors
    if not isinstance(tensors, ForeignTensors):
        raise UnsupportedError("joining tensors of a sharded checkpoint")
    return {
        pattern: [tensors.tensor("model", source.table["model"][keys[name]].key) for name in names]
        for pattern, names in where.parts.items()
    }


class _Patterns:
    def __init__(self, patterns: Collection[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in sorted(patterns)]

    def __call__(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._patterns)


def _ignored(model: nn.Module | None) -> tuple[_Patterns, _Patterns]:
    """Return the names that may be missing, and those that may be unexpected, for a model of transformers."""
    if model is None:
        return _Patterns(()), _Patterns(())
    return _Patterns(patterns_that_may_be_missing(model)), _Patterns(patterns_that_may_be_unexpected(model))


def report_match(match: Match, path: str) -> list[str]:
    """Return a message on missing, unexpected and unused names, for a warning or an error; none if there are none."""
    kinds = [
        ("not in it, so with first values", match.missing, "tensor", "tensors"),
        ("not in the model", match.unexpected, "tensor", "tensors"),
        ("tied in the model and stored with several values, of which the first is used", match.untied, "tie", "ties"),
        ("unused", match.unused, "entry", "entries"),
    ]
    counted = [(f"{kind}: {count_text(len(names), one, many)}", names) for kind, names, one, many in kinds if names]
    lines = [list_some([kind, *names], 11, "\n  ") for kind, names in counted]
    return [f"pretrained weights at {path!r}: " + "\n".join(lines)] if lines else []


def common_prefix(names: Collection[str]) -> str:
    """Return the common leading components of all names, with a trailing dot; never the last component of a name.

    >>> common_prefix(["net.a.w", "net.b"]), common_prefix(["a.w", "b"])
    ('net.', '')
    """
    if not names:
        return ""
    first, last = min(names).split("."), max(names).split(".")
    count = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    count = min(count, *(len(name.split(".")) - 1 for name in (min(names), max(names))))
    return "".join(f"{part}." for part in first[:count])
