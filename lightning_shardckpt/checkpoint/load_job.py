"""One load on one rank: match stored state with live objects, plan the reads, and apply the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch

from lightning_shardckpt.checkpoint.match import LoadTargets, Match, allocate_for_hooks, match_targets
from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.reading import ReadTarget, plan_reads
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import is_expanded, local_tensor, new_like
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.load_hooks import HookedState
from lightning_shardckpt.state.optimizer import Groups, OptimizerLoad, join_groups
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


class LoadState(Protocol):
    """Live state that becomes targets when the ranks have agreed on it."""

    def look(self) -> Any:
        """Return this rank's view of the state, as JSON."""

    def agree(self, views: list[Any], ranks: Ranks) -> None:
        """Take the different views of all ranks. Collective: every rank must call it."""

    def targets(self) -> LoadTargets:
        """Return the objects to fill."""


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
        live: the objects to fill.
        strict: raise an error for differences.
        pick_rank: returns the rank whose rank state is taken, given that of rank 0.

    Raises:
        MismatchError: if optimizers are loaded and the source has weights only.
    """

    def __init__(
        self,
        source: Source,
        live: LoadTargets,
        *,
        strict: bool = False,
        pick_rank: Callable[[Any], int] = lambda _: 0,
    ) -> None:
        self._live, self._strict, self._pick_rank = live, strict, pick_rank
        self._elsewhere = live.elsewhere
        self._source, self._unfitted = (source, []) if live.fit_source is None else live.fit_source(source)
        self._components = self._source.components()
        if live.optimizers is not None and self._source.document("optimizer") is None:
            raise MismatchError(
                f"cannot resume training from {self._source.path!r}: it holds weights only, no optimizer state. "
                "validate, test and predict can use it, and training can begin with it: "
                "ShardedStrategy(pretrained=path). To resume training, save with save_weights_only=False."
            )
        self._read: Callable[[], None]
        self._optimizers: list[OptimizerLoad] = []
        self.trainer: dict[str, Any] = {}
        self.extra_state: dict[str, Any] = {}
        self.hooked: HookedState | None = None

    @property
    def settings(self) -> set[tuple[int, int, str]]:
        """The hyper-parameters that ``fill`` has loaded: optimizer, param group and key."""
        return {setting for optimizer in self._optimizers for setting in optimizer.settings}

    def match(self, groups: Groups | None = None) -> RankComparison:
        """Match the stored tensors with the live ones, plan the reads, and open the files for them. Runs on every rank.

        Changes no live object.

        Args:
            groups: the param groups of the whole model, for optimizer state by number; by default this rank's.

        Returns:
            All differences of model and optimizers, and the stored param groups that each live group continues; or this
            rank's param groups, to be joined with those of other pipeline stages.
        """
        live, names = self._live, self._live.names
        own = [[[names[id(p)] for p in group["params"]] for group in one.param_groups] for one in live.optimizers or ()]
        stored = self._source.document("optimizer") if live.optimizers else {}
        if groups is None and live.in_stages and any(one["numbered"] for one in stored.values()):
            return {"differences": [], "sources": {}, "kept": [], "casts": [], "is_full": False, "groups": own}
        match = match_targets(self._source, live)
        differences = self._unfitted + (match.problems if live.has_model else [])
        if live.optimizers is not None:
            differences += self._compare_optimizers(match, own if groups is None else groups)
        if not (self._strict and differences):
            self._read = plan_reads(self._source, self._plan(match))
        return {
            "differences": differences,
            "sources": {group: numbers for one in self._optimizers for group, numbers in one.sources().items()},
            "kept": list(match.kept),
            "casts": match.casts() if live.has_model else [],
            "is_full": match.is_full,
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
        count, path = len(problems), repr(self._source.path)
        counted, listed = count_text(count, "difference"), list_some(problems, _LISTED, "\n  ")
        if count and self._strict:
            raise MismatchError(
                f"cannot load {path} into this model: {counted}\n  {listed}\n"
                f"{self._live.remedy} to load the rest, or look with "
                "`python -m lightning_shardckpt inspect PATH`."
            )
        sources: dict[str, list[int] | None] = {}
        for group, numbers in ((g, n) for report in reports for g, n in report["sources"].items()):
            known = sources.get(group)
            sources[group] = known if numbers is None else list(dict.fromkeys([*(known or ()), *numbers]))
        notes = [f"left as they are: {counted} between {path} and this model\n  {listed}"] if count else []
        if kept := list(dict.fromkeys(key for report in reports for key in report["kept"])):
            notes.append(f"{path} has no adapters: {count_text(len(kept), 'tensor')} of adapters left as they are")
        if casts := sorted({cast for report in reports for cast in report["casts"]}):
            notes.append(f"{path} is converted while it is read, to the dtypes of this model: {', '.join(casts)}")
        is_full = not count and all(report["is_full"] for report in reports)
        return {"notes": notes, "is_full": is_full, "sources": sources, "groups": None}

    def fill(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Fill the tensors, verify their bytes on the way, and put optimizer state in place. Runs on every rank.

        Args:
            sources: of ``decide``.

        Returns:
            Sentences for the user.
        """
        self._read()
        return [note for optimizer in self._optimizers for note in optimizer.apply(sources)]

    # --- optimizers ---

    def _compare_optimizers(self, match: Match, groups: Groups) -> list[str]:
        """Match the optimizers; return the differences."""
        document, live = self._source.document("optimizer"), self._live.optimizers or ()
        same, dtypes, reshaped, differences = match.same_tensor(), match.dtypes(), match.reshaped(), list[str]()
        for name in sorted(reshaped) if not self._live.has_model else ():
            differences.append(f"{name}  has another shape in the checkpoint, and so has its state in optimizers")
        if len(document) != len(live):
            differences.append(f"optimizers  {len(document)} in checkpoint, {len(live)} in model")
        for number, optimizer in enumerate(live[: len(document)]):
            stored = StoredOptimizer(
                number, document[str(number)], self._components.get("optimizer"), decode_small
            )
            problem = self._name_parameters(stored, groups[number]) if stored.numbered else None
            if problem is not None:
                differences.append(f"optimizer {number}  {problem}")
                continue
            names = self._live.names
            load = OptimizerLoad(number, optimizer, stored, names, same, dtypes=dtypes, reshaped=reshaped)
            if (other := load.other_class()) is not None:
                differences.append(other)
                continue
            differences += load.compare(self._elsewhere)
            self._optimizers.append(load)
        return differences

    def _name_parameters(self, stored: StoredOptimizer, groups: list[list[str]]) -> str | None:
        """Name state that was saved by number; return the reason if that is impossible."""
        problem = stored.name(groups)
        if problem is not None and self._elsewhere and not self._live.whole.parameters:
            return (
                "numbers the parameters of the whole model in the checkpoint, and a pipeline stage cannot tell its "
                "own; resume from a directory that ShardedStrategy saved, or without pipeline parallelism"
            )
        return problem

    # --- reads ---

    def _plan(self, match: Match) -> list[ReadTarget]:
        """Allocate missing tensors and read non-tensor state; return the tensors to fill.

        Raises:
            StateError: for tensors on the meta device, and for expanded tensors.
        """
        groups = [group for optimizer in self._live.optimizers or () for group in optimizer.param_groups]
        live = {shape_of(param) for group in groups for param in group["params"]}
        for key, spec in self._components.get("optimizer", _EMPTY).tensors.items() if self._optimizers else ():
            if spec.shape not in live and not self._elsewhere:
                self._source.checked_shape("optimizer", key)  # checks that the stored bytes have the claimed shape
        owners, filled, new = Counter(map(_memory, self._live_tensors())), list[ReadTarget](), list[ReadTarget]()
        keys = match.keys if self._live.has_model else {}
        tensors = [ReadTarget("model", key, self._live.model.tensors[name]) for name, key in keys.items()]
        if match.is_hooked:
            self.hooked, new = allocate_for_hooks(match, self._source, self._live)
        else:
            filled += tensors
        allocated = list[ReadTarget]()
        for optimizer in self._optimizers:
            found_by_kind = optimizer.tensors(lambda tensor: owners[_memory(tensor)] == 1)
            for place, found in zip((filled, allocated), found_by_kind, strict=True):
                place += [ReadTarget("optimizer", key, tensor) for key, tensor in found]
        if self._live.has_model:
            extra = self._source.document("model") or {}
            self.extra_state = {n: decode_small(value) for n, value in extra.items() if n in self._live.extra_state}
        requested = self._live.trainer_tensors  # some may be in JSON
        for key, tensor in self._read_trainer().items() if self._live.has_trainer else ():
            (filled if tensor is requested.get(key) else new).append(ReadTarget("trainer", key, tensor))
        in_json = [ReadTarget("trainer", key, tensor) for key, tensor in requested.items()]
        live_targets = [*(tensors if match.is_hooked else ()), *filled, *in_json, *allocated]
        _refuse_unfillable(self._source.path, [one for one in live_targets if not _is_plain(one.local)])
        return filled + allocated + new

    def _live_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that optimizer state could share memory with."""
        if self._optimizers:
            yield from self._live.model.tensors.values()
            yield from self._live.trainer_tensors.values()
        for optimizer in self._optimizers:
            yield from optimizer.live_tensors()

    def _read_trainer(self) -> dict[str, torch.Tensor]:
        """Read the trainer's state; return its tensors by key, which are filled later."""
        tensors: dict[str, torch.Tensor] = {}
        model = self._live.model
        live = model.tensors | {alias: model.tensors[key] for alias, key in model.aliases.items()}
        for key, spec in self._components.get("trainer", _EMPTY).tensors.items():
            given, dtype = self._live.trainer_tensors.get(key), TORCH_DTYPES[spec.dtype]
            # a pinned tensor is a plain tensor of one rank, and stays one
            like = None if spec.pinned else self._live.like.get(key, find_counterpart(key, spec.shape, live))
            if given is not None and (tuple(given.shape), given.dtype) == (spec.shape, dtype):
                tensors[key] = given
            elif like is not None and tuple(like.shape) == spec.shape:
                tensors[key] = new_like(like, dtype)
            elif self._is_elsewhere(key):
                tensors[key] = torch.empty(spec.shape, dtype=dtype, device="meta")
            else:
                tensors[key] = torch.empty(self._source.checked_shape("trainer", key), dtype=dtype)
        self.trainer = self._source.trainer(tensors.__getitem__)
        if self._elsewhere:
            requested = self._live.trainer_tensors
            drop_elsewhere(self.trainer, lambda key: key not in requested and self._is_elsewhere(key))
        first = decode_small(self._source.document("rank"))
        rank = 0 if first is None else self._pick_rank(first)
        self.trainer["rank_state"] = first if rank == 0 else decode_small(self._source.document("rank", rank))
        return {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}

    def _is_elsewhere(self, key: str) -> bool:
        """Return True if a key of trainer state belongs to an entry that only other pipeline stages have."""
        return bool(self._elsewhere) and entry_of(key, self._live.whole.state) in self._elsewhere


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
