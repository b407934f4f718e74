"""Match the tensors of a model with stored ones by name, for the whole model, before it is sharded.

Names of a file are those of the model that was saved, which may be a part of the LightningModule, the base of a model
with a head, or wrapped since. All ways of fitting are tried; the one that serves most tensors is taken.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_shardckpt.compat.transformers import patterns_that_may_be_missing, patterns_that_may_be_unexpected
from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.format.clean_fqn import without_peft_layers
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.foreign_source import ForeignSource, ForeignTensor, ForeignTensors
from lightning_shardckpt.sources.hf_conversion import (
    Conversions,
    JoinedSource,
    UnsupportedError,
    hugging_face_models,
    joined,
)
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.source import ShardedSource, Source, are_equal
from lightning_shardckpt.sources.source_view import Place, SourceView, place_of, root_of
from lightning_shardckpt.state.model import WholeNames, is_extra_state
from lightning_shardckpt.state.module_versions import rename_versions
from lightning_shardckpt.state.peft_names import added_names
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import VERSION
from lightning_shardckpt.system.text import count_text

# ── as a source ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Stored weights under the names of a live model: as a source for a load.


def is_weights_alone(source: Source) -> bool:
    """Return whether a source is of weights that another program wrote, whose names may not be those of the model.

    What Lightning or this package wrote has the names of the model, and so has state of an optimizer.
    """
    stored = root_of(source)
    if isinstance(stored, ShardedSource) or stored.document("optimizer") is not None:
        return False
    return "model" in stored.components() and VERSION not in stored.trainer(_no_tensor)


def fit_to(source: Source, *, module: nn.Module, live: Leaves, whole: WholeNames) -> tuple[Source, list[str]]:
    """The source of a load as the model wants it, and what of it cannot be fitted, a line each.

    Args:
        source: what is stored; as it is unless it ``is_weights_alone``.
        module: the live model.
        live: its tensors.
        whole: its names over all pipeline stages.
    """
    if not is_weights_alone(source):
        return source, []
    ties = whole.ties or [(key, *(a for a, of in live.aliases.items() if of == key)) for key in live.tensors]
    ties = tuple(tie for tie in ties if len(tie) > 1)
    found = fit(source, module, WholeNames(whole.state or frozenset((*live.tensors, *live.aliases)), ties))
    problems = found.problems + [f"{tie}  tied in the model, stored apart in the checkpoint" for tie in found.apart]
    return apply_match(source, found, ties), problems


def _no_tensor(key: str) -> torch.Tensor:
    raise FormatError(f"{key!r} is no tensor of the trainer")


def apply_match(source: Source, fit: Match, ties: Iterable[tuple[str, ...]] = ()) -> SourceView:
    """Return a source with the names of a model; tensors that the model lacks have the names they would have there.

    Args:
        source: what is stored; it stays the caller's to close.
        fit: which stored tensor is which, and what is put together of others.
        ties: of the whole model, as names.
    """
    aliases = {name: tie[0] for tie in ties for name in tie[1:] if name in fit.names}
    others = {name: key for name, (_, key) in fit.others.items() if name not in fit.names}
    table = {name: place_of(source, "model", key) for name, key in {**others, **fit.stored}.items()}
    if fit.made:
        made = ForeignSource(ForeignTensors(source.path, source.tensors.reader, {"model": fit.made}))
        table |= {name: Place(made, "model", name) for name in fit.made}
    table = {name: place for name, place in table.items() if name not in aliases}
    values = source.document("model")
    documents = {"versions": rename_versions(source.document("versions"), fit.stored)}
    if values:
        documents["model"] = {name: values[old] for name, old in fit.values.items()}
    return SourceView(source, {"model": table}, {"model": aliases}, documents)


_LISTED = 10
_UNCHANGED = KeyMapping()


@dataclass(slots=True)
class Match:
    """Stored tensors matched to the model's.

    Attributes:
        stored: name in the model → key of the stored tensor.
        made: name in the model → what is put together for it.
        missing: names in the model for which nothing is stored, of each tie one; adapters are not among them.
        unexpected: stored names for which the model has none.
        others: the names that these would have in the model → stored name and key of the stored tensor.
        values: name in the model → stored name, of entries that are no tensors.
        problems: why some that belong together cannot be loaded, a line each.
        apart: names that are tied in the model and stored with several values; the first is taken.
        idle: entries of the user's mapping that are about no stored name.
    """

    stored: dict[str, str] = field(default_factory=dict)
    made: dict[str, ForeignTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    others: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        """Names in the model that get a value."""
        return frozenset(self.stored) | frozenset(self.made)


@dataclass(slots=True)
class _Way:
    """One way in which names may fit.

    ``hits``: relative name in the model → where it comes from. ``live``: relative name → names in the model. ``stored``
    stands before stored names that have no other prefix.
    """

    live: Mapping[str, list[str]]
    hits: dict[str, str | JoinedSource]
    of: str
    model: nn.Module | None = None
    stored: str = ""

    def name(self, stored: str) -> str:
        """Return the name in the model of what has a stored name."""
        return (f"{self.of}." if self.of else "") + stored.removeprefix(self.stored)

    @property
    def score(self) -> int:
        return sum(len(self.live[name]) for name in self.hits)


def fit(source: Source, module: nn.Module, whole: WholeNames, mapping: KeyMapping = _UNCHANGED) -> Match:
    """Fit what is stored to a model.

    Args:
        source: whose component "model" is meant.
        module: the LightningModule; of a pipeline, any stage of it.
        whole: names of the whole model.
        mapping: of the user, applied to the stored names first.

    Raises:
        MismatchError: if nothing fits, several parts of the model fit alike, or the mapping cannot be meant so.
    """
    component = source.components().get("model", Component({}))
    keys = {key: key for key in component.tensors} | component.aliases
    if wrong := mapping.misunderstood(keys):
        raise MismatchError(f"{mapping.option}: " + "\n  ".join(wrong))
    names = mapping.renamed(keys)
    state = [name for name in whole.state if not is_extra_state(name)]
    ways = list(_ways(names, state, module))
    best = max(ways, key=lambda way: way.score)  # the first of several
    rivals = [w for w in ways if w.score == best.score and best.of and not _nested(w.of, best.of)]
    if rivals and best.score:
        raise MismatchError(
            f"the weights at {source.path!r} fit {best.of!r} and {rivals[0].of!r} of {type(module).__name__} alike; "
            f'say which is meant, such as {mapping.option}={{"^": "{best.of}."}}'
        )
    if not best.score:
        raise MismatchError(
            f"no tensor at {source.path!r} has a name that {type(module).__name__} has. Stored are, for example, "
            f"{sorted(names)[:3]}; the model has {sorted(state)[:3]}. Give a {mapping.option}."
        )
    found = _follow(best, {name: keys[old] for name, old in names.items()}, source, whole)
    values = mapping.renamed(source.document("model") or {})
    found.values = {best.name(name): old for name, old in values.items()}
    found.idle = mapping.unused(keys)
    return found


def _nested(a: str, b: str) -> bool:
    """Return whether one of two module names is the other one or inside it."""
    return not a or f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _ways(names: Mapping[str, str], state: Collection[str], module: nn.Module) -> Iterator[_Way]:
    everything = _relative(state, "")
    yield _Way(everything, {n: n for n in names if n in everything}, "")
    for prefix, model in hugging_face_models(module).items():
        live = _relative(state, f"{prefix}." if prefix else "")
        found = Conversions(model).apply(names, live.__contains__)
        hits = {name: where for name, where in found.items() if name in live}
        yield _Way(live, hits, prefix, model)
    ours = {common_prefix(state), *(f"{name}." for name, _ in module.named_children())} - {""}
    theirs = common_prefix(names)
    for prefix in ["", *sorted(ours)]:
        live = _relative(state, prefix)
        for stored_prefix in dict.fromkeys(["", theirs]):
            hits = {short: n for n in names if (short := n.removeprefix(stored_prefix)) in live}
            yield _Way(live, hits, prefix[:-1], stored=stored_prefix)


def _relative(state: Collection[str], prefix: str) -> dict[str, list[str]]:
    """Names below a prefix without it and without traces of PEFT → names in the model."""
    found: dict[str, list[str]] = defaultdict(list)
    adapters = added_names(state)
    for name in sorted(state):
        if name.startswith(prefix) and name not in adapters:
            found[without_peft_layers(name.removeprefix(prefix))].append(name)
    return dict(found)


def _follow(way: _Way, keys: Mapping[str, str], source: Source, whole: WholeNames) -> Match:
    """Follow the way. ``keys``: new name → key of the stored tensor."""
    found, used = Match(), set[str]()
    for relative, where in way.hits.items():
        if isinstance(where, str):
            used.add(where)
            found.stored |= dict.fromkeys(way.live[relative], keys[where])
            continue
        used.update(name for part in where.parts.values() for name in part)
        try:
            made = joined(where.converter, _parts(where, keys, source), relative)
        except UnsupportedError as error:
            found.problems.append(f"{way.live[relative][0]}  transformers makes it by {error}, which is not done here")
            continue
        for name, tensor in made.items():
            if name in way.live:
                found.made |= dict.fromkeys(way.live[name], tensor)
    for tie in whole.ties:
        first = next((name for name in tie if name in found.stored or name in found.made), None)
        kept = list(dict.fromkeys(found.stored[name] for name in tie if name in found.stored))
        if len(kept) > 1 and not are_equal(source, "model", kept):
            found.apart.append(", ".join(tie))
        if first in found.stored:
            found.stored |= dict.fromkeys(tie, found.stored[first])
        elif first is not None:
            found.made |= dict.fromkeys(tie, found.made[first])
    state = [name for name in whole.state if not is_extra_state(name)]
    later = {name for tie in whole.ties for name in tie[1:]}
    absent = set(state) - found.names - added_names(state) - later
    ignored = _ignored(way.model)
    found.missing = sorted(name for name in absent if not ignored[0](name))
    found.unexpected = sorted(name for name in keys if name not in used and not ignored[1](name))
    found.others = {way.name(name): (name, keys[name]) for name in found.unexpected}
    return found


def _parts(where: JoinedSource, keys: Mapping[str, str], source: Source) -> dict[str, list[ForeignTensor]]:
    tensors = source.tensors
    if not isinstance(tensors, ForeignTensors):
        raise UnsupportedError("joining tensors of a sharded checkpoint")
    return {
        pattern: [tensors.tensor("model", place_of(source, "model", keys[name]).key) for name in names]
        for pattern, names in where.parts.items()
    }


class _Patterns:
    def __init__(self, patterns: Collection[str]) -> None:
        self._found = [re.compile(pattern) for pattern in sorted(patterns)]

    def __call__(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._found)


def _ignored(model: nn.Module | None) -> tuple[_Patterns, _Patterns]:
    """Return what a model of transformers does not mind: names that are missing, and unexpected ones."""
    if model is None:
        return _Patterns(()), _Patterns(())
    return _Patterns(patterns_that_may_be_missing(model)), _Patterns(patterns_that_may_be_unexpected(model))


def report(found: Match, path: str) -> list[str]:
    """A sentence on what is missing, unexpected or without effect, for a warning or an error; none if nothing is."""
    kinds = [
        ("not in it, so with first values", found.missing, "tensor", "tensors"),
        ("not in the model", found.unexpected, "tensor", "tensors"),
        ("one in the model and apart in it, where the first is taken", found.apart, "tie", "ties"),
        ("of pretrained_key_mapping, about no name in it", found.idle, "entry", "entries"),
    ]
    counted = [(f"{what}: {count_text(len(names), one, many)}", names) for what, names, one, many in kinds if names]
    lines = ["\n  ".join([what, *first_lines(names)]) for what, names in counted]
    return [f"pretrained weights at {path!r}: " + "\n".join(lines)] if lines else []


def first_lines(lines: Collection[str], count: int = _LISTED) -> list[str]:
    """The first lines, and how many more there are."""
    shown = list(lines)[:count]
    return shown + ([f"… and {len(lines) - count} more"] if len(lines) > count else [])


def common_prefix(names: Collection[str]) -> str:
    """The components that all names begin with, with a dot after them; never with the last component of a name.

    >>> common_prefix(["net.a.w", "net.b"]), common_prefix(["a.w", "b"])
    ('net.', '')
    """
    if not names:
        return ""
    first, last = min(names).split("."), max(names).split(".")
    count = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    count = min(count, *(len(name.split(".")) - 1 for name in (min(names), max(names))))
    return "".join(f"{part}." for part in first[:count])
