"""One load on one rank: match stored state with live objects, plan the reads, and apply the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.load_targets import LoadState, LoadTargets
from lightning_shardckpt.checkpoint.model_match import ModelMatch
from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.reading import ReadTarget, are_equal, plan_reads
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import is_expanded, new_like, overlapping
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.load_hooks import HookedState
from lightning_shardckpt.state.optimizer_load import Groups, OptimizerLoad, join_groups
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, refuse_compound
from lightning_shardckpt.state.trainer import drop_elsewhere, entry_of, find_counterpart
from lightning_shardckpt.system.text import count_text, list_some

_LISTED = 20


class RankComparison(TypedDict):
    """The comparison of stored and live state on one rank, as JSON for a step of ranks."""

    differences: list[str]
    sources: dict[str, list[int] | None]
    """The stored param groups that each live group ``<optimizer>/<group>`` continues; None without parameters here."""
    kept: list[str]
    """Keys of adapters that the checkpoint does not have."""
    casts: list[str]
    is_full: bool
    """Whether every live tensor gets a value, as far as there are no differences."""
    groups: Groups | None
    """This rank's param groups, if state by number needs those of all pipeline stages; then nothing was compared."""


class LoadDecision(TypedDict):
    """Rank 0's decision from the comparisons of all ranks."""

    notes: list[str]
    is_full: bool
    """Whether every live tensor of all ranks gets a value."""
    sources: dict[str, list[int] | None]
    groups: Groups | None
    """The param groups of the whole model, for another comparison with state by number."""


class LoadJob:
    """One load on one rank: match and plan, decide for all ranks, fill and apply.

    Args:
        source: the stored state.
        live: the live objects to fill, on which the ranks have agreed.
        strict: raise an error for differences.
        pick_rank: returns the rank whose rank state is taken, given that of rank 0.
    """

    def __init__(self, source: Source, live: LoadState, strict: bool, pick_rank: Callable[[Any], int]) -> None:
        self.source, self._state, self._strict, self._pick_rank = source, live, strict, pick_rank
        self._live: LoadTargets
        self._is_open, self._unfitted = False, list[str]()
        self._components: Mapping[str, Component] = {}
        self._elsewhere = frozenset[str]()
        self._read: Callable[[], None]
        self.sources: dict[str, list[int] | None] = {}
        self._optimizers: list[OptimizerLoad] = []
        self.trainer: dict[str, Any] = {}
        self.extra_state: dict[str, Any] = {}
        self.notes: list[str] = []
        self.hooked: HookedState | None = None
        self.settings: set[tuple[int, int, str]] = set()
        self._model: ModelMatch

    def _open(self) -> None:
        """Fit the live objects and the source to each other, before they are compared."""
        if self._is_open:
            return
        live = self._live = self._state.targets()
        self._elsewhere = live.whole.elsewhere({*live.model.tensors, *live.model.aliases, *live.extra_state})
        if live.fit_source is not None:
            self.source, self._unfitted = live.fit_source(self.source)
        if live.optimizers is not None and self.source.document("optimizer") is None:
            raise MismatchError(
                f"cannot resume training from {self.source.path!r}: it holds weights only, no optimizer state. "
                "validate, test and predict can use it, and training can begin with it: "
                "ShardedStrategy(pretrained=path). To resume training, save with save_weights_only=False."
            )
        if live.optimizers is not None and live.regroup is not None:
            live.regroup(self.source.trainer(lambda key: torch.empty(0)))
        self._is_open = True

    def match(self, groups: Groups | None = None) -> RankComparison:
        """Match the stored tensors with the live ones, plan the reads, and open the files for them. Runs on every rank.

        Changes no live object.

        Args:
            groups: the param groups of the whole model, for optimizer state by number; by default this rank's.

        Returns:
            All differences of model and optimizers, and the stored param groups that each live group continues; or this
            rank's param groups, to be joined with those of other pipeline stages.
        """
        self._open()
        names, optimizers = self._live.names, self._live.optimizers or ()
        own = [[[names[id(p)] for p in group["params"]] for group in one.param_groups] for one in optimizers]
        stored = self.source.document("optimizer") if optimizers else {}
        if groups is None and self._state.in_stages and any(one["numbered"] for one in stored.values()):
            return {"differences": [], "sources": {}, "kept": [], "casts": [], "is_full": False, "groups": own}
        report = self._compare(own if groups is None else groups)
        if not (self._strict and report["differences"]):
            self._read = plan_reads(self.source, self._plan())
        return report

    def _compare(self, groups: Groups) -> RankComparison:
        differences = [*self._unfitted]
        self._components = self.source.components()
        model = self._model = ModelMatch(self.source, self._live, self._elsewhere)
        differences += model.problems if model.is_loaded else []
        if self._live.optimizers is not None:
            reshaped = model.reshaped()
            for name in sorted(name for name in reshaped if not model.is_loaded):
                differences.append(f"{name}  has another shape in the checkpoint, and so has its state in optimizers")
            self._compare_optimizers(self._live.optimizers, groups, reshaped, differences)
        sources = {group: numbers for load in self._optimizers for group, numbers in load.sources().items()}
        return {
            "differences": differences,
            "sources": sources,
            "kept": model.kept,
            "casts": model.casts() if model.is_loaded else [],
            "is_full": model.is_full,
            "groups": None,
        }

    def decide(self, reports: list[RankComparison]) -> LoadDecision:
        """Merge the comparisons of all ranks. Runs on rank 0.

        Raises:
            MismatchError: listing each difference once, if ``strict``.
        """
        if parts := [report["groups"] for report in reports if report["groups"] is not None]:
            joined = join_groups(parts, self._live.whole.parameters)
            return {"notes": [], "is_full": False, "sources": {}, "groups": joined}
        problems = list(dict.fromkeys(line for report in reports for line in report["differences"]))
        count = len(problems)
        listed, path = list_some(problems, _LISTED, "\n  "), repr(self.source.path)
        count_and_noun = count_text(count, "difference")
        if count and self._strict:
            raise MismatchError(
                f"cannot load {path} into this model: {count_and_noun}\n  {listed}\n"
                f"{self._live.remedy} to load the rest, or look with "
                "`python -m lightning_shardckpt inspect PATH`."
            )
        note = f"left as they are: {count_and_noun} between {path} and this model\n  {listed}"
        sources: dict[str, list[int] | None] = {}
        for group, numbers in ((g, n) for report in reports for g, n in report["sources"].items()):
            known = sources.get(group)
            sources[group] = known if numbers is None else list(dict.fromkeys([*(known or ()), *numbers]))
        notes = [note] if count else []
        if kept := list(dict.fromkeys(key for report in reports for key in report["kept"])):
            notes.append(f"{path} has no adapters: {count_text(len(kept), 'tensor')} of adapters left as they are")
        if casts := sorted({cast for report in reports for cast in report["casts"]}):
            notes.append(f"{path} is converted while it is read, to the dtypes of this model: {', '.join(casts)}")
        is_full = not count and all(report["is_full"] for report in reports)
        return {"notes": notes, "is_full": is_full, "sources": sources, "groups": None}

    def take(self, decision: LoadDecision) -> None:
        """Take rank 0's decision."""
        self.notes, self.sources = decision["notes"], decision["sources"]

    def _plan(self) -> list[ReadTarget]:
        """Allocate missing tensors and read non-tensor state; return the tensors to fill.

        Raises:
            StateError: for tensors on the meta device, and for expanded tensors.
        """
        groups = [group for optimizer in self._live.optimizers or () for group in optimizer.param_groups]
        live = {shape_of(param) for group in groups for param in group["params"]}
        for key, spec in self._components.get("optimizer", Component({})).tensors.items() if self._optimizers else ():
            if spec.shape not in live and not self._elsewhere:
                self.source.checked_shape("optimizer", key)  # checks that the stored bytes have the claimed shape
        shared = overlapping(self._live_tensors())
        tensors = self._live.model.tensors
        keys = self._model.keys if self._model.is_loaded else {}
        live_tensors = [("model", key, tensors[name]) for name, key in keys.items()]
        new: list[tuple[str, str, torch.Tensor]] = []
        unfilled, entries = list[tuple[str, str, torch.Tensor]](), list[ReadTarget]()
        if self._model.is_hooked:
            unfilled, live_tensors = live_tensors, []
            self.hooked, entries = self._model.allocate()
        for optimizer in self._optimizers:
            existing, allocated = optimizer.tensors(shared)
            live_tensors += [("optimizer", key, tensor) for key, tensor in existing]
            new += [("optimizer", key, tensor) for key, tensor in allocated]
        extra = self.source.document("model") or {}
        if self._live.has_model:
            names = (name for name in extra if name in self._live.extra_state)
            self.extra_state = {name: decode_small(extra[name]) for name in names}
        for key, tensor in self._read_trainer().items() if self._live.has_trainer else ():
            (live_tensors if tensor is self._live.trainer_tensors.get(key) else new).append(("trainer", key, tensor))
        of_optimizers = [item for item in new if item[0] == "optimizer"]
        of_trainer = [("trainer", key, tensor) for key, tensor in self._live.trainer_tensors.items()]  # some in JSON
        _refuse_unfillable(self.source.path, [*live_tensors, *of_trainer, *unfilled, *of_optimizers])
        targets = [ReadTarget(component, key, tensor) for component, key, tensor in live_tensors]
        for target in targets:
            if is_expanded(target.local):
                raise StateError(
                    f"{target.component}/{target.key} cannot be filled: elements of the tensor share memory (shape "
                    f"{tuple(target.local.shape)}, strides {target.local.stride()}); load into a clone of it"
                )
        return targets + entries + [ReadTarget(component, key, tensor) for component, key, tensor in new]

    def _live_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that optimizer state could share memory with."""
        if self._optimizers:
            yield from self._live.model.tensors.values()
            yield from self._live.trainer_tensors.values()
        for optimizer in self._optimizers:
            yield from optimizer.live_tensors()

    def _compare_optimizers(
        self, live: Sequence[Optimizer], groups: Groups, reshaped: frozenset[str], differences: list[str]
    ) -> None:
        document, component = self.source.document("optimizer"), self._components.get("optimizer")
        same, alike = self._model.same_tensor(), partial(are_equal, self.source, "optimizer")
        if len(document) != len(live):
            differences.append(f"optimizers  {len(document)} in checkpoint, {len(live)} in model")
        for number, optimizer in enumerate(live[: len(document)]):
            stored = StoredOptimizer(number, document[str(number)], component, decode_equal)
            problem = self._name_parameters(stored, groups[number]) if stored.numbered else None
            if problem is not None:
                differences.append(f"optimizer {number}  {problem}")
                continue
            dtypes, names = self._model.dtype, self._live.names
            load = OptimizerLoad(number, optimizer, stored, names, same, dtypes=dtypes, reshaped=reshaped)
            load.compare(differences, self._elsewhere, alike)
            self._optimizers.append(load)

    def _name_parameters(self, stored: StoredOptimizer, groups: list[list[str]]) -> str | None:
        """Name state that was saved by number; return the reason if that is impossible."""
        problem = stored.name(groups)
        if problem is not None and self._elsewhere and not self._live.whole.parameters:
            return (
                "numbers the parameters of the whole model in the checkpoint, and a pipeline stage cannot tell its "
                "own; resume from a directory that ShardedStrategy saved, or without pipeline parallelism"
            )
        return problem

    def _read_trainer(self) -> dict[str, torch.Tensor]:
        """Read the trainer's state; return its tensors by key, which are filled later."""
        component = self._components.get("trainer", Component({}))
        tensors: dict[str, torch.Tensor] = {}
        model = self._live.model
        live = model.tensors | {alias: model.tensors[of] for alias, of in model.aliases.items()}
        for key, spec in component.tensors.items():
            given, dtype = self._live.trainer_tensors.get(key), TORCH_DTYPES[spec.dtype]
            if given is not None and (tuple(given.shape), given.dtype) == (spec.shape, dtype):
                tensors[key] = given
                continue
            # a pinned tensor is a plain tensor of one rank, and stays one
            like = None if spec.pinned else self._live.like.get(key, find_counterpart(key, spec.shape, live))
            device = "meta" if self._is_elsewhere(key) else None
            if like is not None and tuple(like.shape) == spec.shape:
                tensors[key] = new_like(like, dtype)
                continue
            shape = spec.shape if device == "meta" else self.source.checked_shape("trainer", key)
            tensors[key] = torch.empty(shape, dtype=dtype, device=device)
        self.trainer = self.source.trainer(tensors.__getitem__)
        if self._elsewhere:
            requested = self._live.trainer_tensors
            drop_elsewhere(self.trainer, lambda key: key not in requested and self._is_elsewhere(key))
        first = decode_small(self.source.document("rank"))
        rank = 0 if first is None else self._pick_rank(first)
        self.trainer["rank_state"] = first if rank == 0 else decode_small(self.source.document("rank", rank))
        return {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}

    def _is_elsewhere(self, key: str) -> bool:
        """Return True if a key of trainer state belongs to an entry that only other pipeline stages have."""
        return bool(self._elsewhere) and entry_of(key, self._live.whole.state) in self._elsewhere

    def fill(self) -> None:
        """Fill the tensors, verify their bytes on the way, and put optimizer state in place. Runs on every rank."""
        self._read()
        for optimizer in self._optimizers:
            self.notes += optimizer.apply(self.sources)
            self.settings |= optimizer.settings


def _refuse_unfillable(path: str, tensors: Sequence[tuple[str, str, torch.Tensor]]) -> None:
    """Raise a StateError for tensors that are made of others, or on the meta device."""
    for component, key, tensor in tensors:
        refuse_compound(tensor, f"{component}/{key}")
    on_meta = (f"{component}/{key}" for component, key, tensor in tensors if local_tensor(tensor).is_meta)
    names = list(dict.fromkeys(on_meta))
    if names:
        raise StateError(
            f"cannot load {path!r} into tensors on the meta device, which have no memory: "
            f"{list_some(names, _LISTED)}. Give them some "
            'first, such as by module.to_empty(device="cpu"), or in Fabric load after fabric.setup'
        )
