"""One load on one rank: match stored state with live objects, plan the reads, and apply the rest.

The match table has the stored tensor for each live tensor of the model, or the reason for none. It is made for every
load, from the live objects and a source under their names (see ``sources.model_names``); ties and load hooks are
filters over it. No live object changes before ``LoadJob.fill``.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.clean_fqn import base_fqn
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.reading import ReadTarget, are_equal, converts, plan_reads
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import decode
from lightning_shardckpt.state.local_tensors import DTYPES, TORCH_DTYPES, new_like, refuse_compound
from lightning_shardckpt.state.model import (
    NO_HOOKS,
    HookedState,
    Leaves,
    LoadHooks,
    WholeNames,
    model_leaves,
    names_of,
    parameter_names,
)
from lightning_shardckpt.state.optimizer import OptimizerLoad
from lightning_shardckpt.state.trainer import drop_elsewhere, find_counterpart, fqns_of
from lightning_shardckpt.system.host import gc_paused
from lightning_shardckpt.system.text import list_some

_LISTED = 20
_IN_MODEL, _IN_CHECKPOINT = "in model only", "in checkpoint only"

Sources: TypeAlias = dict[str, list[int] | None]
"""The stored param groups that each live group ``<optimizer>/<group>`` continues; None if it has no parameters."""


class RankComparison(TypedDict):
    """The comparison of stored and live state on one rank, or merged on all ranks, as JSON for a step of ranks."""

    differences: list[str]
    sources: Sources
    is_full: bool
    """Whether every live tensor gets a value; on one rank, as far as there are no differences."""


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The objects to load into. ``fit_source`` may change the param groups of the optimizers."""

    model: Leaves  # the model's tensors, by name
    extra_state: frozenset[str]  # canonical names of the model's non-tensor values
    optimizers: Sequence[Optimizer] | None  # None loads weights only
    names: Mapping[int, str]  # FQN by ``id`` of the parameter
    whole: WholeNames  # of the model over all pipeline stages
    # converts a source to the names of the model; returns it with a line for each problem
    fit_source: Callable[[Source], tuple[Source, list[str]]] = lambda source: (source, [])
    trainer_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the user's, by key of trainer state
    like: Mapping[str, torch.Tensor] = field(default_factory=dict)  # layouts of tensors to allocate, by this key
    remedy: str = "Set strict_loading=False on the LightningModule"  # to load in spite of differences
    has_model: bool = True  # False loads the optimizers alone
    hooks: LoadHooks = NO_HOOKS  # of the model's modules
    objects: Sequence[nn.Module | Optimizer] = ()  # unusable if the load fails after it began to fill them

    @classmethod
    @gc_paused()
    def of_module(
        cls,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        whole: WholeNames,
        optimizers: Sequence[Optimizer] | None = None,
        *,
        modules: Mapping[str, nn.Module] | None = None,
        is_changed: bool = False,
    ) -> LoadTargets:
        """Return the targets for a module's state dict, whose tensors are filled in place, and its optimizers.

        ``modules`` are those of which ``module`` is made, by the prefix of their names; by default itself.
        ``is_changed`` tells that other code will change the entries before the module takes them.
        """
        leaves, values = model_leaves(state_dict, module, whole)
        names = parameter_names(module, whole) if optimizers is not None else {}
        hooks = LoadHooks.of({"": module} if modules is None else modules, state_dict, of_all=is_changed)
        return cls(leaves, frozenset(values), optimizers, names, whole, hooks=hooks)


# ── match table ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class MatchRow:
    """A live tensor of the model, and the stored tensor that it is loaded from, or None."""

    key: str
    names: list[str]  # all: of ties, on other pipeline stages, and before PEFT wrapped the model
    tensor: torch.Tensor
    stored: str | None = None  # its key
    problems: tuple[str, ...] = ()  # differences between the two
    is_left_out: bool = False  # by the save
    is_apart: bool = False  # tied in the model and stored with several values; the first is used
    is_reshaped: bool = False  # stored in another shape


@dataclass(frozen=True, slots=True)
class Match:
    """The match of a model with stored state."""

    rows: Sequence[MatchRow]
    stored: Component  # the stored model
    ties: Sequence[Sequence[str]]  # the names of each tied tensor, over all pipeline stages
    elsewhere: frozenset[str]  # names of entries that only other pipeline stages have
    unexpected: Sequence[str]  # names that only the checkpoint has
    missing_values: Sequence[str]  # names of entries other than tensors that only the model has
    is_full: bool  # True if every live tensor gets a value, unless there are problems: none was left out by the save
    is_hooked: bool = False  # True if the model's own code loads its entries; otherwise they are filled in place

    @property
    def problems(self) -> list[str]:
        """The differences, a line each."""
        lines = [f"{row.key}  {problem}" for row in self.rows for problem in row.problems]
        lines += [f"{name}  {_IN_CHECKPOINT}" for name in self.unexpected]
        return lines + [f"{name}  {_IN_MODEL}" for name in self.missing_values]

    def same_tensor(self) -> Callable[[str], Sequence[str]]:
        """Return a function that maps the name of a live parameter to all names of its tensor, live and stored.

        So it does not matter under which name of a tie the model registers it or the checkpoint stores it.
        """
        groups = (*self.ties, *(row.names for row in self.rows))  # no rows if only optimizers are loaded
        live = {name: group for group in groups if len(group) > 1 for name in group}
        stored: dict[str, list[str]] = {}
        for alias, key in self.stored.aliases.items():
            stored.setdefault(key, [key]).append(alias)
        stored |= {alias: stored[key] for alias, key in self.stored.aliases.items()}

        def names_of_tensor(name: str) -> Sequence[str]:
            own = (name, *live.get(name, ()))
            return list(dict.fromkeys([*own, *(other for alias in own for other in stored.get(alias, ()))]))

        return names_of_tensor


def match_targets(source: Source, targets: LoadTargets) -> Match:
    """Match the tensors of the model with stored ones, under its names."""
    model, left_out = targets.model, source.document("frozen") or {}
    stored, values = source.component("model"), {*(source.document("model") or {})}
    known, names = stored.names, names_of(model, targets.whole.ties)
    elsewhere = targets.whole.elsewhere({*model.tensors, *model.aliases, *targets.extra_state})
    rows = [_row(source, MatchRow(key, names[key], one), known, left_out) for key, one in model.tensors.items()]
    own = {name for group in names.values() for name in group}
    unexpected = (known.keys() | left_out.keys()) - own | values - targets.extra_state
    unexpected = unexpected.difference(elsewhere, map(base_fqn, elsewhere)) if unexpected else set()
    missing = sorted(targets.extra_state - values)
    match = Match(rows, stored, targets.whole.ties, elsewhere, sorted(unexpected), missing, is_full=not left_out)
    differing = (*(name for row in rows if row.problems for name in row.names), *unexpected, *missing)
    if not targets.hooks.act_on(differing):
        return replace(match, is_hooked=targets.hooks.of_all)
    for row in rows:  # hooks may remove the differences
        row.problems = row.problems if row.is_apart else ()
    return replace(match, unexpected=[], missing_values=[], is_hooked=True)


def _row(source: Source, row: MatchRow, known: Mapping[str, str], left_out: Mapping[str, Any]) -> MatchRow:
    """Fill and return the row of a live tensor.

    A tensor that is not stored under any of its names is matched by its name before PEFT wrapped the model.
    """
    key, names, tensor = row.key, row.names, row.tensor
    keys = list(dict.fromkeys([known[name] for name in names if name in known]))
    if not keys and (absent := next((left_out[name] for name in names if name in left_out), None)) is not None:
        live = [DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)]
        row.is_left_out = True
        if absent != live:
            before, now = (f"{dtype} {tuple(shape)}" for dtype, shape in (absent, live))
            row.problems = (f"{before} when the checkpoint left it out, {now} in model",)
        return row
    if not keys:
        names.extend([name for name in map(base_fqn, names) if name in known])
        keys = [known[name] for name in names if name in known][:1]
    if not keys:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        row.problems = (f"{_IN_MODEL}; the checkpoint has {near[0]!r}" if near else _IN_MODEL,)
        return row
    spec, dtype = source.table["model"][keys[0]].spec, local_tensor(tensor).dtype
    if spec.shape != shape_of(tensor):
        row.is_reshaped = True
        row.problems = (f"shape {spec.shape} in checkpoint, {tuple(tensor.shape)} in model",)
        return row
    if len(keys) > 1 and not are_equal(source, "model", keys, tensor):
        row.problems = (f"tied to {names[1:]} in the model, stored apart in the checkpoint",)
        row.is_apart = True
    if converts(spec.dtype, DTYPES.get(dtype)):
        row.stored = keys[0]
    else:
        row.problems += (f"dtype {spec.dtype} in checkpoint, {DTYPES.get(dtype, dtype)} in model",)
    return row


def _allocate_for_hooks(match: Match, source: Source, targets: LoadTargets) -> tuple[HookedState, list[ReadTarget]]:
    """Return new memory for the entries that the model's own code loads, sharded like live tensors, to be filled.

    Entries without a live tensor of their shape are whole on every rank, or on the meta device if only other pipeline
    stages have them. Entries whose differences were reported are left out.
    """
    specs, known, hidden = match.stored.tensors, match.stored.names, {*match.unexpected}
    rows = {name: row for row in match.rows for name in row.names}
    own = {*targets.model.tensors, *targets.model.aliases, *targets.whole.state}  # not names before PEFT
    entries, read, reported = _decoded(source, "model") or {}, dict[str, torch.Tensor](), {*match.missing_values}
    entries = {name: value for name, value in entries.items() if name not in hidden}
    for name in sorted(known.keys() - hidden, key=lambda name: (name not in rows, name)):
        key, row = known[name], rows.get(name)
        if row is not None and row.problems and not row.is_apart:
            continue
        if key not in read:
            dtype, shape = TORCH_DTYPES[specs[key].dtype], specs[key].shape
            if row is not None and shape == tuple(shape_of(row.tensor)):
                read[key] = new_like(row.tensor, dtype)
            elif name in match.elsewhere:
                read[key] = torch.empty(shape, dtype=dtype, device="meta")
            else:
                read[key] = torch.empty(source.checked_shape("model", key), dtype=dtype)
        for each in [each for each in row.names if each in own] if row is not None else [name]:
            entries.setdefault(each, read[key])
    for row in match.rows:
        if row.problems and not row.is_apart:
            reported.update(row.names)
        elif row.is_left_out:
            entries |= dict.fromkeys((name for name in row.names if name in own), row.tensor)
    hooked = HookedState(entries, frozenset(reported), _decoded(source, "versions"))
    return hooked, [ReadTarget("model", key, tensor) for key, tensor in read.items() if not tensor.is_meta]


def _decoded(source: Source, role: str) -> dict[str, Any] | None:
    """Return the decoded values of a document by name; None if there is none."""
    document = source.document(role)
    return None if document is None else {name: decode(value) for name, value in document.items()}


# ── one load ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load whose reads are planned and whose files are open on one rank. No live object changes before ``fill``."""

    targets: LoadTargets
    comparison: RankComparison  # of this rank
    read: Callable[[], None]  # fills the tensors, and verifies their bytes on the way
    optimizers: Sequence[OptimizerLoad] = ()
    trainer: dict[str, Any] = field(default_factory=dict)  # its tensors have no values before ``fill``
    extra_state: dict[str, Any] = field(default_factory=dict)  # non-tensor state of modules, by name
    hooked: HookedState | None = None  # entries that the modules' own code loads; None if their tensors are filled
    notes: list[str] = field(default_factory=list)  # for the user, about differences and conversions

    def fill(self, sources: Sources) -> None:
        """Fill the tensors, and put optimizer state in place; ``sources`` are of all ranks. Runs on every rank."""
        self.read()
        for optimizer in self.optimizers:
            self.notes.extend(optimizer.apply(sources))


def start_load(
    source: Source, live: LoadTargets, *, strict: bool = False, pick_rank: Callable[[Any], int] = lambda _: 0
) -> LoadJob:
    """Match the stored state with the live objects, plan the reads, and open the files for them.

    Runs on every rank. Changes no live object, and with ``strict`` plans nothing if there are differences.
    ``pick_rank`` returns the rank whose rank state is taken, given that of rank 0.

    Raises:
        MismatchError: if optimizers are loaded and the source has weights only.
        StateError: for tensors on the meta device, and for expanded tensors.
    """
    source, differences = live.fit_source(source)
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
        return LoadJob(live, comparison, lambda: None)
    rows, hooked, new = match.rows if live.has_model else (), None, list[ReadTarget]()
    model = [ReadTarget("model", row.stored, row.tensor) for row in rows if row.stored is not None]
    if match.is_hooked and live.has_model:
        hooked, new = _allocate_for_hooks(match, source, live)
    others = [*live.model.tensors.values(), *live.trainer_tensors.values()] if optimizers else []
    owners = Counter(map(_memory, (*others, *(tensor for one in optimizers for tensor in one.live_tensors()))))
    check = partial(source.checked_shape, "optimizer")
    found = [one.tensors(lambda tensor: owners[_memory(tensor)] == 1, check) for one in optimizers]
    of_optimizers = [ReadTarget("optimizer", key, tensor) for key, tensor in chain.from_iterable(found)]
    values = source.document("model") or {} if live.has_model else {}
    extra_state = {name: decode(value) for name, value in values.items() if name in live.extra_state}
    trainer, tensors = _read_trainer(source, live, match.elsewhere, pick_rank)
    of_trainer = [ReadTarget("trainer", key, tensor) for key, tensor in tensors.items()]
    of_user = [ReadTarget("trainer", key, tensor) for key, tensor in live.trainer_tensors.items()]
    _refuse_unfillable(source.path, (*model, *of_optimizers, *of_user))  # also those whose value is in JSON
    read = plan_reads(source, [*(model if hooked is None else new), *of_optimizers, *of_trainer])
    return LoadJob(live, comparison, read, optimizers, trainer, extra_state, hooked)


def _match_optimizers(source: Source, live: LoadTargets, match: Match) -> tuple[list[OptimizerLoad], list[str]]:
    """Return the optimizers to load, and a line for each difference."""
    document, optimizers, component = source.document("optimizer"), live.optimizers or (), match.stored
    dtypes = {row.key: component.tensors[row.stored].dtype for row in match.rows if row.stored is not None}
    reshaped = {name for row in match.rows if row.is_reshaped for name in row.names}
    same, loads, differences = match.same_tensor(), list[OptimizerLoad](), list[str]()
    if len(document) != len(optimizers):
        differences.append(f"optimizers  {len(document)} in checkpoint, {len(optimizers)} in model")
    for number, optimizer in enumerate(optimizers[: len(document)]):
        stored = StoredOptimizer(number, document[str(number)], source.component("optimizer"), decode)
        if stored.numbered and (problem := stored.name(_numbered_groups(live, optimizer))) is not None:
            hint = "" if not match.elsewhere else ": load it without pipeline parallelism, and save it again"
            differences.append(f"optimizer {number}  {problem}{hint}")
            continue
        load = OptimizerLoad(number, optimizer, stored, live.names, same, dtypes=dtypes, reshaped=reshaped)
        if (other := load.other_class()) is not None:
            differences.append(other)
            continue
        differences += load.compare(match.elsewhere)
        loads.append(load)
    return loads, differences


def _numbered_groups(live: LoadTargets, optimizer: Optimizer) -> list[list[str]]:
    """Return the names in the param groups of an optimizer, in the order in which torch numbers its parameters.

    In a pipeline, whose stages have a part of each group, only a single group of all parameters is known.
    """
    groups = [[live.names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    order = live.whole.parameters
    if not order or len(groups) > 1 or groups[0] != [name for name in order if name in groups[0]]:
        return groups
    return [[*order]]


def _read_trainer(
    source: Source, live: LoadTargets, elsewhere: frozenset[str], pick_rank: Callable[[Any], int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the trainer's state, and its tensors by key, which are filled later."""
    tensors: dict[str, torch.Tensor] = {}
    model, requested = live.model, live.trainer_tensors
    named = model.tensors | {alias: model.tensors[key] for alias, key in model.aliases.items()}

    def is_elsewhere(key: str) -> bool:  # in an entry that only other pipeline stages have
        entry = next((name for name in fqns_of(key) if name in live.whole.state), None)
        return entry in elsewhere

    for key, spec in source.component("trainer").tensors.items():
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
    first = decode(source.document("rank"))
    rank = 0 if first is None else pick_rank(first)
    trainer["rank_state"] = first if rank == 0 else decode(source.document("rank", rank))
    return trainer, {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}


def _memory(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _refuse_unfillable(path: str, targets: Iterable[ReadTarget]) -> None:
    """Raise a StateError for tensors that are made of others, on the meta device, or expanded."""
    names = dict[str, None]()
    for component, key, tensor in targets:
        local = local_tensor(tensor)
        if type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta and local.is_contiguous():
            continue  # a fast path: nearly all have contiguous memory of their own
        refuse_compound(tensor, name := f"{component}/{key}")
        is_expanded = any(n > 1 and not stride for n, stride in zip(local.shape, local.stride(), strict=True))
        if local.is_meta or (is_expanded and not local.is_contiguous()):
            names[name] = None
    if names:
        raise StateError(
            f"cannot load {path!r} into tensors that have no memory, or whose elements share memory: "
            f"{list_some([*names], _LISTED)}. Give them memory first: those on the meta device by "
            'module.to_empty(device="cpu"), or in Fabric load after fabric.setup; others by clone()'
        )
