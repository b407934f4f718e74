"""The match table of a load: the stored tensor for each live tensor of the model, or the reason for none.

``match_targets`` makes it for every load, from the live objects and a source under their names (see
``sources.model_names``). Ties and load hooks are filters over it. Changes no live object.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.format.clean_fqn import base_fqn
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.reading import ReadTarget, are_equal, converts
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.dtensor_layout import new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.load_hooks import NO_HOOKS, HookedState, LoadHooks
from lightning_shardckpt.state.model import WholeNames, model_leaves, names_of, parameter_names
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES
from lightning_shardckpt.system.host import gc_paused

_IN_MODEL, _IN_CHECKPOINT = "in model only", "in checkpoint only"


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The objects to load into.

    Attributes:
        model: the model's tensors, by name.
        extra_state: canonical names of the model's non-tensor values.
        optimizers: the optimizers to fill; None loads weights only.
        names: FQN by ``id`` of the parameter.
        whole: names of the model over all pipeline stages.
        fit_source: converts a source to the names of the model; returns it with a line for each problem. May change the
            param groups of the optimizers.
        trainer_tensors: the user's tensors to fill, by key of trainer state.
        like: tensors with the layout for trainer state that is allocated, by its key.
        remedy: the way to load in spite of differences, for messages.
        has_model: False loads the optimizers alone.
        has_trainer: False leaves out the trainer's state.
        hooks: the load hooks of the model's modules.
    """

    model: Leaves
    extra_state: frozenset[str]
    optimizers: Sequence[Optimizer] | None
    names: Mapping[int, str]
    whole: WholeNames
    fit_source: Callable[[Source], tuple[Source, list[str]]] | None = None
    trainer_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    like: Mapping[str, torch.Tensor] = field(default_factory=dict)
    remedy: str = "Set strict_loading=False on the LightningModule"
    has_model: bool = True
    has_trainer: bool = True
    hooks: LoadHooks = NO_HOOKS

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
        """Return the targets for a module's state dict, and the state of optimizers.

        Args:
            module: of the state dict.
            state_dict: with the tensors that are filled in place.
            whole: the names of all pipeline stages.
            optimizers: of the module's parameters; None to load only weights.
            modules: of which ``module`` is made, by the prefix of their names; by default itself.
            is_changed: True if other code will change the entries before the module takes them.
        """
        leaves, values = model_leaves(state_dict, module, whole)
        names = parameter_names(module, whole) if optimizers is not None else {}
        hooks = LoadHooks.of({"": module} if modules is None else modules, state_dict, of_all=is_changed)
        return cls(leaves, frozenset(values), optimizers, names, whole, hooks=hooks)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The names of entries that only other pipeline stages have."""
        return self.whole.elsewhere({*self.model.tensors, *self.model.aliases, *self.extra_state})


@dataclass(slots=True, eq=False)
class MatchRow:
    """A live tensor of the model. Its differences from the stored tensor are in ``problems``.

    Attributes:
        key: its name.
        names: all its names: of ties, on other pipeline stages, and before PEFT wrapped the model.
        tensor: the live tensor.
        stored: key of the matching stored tensor, or None.
        problems: the differences between the two.
        is_missing: True if the checkpoint does not have it.
        is_left_out: True if the save left it out.
        is_apart: True if it is tied in the model and stored with several values; the first is used.
    """

    key: str
    names: list[str]
    tensor: torch.Tensor
    stored: str | None = None
    problems: tuple[str, ...] = ()
    is_missing: bool = False
    is_left_out: bool = False
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """The match of a model with stored state.

    Attributes:
        rows: of the tensors.
        stored: the stored model.
        ties: the names of each tied tensor, over all pipeline stages.
        unexpected: names that only the checkpoint has.
        missing_values: names of entries other than tensors that only the model has.
        is_full: True if every live tensor gets a value, unless there are problems: none was left out by the save.
        is_hooked: True if the model's own code loads its entries; otherwise they are filled in place.
    """

    rows: Sequence[MatchRow]
    stored: Component
    ties: Sequence[Sequence[str]]
    unexpected: Sequence[str]
    missing_values: Sequence[str]
    is_full: bool
    is_hooked: bool = False

    @property
    def keys(self) -> dict[str, str]:
        """The stored keys of the tensors that are loaded, by live name."""
        return {row.key: row.stored for row in self.rows if row.stored is not None}

    @property
    def problems(self) -> list[str]:
        """The differences, a line each."""
        lines = [f"{row.key}  {problem}" for row in self.rows for problem in row.problems]
        lines += [f"{name}  {_IN_CHECKPOINT}" for name in self.unexpected]
        return lines + [f"{name}  {_IN_MODEL}" for name in self.missing_values]

    def same_tensor(self) -> Callable[[str], Sequence[str]]:
        """Return a function that maps the name of a live parameter to all names of its tensor, its own first.

        The state of a parameter is found by any of these names, live or stored, so it does not matter under which name
        of a tie the model registers it or the checkpoint stores it.
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

    def dtypes(self) -> Mapping[str, str]:
        """Return the dtypes of the stored tensors that match, by live name."""
        return {name: self.stored.tensors[key].dtype for name, key in self.keys.items()}

    def reshaped(self) -> frozenset[str]:
        """Return the names of live tensors whose stored shape differs."""
        known, names = self.stored.names, set[str]()
        for row in self.rows:
            stored = next((known[name] for name in row.names if name in known), None) if row.stored is None else None
            if stored is not None and self.stored.tensors[stored].shape != shape_of(row.tensor):
                names.update(row.names)
        return frozenset(names)


def match_targets(source: Source, targets: LoadTargets) -> Match:
    """Match the tensors of the model with stored ones.

    Args:
        source: the stored state, under the names of the model.
        targets: the live objects.
    """
    stored, left_out = source.components().get("model", Component({})), source.document("frozen") or {}
    known, elsewhere = stored.names, targets.elsewhere
    ties = targets.whole.ties
    names = names_of(targets.model, ties)
    rows = [_row(source, key, names[key], tensor, known, left_out) for key, tensor in targets.model.tensors.items()]
    values = {*(source.document("model") or {})}
    own = {name for group in names.values() for name in group}
    unexpected = (known.keys() | left_out.keys()) - own | values - targets.extra_state
    unexpected = unexpected.difference(elsewhere, map(base_fqn, elsewhere)) if unexpected else set()
    missing = sorted(targets.extra_state - values)
    match = Match(rows, stored, ties, sorted(unexpected), missing, is_full=not left_out)
    return _leave_to_hooks(match, targets.hooks) if targets.has_model else match


def _row(
    source: Source,
    key: str,
    names: list[str],
    tensor: torch.Tensor,
    known: Mapping[str, str],
    left_out: Mapping[str, Any],
) -> MatchRow:
    """Return the row of a live tensor.

    A tensor that is not stored under any of its names is matched by its name before PEFT wrapped the model.
    """
    row = MatchRow(key, names, tensor)
    if len(names) == 1 and key in known:  # a fast path: nearly all tensors
        keys = [known[key]]
    else:
        keys = list(dict.fromkeys(known[name] for name in names if name in known))
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
        row.is_missing, row.problems = True, (f"{_IN_MODEL}; the checkpoint has {near[0]!r}" if near else _IN_MODEL,)
        return row
    spec, dtype = source.table["model"][keys[0]].spec, local_tensor(tensor).dtype
    if spec.shape != shape_of(tensor):
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


# ── load hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _leave_to_hooks(match: Match, hooks: LoadHooks) -> Match:
    """Return the match without the differences that hooks may remove, if there are any hooks."""
    differing = {name for row in match.rows if row.problems for name in row.names}
    if not hooks.act_on((*differing, *match.unexpected, *match.missing_values)):
        return replace(match, is_hooked=hooks.of_all)
    for row in match.rows:
        if not row.is_apart:
            row.problems, row.is_missing = (), False
    return replace(match, unexpected=[], missing_values=[], is_hooked=True)


def allocate_for_hooks(match: Match, source: Source, targets: LoadTargets) -> tuple[HookedState, list[ReadTarget]]:
    """Allocate memory for the entries that the model's own code loads, sharded like live tensors of their shape.

    Entries without a live tensor of their shape are whole on every rank, or on the meta device if only other pipeline
    stages have them. Entries whose differences were reported are left out.

    Returns:
        The entries, and the tensors to fill.
    """
    specs, known = match.stored.tensors, match.stored.names
    rows = {name: row for row in match.rows for name in row.names}
    own = {*targets.model.tensors, *targets.model.aliases, *targets.whole.state}  # not names before PEFT
    document, hidden, reported = source.document("model") or {}, {*match.unexpected}, {*match.missing_values}
    entries: dict[str, Any] = {name: decode_small(value) for name, value in document.items() if name not in hidden}
    read = dict[str, torch.Tensor]()
    for name in sorted(known.keys() - hidden, key=lambda name: (name not in rows, name)):
        key, row = known[name], rows.get(name)
        if row is not None and row.problems and not row.is_apart:
            continue
        if key not in read:
            dtype, shape = TORCH_DTYPES[specs[key].dtype], specs[key].shape
            if row is not None and shape == tuple(shape_of(row.tensor)):
                read[key] = new_like(row.tensor, dtype)
            elif name in targets.elsewhere:
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
    versions = source.document("versions")
    decoded = None if versions is None else {name: decode_small(value) for name, value in versions.items()}
    hooked = HookedState(entries, frozenset(reported), decoded)
    return hooked, [ReadTarget("model", key, tensor) for key, tensor in read.items() if not tensor.is_meta]
