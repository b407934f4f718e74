"""Sources under a model's names, before it is sharded; the user's key mapping comes before (``sources.key_mapping``).

Files of other programs may hold a part of the LightningModule, the base of a model
with a head, or a model that PEFT has not wrapped yet: all ways of matching names are tried, and the one that matches
most tensors is used. Which tensors then match, and why others don't, is in ``checkpoint.match``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import nn

from lightning_shardckpt.compat.transformers import patterns_that_may_be_missing, patterns_that_may_be_unexpected
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.clean_fqn import without_peft_layers
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.foreign_source import ForeignTensor, ListedTensor, list_tensors
from lightning_shardckpt.sources.hf_conversion import (
    JoinedSource,
    UnsupportedError,
    convert,
    hugging_face_models,
    names_in_model,
)
from lightning_shardckpt.sources.key_mapping import rename
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.json_tree import refuse_tensor
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.peft_names import added_names, live_names_in_file
from lightning_shardckpt.state.state_dicts import VERSION


def has_weights_only(source: Source) -> bool:
    """Return whether a source has only weights from another program, whose names may differ from the model's.

    Checkpoints of Lightning and of this package have the model's names, and so have those with optimizer state.
    """
    stored = source.original or source
    if stored.root is not None or stored.document("optimizer") is not None:
        return False
    return "model" in stored.components() and VERSION not in stored.trainer(refuse_tensor)


class FittedSource(NamedTuple):
    """A source under the names of a model; tensors that the model lacks get the names they would have there.

    Attributes:
        source: the renamed source; without optimizers.
        names: the names before, by name in the model.
        problems: tensors that can't be converted and why, a line each.
        may_be_missing: returns whether a model of transformers may lack a stored tensor.
    """

    source: Source
    names: Mapping[str, str]
    problems: list[str]
    may_be_missing: Callable[[str], bool]


def fit_names(source: Source, module: nn.Module, state: Collection[str], option: str = "key_mapping") -> FittedSource:
    """Return the stored tensors under the names of a model.

    Args:
        source: of the component "model".
        module: the LightningModule, or any stage of a pipeline.
        state: the names of the whole model's state.
        option: the name of the user's mapping, for errors.

    Raises:
        MismatchError: if nothing matches, or several parts of the model match equally.
    """
    component = source.components().get("model", Component({}))
    stored = {*component.tensors, *component.aliases}
    best = _best_candidate(source.path, sorted(stored), [n for n in state if not is_extra_state(n)], module, option)
    names, problems, used = dict[str, str](), list[str](), set[str]()
    converted: dict[str, ForeignTensor] = {}
    for relative, where in best.hits.items():
        if isinstance(where, str):
            used.add(where)
            names |= dict.fromkeys(best.live[relative], where)
            continue
        used.update(chain.from_iterable(where.parts.values()))
        try:
            made = convert(where.converter, _parts(where, source, component), relative)
        except UnsupportedError as error:
            name = best.live[relative][0]
            problems.append(f"{name}  needs a conversion of transformers that is not supported: {error}")
            continue
        for name, tensor in made.items():
            converted |= dict.fromkeys(best.live.get(name, ()), tensor)
    may_be_unexpected = _patterns(patterns_that_may_be_unexpected(best.model) if best.model is not None else ())
    rest = [name for name in sorted(stored - used) if not may_be_unexpected(name)]
    for name in (*rest, *(source.document("model") or ()), *(source.document("frozen") or ())):
        if (new := best.name(name)) not in converted:
            names.setdefault(new, name)
    fitted = rename(source, names, None)
    if converted:
        joined = list_tensors(source.path, source.reader, "model", converted)
        table = {"model": {**fitted.table["model"], **joined}}
        fitted = fitted.with_names(table, {"model": fitted.aliases["model"]}, {})
    may_be_missing = _patterns(patterns_that_may_be_missing(best.model) if best.model is not None else ())
    return FittedSource(fitted, names, problems, may_be_missing)


def _parts(where: JoinedSource, source: Source, component: Component) -> dict[str, list[ForeignTensor]]:
    def located(name: str) -> ForeignTensor:
        stored = source.table["model"][component.aliases.get(name, name)]
        if not isinstance(stored, ListedTensor):
            raise UnsupportedError("joining tensors of a sharded checkpoint")
        return stored.located

    return {pattern: [*map(located, names)] for pattern, names in where.parts.items()}


def _patterns(patterns: Collection[str]) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in sorted(patterns)]
    return lambda name: any(pattern.search(name) for pattern in compiled)


@dataclass(frozen=True, slots=True)
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


def _best_candidate(
    path: str, stored: Sequence[str], state: Collection[str], module: nn.Module, option: str
) -> _Candidate:
    candidates = list(_candidates(stored, state, module))
    best = max(candidates, key=lambda candidate: candidate.score)  # the first of several
    with_adapter = [c for c in candidates if c.has_adapter and len(c.hits) >= len(best.hits)]
    best = max(with_adapter, key=lambda candidate: candidate.score, default=best)
    part = best.module_name
    rivals = [c for c in candidates if c.score == best.score and part and not _nested(c.module_name, part)]
    if rivals and best.score:
        raise MismatchError(
            f"the weights at {path!r} fit {part!r} and {rivals[0].module_name!r} of {type(module).__name__} "
            f'alike; say which is meant, such as {option}={{"^": "{part}."}}'
        )
    if not best.score:
        raise MismatchError(
            f"no tensor at {path!r} has a name that {type(module).__name__} has. Stored are, for example, "
            f"{stored[:3]}; the model has {sorted(state)[:3]}. Give a {option}."
        )
    return best


def _nested(a: str, b: str) -> bool:
    """Return whether one of two module names contains the other one, or both are equal."""
    return not a or f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _candidates(names: Sequence[str], state: Collection[str], module: nn.Module) -> Iterator[_Candidate]:
    everything = _relative(state, "")
    yield _Candidate(everything, {n: n for n in names if n in everything}, "")
    children = dict.fromkeys(f"{name}." for name, _ in module.named_children())
    yield from (_of_adapter(names, state, prefix) for prefix in ["", *children])
    for prefix, model in hugging_face_models(module).items():
        live = _relative(state, f"{prefix}." if prefix else "")
        sources = names_in_model(model, names, live.__contains__)
        yield _Candidate(live, {name: where for name, where in sources.items() if name in live}, prefix, model)
    prefixes = {_common_prefix(state), *children} - {""}
    for prefix in ["", *sorted(prefixes)]:
        live = _relative(state, prefix)
        for stored_prefix in dict.fromkeys(["", _common_prefix(names)]):
            hits = {short: n for n in names if (short := n.removeprefix(stored_prefix)) in live}
            yield _Candidate(live, hits, prefix[:-1], stored_prefix=stored_prefix)


def _of_adapter(names: Sequence[str], state: Collection[str], prefix: str) -> _Candidate:
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


def _common_prefix(names: Collection[str]) -> str:
    """Return the common leading components of all names, with a trailing dot; never the last component of a name.

    >>> _common_prefix(["net.a.w", "net.b"]), _common_prefix(["a.w", "b"])
    ('net.', '')
    """
    if not names:
        return ""
    first, last = min(names).split("."), max(names).split(".")
    count = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    count = min(count, *(len(name.split(".")) - 1 for name in (min(names), max(names))))
    return "".join(f"{part}." for part in first[:count])
