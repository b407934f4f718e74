"""One load on one rank: match stored state with live objects, plan the reads, and apply the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from lightning_shardckpt.checkpoint.match import LoadTargets, Match, allocate_for_hooks, match_targets
from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.reading import ReadTarget, plan_reads
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import is_expanded, local_tensor, new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.load_hooks import HookedState
from lightning_shardckpt.state.optimizer import OptimizerLoad
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, refuse_compound
from lightning_shardckpt.state.trainer import drop_elsewhere, entry_of, find_counterpart
from lightning_shardckpt.system.text import count_text, list_some

_LISTED = 20
_EMPTY = Component({})


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of reading a checkpoint.

    Attributes:
        strict: raise an error for differences between checkpoint and live objects instead of loading the rest.
        verify: compare checksums.
        weights_only: passed to ``torch.load`` for a file of ``torch.save``.
    """

    strict: bool = True
    verify: bool = True
    weights_only: bool = True


class RankComparison(TypedDict):
    """The comparison of stored and live state on one rank, as JSON for a step of ranks."""

    differences: list[str]
    sources: dict[str, list[int] | None]
    """The stored param groups that each live group ``<optimizer>/<group>`` continues; None without parameters here."""
    is_full: bool
    """Whether every live tensor gets a value, as far as there are no differences."""


class LoadDecision(TypedDict):
    """Rank 0's decision from the comparisons of all ranks."""

    notes: list[str]
    is_full: bool
    """Whether every live tensor of all ranks gets a value."""
    sources: dict[str, list[int] | None]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load whose reads are planned and whose files are open on one rank. No live object has changed yet.

    Attributes:
        comparison: of this rank.
        read: fills the tensors, and verifies their bytes on the way.
        optimizers: to fill.
        trainer: the trainer's state; its tensors have no values yet.
        extra_state: non-tensor state of modules, by name.
        hooked: entries that the modules' own code loads; None if the modules' tensors are filled.
    """

    comparison: RankComparison
    read: Callable[[], None]
    optimizers: Sequence[OptimizerLoad] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    hooked: HookedState | None = None

    def fill(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Fill the tensors, and put optimizer state in place; return sentences for the user. Runs on every rank.

        Args:
            sources: of ``decide``.
        """
        self.read()
        return [note for optimizer in self.optimizers for note in optimizer.apply(sources)]


def decide(path: str, remedy: str, strict: bool, reports: Sequence[RankComparison]) -> LoadDecision:
    """Merge the comparisons of all ranks. Runs on rank 0.

    Raises:
        MismatchError: listing each difference once, if ``strict``.
    """
    problems = list(dict.fromkeys(line for report in reports for line in report["differences"]))
    notes = list[str]()
    if problems:
        counted, listed = count_text(len(problems), "difference"), list_some(problems, _LISTED, "\n  ")
        if strict:
            raise MismatchError(
                f"cannot load {path!r} into this model: {counted}\n  {listed}\n"
                f"{remedy} to load the rest, or look with `python -m lightning_shardckpt inspect PATH`."
            )
        notes.append(f"left as they are: {counted} between {path!r} and this model\n  {listed}")
    sources: dict[str, list[int] | None] = {}
    for group, numbers in ((g, n) for report in reports for g, n in report["sources"].items()):
        known = sources.get(group)
        sources[group] = known if numbers is None else list(dict.fromkeys([*(known or ()), *numbers]))
    is_full = not problems and all(report["is_full"] for report in reports)
    return {"notes": notes, "is_full": is_full, "sources": sources}


def start_load(
    source: Source, live: LoadTargets, *, strict: bool = False, pick_rank: Callable[[Any], int] = lambda _: 0
) -> LoadJob:
    """Match the stored state with the live objects, plan the reads, and open the files for them. Runs on every rank.

    Changes no live object.

    Args:
        source: the stored state.
        live: the objects to fill.
        strict: plan nothing if there are differences.
        pick_rank: returns the rank whose rank state is taken, given that of rank 0.

    Raises:
        MismatchError: if optimizers are loaded and the source has weights only.
        StateError: for tensors on the meta device, and for expanded tensors.
    """
    source, differences = (source, []) if live.fit_source is None else live.fit_source(source)
    if live.optimizers is not None and source.document("optimizer") is None:
        raise MismatchError(
            f"cannot resume training from {source.path!r}: it holds weights only, no optimizer state. "
            "validate, test and predict can use it, and training can begin with it: "
            "ShardedStrategy(pretrained=path). To resume training, save with save_weights_only=False."
        )
    match, optimizers = match_targets(source, live), list[OptimizerLoad]()
    differences = differences + (match.problems if live.has_model else [])
    if live.optimizers is not None:
        optimizers, more = _match_optimizers(source, live, match)
        differences += more
    groups = {group: numbers for one in optimizers for group, numbers in one.sources().items()}
    comparison: RankComparison = {"differences": differences, "sources": groups, "is_full": match.is_full}
    if strict and differences:
        return LoadJob(comparison, lambda: None)
    return _plan(comparison, source, live, match, optimizers, pick_rank)


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _match_optimizers(source: Source, live: LoadTargets, match: Match) -> tuple[list[OptimizerLoad], list[str]]:
    """Return the optimizers to load, and a line for each difference."""
    document, optimizers = source.document("optimizer"), live.optimizers or ()
    same, dtypes, reshaped = match.same_tensor(), match.dtypes(), match.reshaped()
    loads, differences = list[OptimizerLoad](), list[str]()
    for name in sorted(reshaped) if not live.has_model else ():
        differences.append(f"{name}  has another shape in the checkpoint, and so has its state in optimizers")
    if len(document) != len(optimizers):
        differences.append(f"optimizers  {len(document)} in checkpoint, {len(optimizers)} in model")
    for number, optimizer in enumerate(optimizers[: len(document)]):
        stored = StoredOptimizer(number, document[str(number)], source.components().get("optimizer"), decode_small)
        if stored.numbered and (problem := stored.name(_numbered_groups(live, number))) is not None:
            hint = "" if not live.elsewhere else ": load it without pipeline parallelism, and save it again"
            differences.append(f"optimizer {number}  {problem}{hint}")
            continue
        load = OptimizerLoad(number, optimizer, stored, live.names, same, dtypes=dtypes, reshaped=reshaped)
        if (other := load.other_class()) is not None:
            differences.append(other)
            continue
        differences += load.compare(live.elsewhere)
        loads.append(load)
    return loads, differences


def _numbered_groups(live: LoadTargets, number: int) -> list[list[str]]:
    """Return the names in the param groups of an optimizer, in the order in which torch numbers its parameters.

    In a pipeline, whose stages have a part of each group, only a single group of all parameters is known.
    """
    assert live.optimizers is not None
    groups = [[live.names[id(p)] for p in group["params"]] for group in live.optimizers[number].param_groups]
    order = live.whole.parameters
    if not order or len(groups) > 1 or groups[0] != [name for name in order if name in groups[0]]:
        return groups
    return [[*order]]


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(
    comparison: RankComparison,
    source: Source,
    live: LoadTargets,
    match: Match,
    optimizers: Sequence[OptimizerLoad],
    pick_rank: Callable[[Any], int],
) -> LoadJob:
    """Allocate missing tensors, read non-tensor state, and plan the reads."""
    _check_sizes(source, live, optimizers)
    keys = match.keys if live.has_model else {}
    tensors = [ReadTarget("model", key, live.model.tensors[name]) for name, key in keys.items()]
    hooked, filled, new = None, tensors, list[ReadTarget]()
    if match.is_hooked:
        filled, (hooked, new) = [], allocate_for_hooks(match, source, live)
    owners, allocated = Counter(map(_memory, _live_tensors(live, optimizers))), list[ReadTarget]()
    for optimizer in optimizers:
        in_place, beside = optimizer.tensors(lambda tensor: owners[_memory(tensor)] == 1)
        filled = filled + [ReadTarget("optimizer", key, tensor) for key, tensor in in_place]
        allocated += [ReadTarget("optimizer", key, tensor) for key, tensor in beside]
    extra_state = dict[str, Any]()
    if live.has_model:
        document = source.document("model") or {}
        extra_state = {name: decode_small(value) for name, value in document.items() if name in live.extra_state}
    trainer, of_trainer = _read_trainer(source, live, pick_rank)
    requested = live.trainer_tensors  # some may be in JSON
    of_user = [ReadTarget("trainer", key, tensor) for key, tensor in requested.items()]
    for key, tensor in of_trainer.items() if live.has_trainer else ():
        if tensor is not requested.get(key):
            new.append(ReadTarget("trainer", key, tensor))
    unplain = [one for one in (*tensors, *filled, *of_user, *allocated) if not _is_plain(one.local)]
    _refuse_unfillable(source.path, unplain)
    of_user = [one for one in of_user if of_trainer.get(one.key) is one.tensor]
    read = plan_reads(source, [*filled, *of_user, *allocated, *new])
    return LoadJob(comparison, read, optimizers, trainer, extra_state, hooked)


def _check_sizes(source: Source, live: LoadTargets, optimizers: Sequence[OptimizerLoad]) -> None:
    """Check that the stored bytes of optimizer state with shapes of its own exist, before memory is allocated."""
    shapes = {shape_of(p) for one in live.optimizers or () for group in one.param_groups for p in group["params"]}
    for key, spec in source.components().get("optimizer", _EMPTY).tensors.items() if optimizers else ():
        if spec.shape not in shapes and not live.elsewhere:
            source.checked_shape("optimizer", key)


def _live_tensors(live: LoadTargets, optimizers: Sequence[OptimizerLoad]) -> Iterator[torch.Tensor]:
    """Yield the tensors that optimizer state could share memory with."""
    if optimizers:
        yield from live.model.tensors.values()
        yield from live.trainer_tensors.values()
    for optimizer in optimizers:
        yield from optimizer.live_tensors()


def _read_trainer(
    source: Source, live: LoadTargets, pick_rank: Callable[[Any], int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the trainer's state, and its tensors by key, which are filled later."""
    tensors: dict[str, torch.Tensor] = {}
    model, requested, elsewhere = live.model, live.trainer_tensors, live.elsewhere
    named = model.tensors | {alias: model.tensors[key] for alias, key in model.aliases.items()}

    def is_elsewhere(key: str) -> bool:  # in an entry that only other pipeline stages have
        return bool(elsewhere) and entry_of(key, live.whole.state) in elsewhere

    for key, spec in source.components().get("trainer", _EMPTY).tensors.items():
        given, dtype = requested.get(key), TORCH_DTYPES[spec.dtype]
        # a pinned tensor is a plain tensor of one rank, and stays one
        like = None if spec.pinned else live.like.get(key, find_counterpart(key, spec.shape, named))
        if given is not None and (tuple(given.shape), given.dtype) == (spec.shape, dtype):
            tensors[key] = given
        elif like is not None and tuple(like.shape) == spec.shape:
            tensors[key] = new_like(like, dtype)
        elif is_elsewhere(key):
            tensors[key] = torch.empty(spec.shape, dtype=dtype, device="meta")
        else:
            tensors[key] = torch.empty(source.checked_shape("trainer", key), dtype=dtype)
    trainer = source.trainer(tensors.__getitem__)
    if elsewhere:
        drop_elsewhere(trainer, lambda key: key not in requested and is_elsewhere(key))
    first = decode_small(source.document("rank"))
    rank = 0 if first is None else pick_rank(first)
    trainer["rank_state"] = first if rank == 0 else decode_small(source.document("rank", rank))
    return trainer, {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}


def _memory(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _is_plain(local: torch.Tensor) -> bool:
    """Return whether a tensor has contiguous memory of its own, as nearly all have."""
    return type(local) is torch.Tensor and not local.is_meta and local.is_contiguous()


def _refuse_unfillable(path: str, targets: Iterable[ReadTarget]) -> None:
    """Raise a StateError for tensors that are made of others, on the meta device, or expanded."""
    names = dict[str, None]()
    for target in targets:
        refuse_compound(target.tensor, name := f"{target.component}/{target.key}")
        if target.local.is_meta or is_expanded(target.local):
            names[name] = None
    if names:
        raise StateError(
            f"cannot load {path!r} into tensors that have no memory, or whose elements share memory: "
            f"{list_some([*names], _LISTED)}. Give them memory first: those on the meta device by "
            'module.to_empty(device="cpu"), or in Fabric load after fabric.setup; others by clone()'
        )
