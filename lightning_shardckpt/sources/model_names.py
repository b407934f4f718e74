"""Sources under a model's names, before it is sharded; the user's key mapping comes before (``sources.key_mapping``).

Files of other programs may hold a part of the LightningModule, the base of a model with a head, or a model that PEFT
has not wrapped yet: all ways of matching names are tried, and the one that uses most stored tensors is taken.

A model of transformers may have other names and tensors than its files: the experts of a mixture are one tensor in
memory, and one for each expert in files. transformers has a list of such conversions for each model. It renames;
stacking and concatenating are done here on boxes of bytes, without reading one, and other conversions are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import NamedTuple

from torch import nn

from lightning_shardckpt.compat.transformers import Conversion, conversions_of, patterns_that_may_be_unexpected
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn, without_peft_layers
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.sources.key_mapping import rename
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, StoredTensor, list_tensors
from lightning_shardckpt.state.libraries import added_names, live_names_in_file
from lightning_shardckpt.state.model import is_extra_state


def fit_names(source: Source, module: nn.Module, state: Collection[str]) -> tuple[Source, list[str]]:
    """Return the weights under the names of a model, and a line for each tensor that can't be converted.

    Tensors that the model lacks get the names that they would have there. ``state`` has the names of the whole model,
    of which ``module`` may be a stage.

    Raises:
        MismatchError: if nothing matches, or several parts of the model match equally.
    """
    tensors = {name: source.table["model"][key] for name, key in source.component("model").names.items()}
    stored = sorted(tensors)
    best = _best_candidate(source.path, stored, [n for n in state if not is_extra_state(n)], module)
    names, joined, problems = dict[str, str](), dict[str, ForeignTensor](), list[str]()
    for live, where in best.hits.items():
        if isinstance(where, str):
            names[live] = where
            continue
        try:
            joined[live] = _convert(where, tensors)
        except MismatchError as error:
            problems.append(f"{live}  needs a conversion of transformers that is not supported: {error}")
    unexpected = patterns_that_may_be_unexpected(best.model) if best.model is not None else ()
    used = best.used()
    rest = [name for name in stored if name not in used and not any(re.search(one, name) for one in unexpected)]
    for name in (*rest, *(source.document("model") or ()), *(source.document("frozen") or ())):
        if (new := best.prefix + name.removeprefix(best.stored_prefix)) not in joined:
            names.setdefault(new, name)
    fitted = rename(source, names, None)
    table = {**fitted.table["model"], **list_tensors(source.reader, joined)}
    return replace(fitted, table={**fitted.table, "model": table}), problems


class Joined(NamedTuple):
    """Stored tensors that a converter turns into a tensor of the model: in order, by its patterns."""

    converter: Conversion
    parts: dict[str, list[str]]


class _Candidate(NamedTuple):
    """One way to match names."""

    prefix: str  # of the names in the model that can match
    hits: Mapping[str, str | Joined]  # the stored name or the stored tensors to join, by name in the model
    model: nn.Module | None = None  # of transformers, if its conversions are applied
    stored_prefix: str = ""  # is removed from stored names
    has_adapter: bool = False  # tensors of an adapter match

    def used(self) -> set[str]:
        """Return the stored names that match."""
        return {*chain(*([one] if isinstance(one, str) else chain(*one.parts.values()) for one in self.hits.values()))}


def _best_candidate(path: str, stored: Sequence[str], state: Collection[str], module: nn.Module) -> _Candidate:
    ranked = [((len(one.used()), one.has_adapter, len(one.hits)), one) for one in _candidates(stored, state, module)]
    rank, best = max(ranked, key=lambda pair: pair[0])  # the first of several
    if not best.hits:
        raise MismatchError(
            f"no tensor at {path!r} has a name that {type(module).__name__} has. Stored are, for example, "
            f"{stored[:3]}; the model has {sorted(state)[:3]}. Give a key_mapping."
        )
    for part, rival in ((best.prefix, candidate.prefix) for other, candidate in ranked if other == rank):
        if part and rival and not (rival.startswith(part) or part.startswith(rival)):
            raise MismatchError(
                f"the weights at {path!r} fit {part[:-1]!r} and {rival[:-1]!r} of {type(module).__name__} alike; say "
                f'which is meant, such as key_mapping={{"^": "{part}"}}'
            )
    return best


def _candidates(stored: Sequence[str], state: Collection[str], module: nn.Module) -> Iterator[_Candidate]:
    children = dict.fromkeys(f"{name}." for name, _ in module.named_children())
    for prefix in ["", *children]:  # a model of PEFT, by its own names or those in PEFT's files
        inside = {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
        known = inside | {short: inside[name] for short, name in live_names_in_file(inside).items()}
        hits: dict[str, str | Joined] = {known[name]: name for name in stored if name in known}
        adapters = added_names(inside)
        yield _Candidate(prefix, hits, has_adapter=any(name.removeprefix(prefix) in adapters for name in hits))
    models: dict[str, nn.Module] = {}  # the outermost of transformers
    for name, model in module.named_modules():
        prefix = f"{clean_fqn(name)}." if name else ""
        is_model = isinstance(getattr(type(model), "base_model_prefix", None), str) and hasattr(model, "config")
        if is_model and not prefix.startswith(tuple(models)):
            models[prefix], live = model, _relative(state, prefix)
            found = _names_in_model(model, stored, live)
            yield _Candidate(prefix, {name: where for short, where in found.items() for name in live[short]}, model)
    for prefix in ["", *sorted({_common_prefix(state), *children} - {""})]:
        live = _relative(state, prefix)
        for less in dict.fromkeys(["", _common_prefix(stored)]):
            hits = {name: old for old in stored for name in live.get(old.removeprefix(less), ())}
            yield _Candidate(prefix, hits, stored_prefix=less)


def _relative(state: Collection[str], prefix: str) -> dict[str, list[str]]:
    """Return the names in the model below a prefix, by name without the prefix and PEFT's wrappers."""
    relative: dict[str, list[str]] = defaultdict(list)
    adapters = added_names(state)
    for name in sorted(state):
        if name.startswith(prefix) and name not in adapters:
            relative[without_peft_layers(name.removeprefix(prefix))].append(name)
    return dict(relative)


def _common_prefix(names: Collection[str]) -> str:
    """Return the common leading components of all names, with a trailing dot; never the last component of a name."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{same[0]}." for same in takewhile(lambda part: len({*part}) == 1, parts))


# ── conversions of transformers ───────────────────────────────────────────────────────────────────────────────────────


def _names_in_model(model: nn.Module, stored: Iterable[str], known: Collection[str]) -> dict[str, str | Joined]:
    """Return the stored name, or the stored tensors to join, by the names that a model of transformers knows."""
    (renamings, converters), prefix = conversions_of(model), getattr(type(model), "base_model_prefix", "")

    def find(name: str) -> str | None:  # with or without the prefix of the base model
        bare = name.removeprefix(f"{prefix}.") if prefix else name
        return next((n for n in (name, bare, f"{prefix}.{name}") if n in known), None)

    def natural(name: str) -> list[int | str]:  # "layers.10" comes after "layers.9"
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]

    names, joined = dict[str, str | Joined](), dict[str, Joined]()
    for name in sorted(stored, key=natural):
        new = name
        for rename_key in renamings:
            new, _ = rename_key(new)
        for converter in converters:
            renamed, pattern = converter.rename_source_key(new)
            if pattern is not None and (full := find(renamed)) is not None:
                joined.setdefault(full, Joined(converter, {})).parts.setdefault(pattern, []).append(name)
                break
        else:
            if (own := find(new) or find(name)) is not None:
                names.setdefault(own, name)
    return {**names, **joined}


def _convert(joined: Joined, tensors: Mapping[str, StoredTensor]) -> ForeignTensor:
    """Return the tensor that a conversion makes. Raises a MismatchError that names the operation."""
    patterns, pieces = joined.converter.source_patterns, dict[str, list[ForeignTensor]]()
    for pattern in (pattern for pattern in patterns if pattern in joined.parts):
        located = [tensors[name].located for name in joined.parts[pattern]]
        pieces[pattern] = [tensor for tensor in located if tensor is not None]
        if len(pieces[pattern]) < len(located):
            raise MismatchError("joining tensors of a sharded checkpoint")
    for operation in joined.converter.operations:
        kind, dim = type(operation).__name__, getattr(operation, "dim", None)
        if kind == "MergeModulelist" and dim is not None:
            pieces = {p: [_concatenate([_unsqueeze(t, dim) for t in of], dim)] for p, of in pieces.items()}
        elif kind == "Concatenate" and dim is not None:
            pieces = {"": [_concatenate([*chain.from_iterable(pieces.values())], dim)]}
        else:
            raise MismatchError(f"{kind} of {', '.join(patterns)} along dim {dim}")
    results, targets = [*chain.from_iterable(pieces.values())], joined.converter.target_patterns
    if len(results) != 1 or len(targets) != 1:
        raise MismatchError(f"{', '.join(targets)} of {', '.join(patterns)}")
    return results[0]


def _unsqueeze(tensor: ForeignTensor, dim: int) -> ForeignTensor:
    def insert(shape: Shape, value: int) -> Shape:
        return (*shape[:dim], value, *shape[dim:])

    boxes = (one._replace(box=Box(insert(one.box.start, 0), insert(one.box.stop, 1))) for one in tensor.boxes)
    return ForeignTensor(tensor.dtype, insert(tensor.shape, 1), tuple(boxes))


def _concatenate(tensors: Sequence[ForeignTensor], dim: int) -> ForeignTensor:
    """Concatenate tensors as ``torch.cat`` does; raise a MismatchError if dtypes or other dims differ."""
    kinds = {(t.dtype, t.shape[:dim], t.shape[dim + 1 :]) for t in tensors}
    if len(kinds) > 1 or not all(len(t.shape) > dim for t in tensors):
        raise MismatchError(f"tensors that differ: {[(t.dtype, t.shape) for t in tensors[:3]]}, along dim {dim}")
    (dtype, before, after), at, boxes = kinds.pop(), 0, list[ForeignBox]()
    for tensor in tensors:
        by = (*(0 for _ in before), at, *(0 for _ in after))
        boxes += [one._replace(box=one.box.shift(by)) for one in tensor.boxes]
        at += tensor.shape[dim]
    return ForeignTensor(dtype, (*before, at, *after), tuple(boxes))
