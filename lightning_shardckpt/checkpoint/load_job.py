"""One load on one rank: match stored state with live objects, plan what is read, and apply it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.load_targets import LoadTargets, Skips, note_of_skipped
from lightning_shardckpt.checkpoint.model_match import ModelMatch
from lightning_shardckpt.compat.dtensor import local_tensor, shape_of
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import ReadTarget, Source, are_equal
from lightning_shardckpt.sources.source_view import read_converted
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import is_expanded, new_like, overlapping
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.model import Differences
from lightning_shardckpt.state.module_io import ForCode
from lightning_shardckpt.state.optimizer_load import OptimizerLoad
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.state.trainer import drop_elsewhere, entry_of, sharded_like
from lightning_shardckpt.system.text import count_text

_LISTED = 20


class Skipped(TypedDict):
    """The state that ``skip`` left as it is on one rank: the patterns that matched, and the names."""

    used: list[str]
    names: list[str]


class RankFindings(TypedDict):
    """The findings of one rank, as JSON, which is what a step of ranks exchanges."""

    differences: list[str]
    sources: dict[str, list[int] | None]
    """By ``<optimizer>/<live group>``, the stored param groups that it continues; None if it has no parameters here."""
    kept: list[str]
    """Keys of adapters that the checkpoint does not have."""
    groups: dict[str, list[list[str]]]
    """Of optimizers that are joined over pipeline stages, the names in each param group here."""
    casts: list[str]
    skipped: Skipped


class Judgement(TypedDict):
    """Rank 0's conclusion from the findings of all ranks."""

    notes: list[str]
    skipped: list[str]
    sources: dict[str, list[int] | None]
    joined: dict[str, list[list[str]]]
    """Of joined optimizers, the param groups of the whole model."""


class LoadJob:
    """One load on one rank: compared first, then judged for all ranks, planned, filled and applied."""

    def __init__(self, source: Source, live: LoadTargets, strict: bool, pick_rank: Callable[[Any], int]) -> None:
        self.source, self._live, self._strict, self._pick_rank = source, live, strict, pick_rank
        self._components: Mapping[str, Component] = {}
        here = {*live.model.tensors, *live.model.aliases, *live.extra_state}
        self._elsewhere = live.whole.elsewhere(here)
        self.sources: dict[str, list[int] | None] = {}
        self._optimizers: list[OptimizerLoad] = []
        self.trainer: dict[str, Any] = {}
        self.extra_state: dict[str, Any] = {}
        self._skips = Skips(live.skip)
        self.notes: list[str] = []
        self.skipped: list[str] = []
        self.for_code = ForCode()
        self._model: ModelMatch

    def compare(self) -> RankFindings:
        """Match the stored tensors with the live ones. Changes nothing. Runs on every rank.

        Returns every difference over model and optimizers, and which stored param groups each live one continues.
        """
        found = Differences()
        if self._live.fitting is not None:
            self.source, problems = self._live.fitting(self.source)
            found.problems += problems
        self._components = self.source.components()
        model = self._model = ModelMatch(self.source, self._live, self._skips, self._elsewhere, strict=self._strict)
        found.problems += model.problems if model.is_loaded else []
        if self._live.optimizers is not None:
            reshaped = model.reshaped()
            for name in sorted(name for name in reshaped if not model.is_loaded and not self._skips(name)):
                found.add(name, "has another shape in the checkpoint, and so has its state in optimizers")
            self._compare_optimizers(self._live.optimizers, model, reshaped, found)
        sources = {group: numbers for one in self._optimizers for group, numbers in one.sources().items()}
        groups = {str(one.number): one.groups() for one in self._optimizers if one.is_joined}
        return {
            "differences": found.problems,
            "sources": sources,
            "kept": model.kept,
            "groups": groups,
            "casts": model.casts() if model.is_loaded else [],
            "skipped": {"used": sorted(self._skips.used), "names": list(self._skips.names)},
        }

    def judge(self, reports: list[RankFindings]) -> Judgement:
        """Join what all ranks found, each difference once. Runs on rank 0.

        Raises:
            MismatchError: listing the differences, if ``strict``; or patterns of ``skip`` that are the name of nothing.
        """
        found = Differences()
        left = list(dict.fromkeys(name for report in reports for name in report["skipped"]["names"]))
        used = [pattern for report in reports for pattern in report["skipped"]["used"]]
        skipped = note_of_skipped(self._live.skip, used, left, self.source.path)
        joined = self._joined(reports, found)
        lines = [line for report in reports for line in report["differences"]]
        problems = list(dict.fromkeys(lines + found.problems))
        count = len(problems)
        lines = problems[:_LISTED] + ([f"… and {count - _LISTED} more"] if count > _LISTED else [])
        listed, path, differences = "\n  ".join(lines), repr(self.source.path), count_text(count, "difference")
        if count and self._strict:
            raise MismatchError(
                f"cannot load {path} into this model: {differences}\n  {listed}\n"
                f"{self._live.remedy} to load the rest, or look with "
                "`python -m lightning_shardckpt inspect PATH`."
            )
        note = f"left as they are: {differences} between {path} and this model\n  {listed}"
        sources: dict[str, list[int] | None] = {}
        for group, numbers in ((g, n) for report in reports for g, n in report["sources"].items()):
            known = sources.get(group)
            sources[group] = known if numbers is None else list(dict.fromkeys([*(known or ()), *numbers]))
        notes = [note] if count else []
        if kept := list(dict.fromkeys(key for report in reports for key in report["kept"])):
            notes.append(f"{path} has no adapters: {count_text(len(kept), 'tensor')} of adapters left as they are")
        if casts := sorted({cast for report in reports for cast in report["casts"]}):
            notes.append(f"{path} is converted while it is read, to the dtypes of this model: {', '.join(casts)}")
        return {"notes": notes, "skipped": skipped, "sources": sources, "joined": joined}

    def _joined(self, reports: list[RankFindings], found: Differences) -> dict[str, list[list[str]]]:
        """Return, by optimizer, the param groups of the whole model, of which each pipeline stage has a part."""
        return {
            str(one.number): one.join_groups(
                [report["groups"][str(one.number)] for report in reports], self._live.whole.parameters, found
            )
            for one in self._optimizers
            if one.is_joined
        }

    def plan(self, judged: Judgement, *, keep_live: bool = True) -> list[ReadTarget]:
        """Allocate what is not there to be filled, and read what is not tensors. Changes nothing. Runs on every rank.

        Args:
            judged: what rank 0 made of the findings of all ranks.
            keep_live: whether live tensors must keep their values until everything is verified.

        Returns:
            What is to be filled.
        """
        self.notes, self.skipped, self.sources = judged["notes"], judged["skipped"], judged["sources"]
        groups = [group for optimizer in self._live.optimizers or () for group in optimizer.param_groups]
        live = {shape_of(param) for group in groups for param in group["params"]}
        for key, spec in self._components.get("optimizer", Component({})).tensors.items() if self._optimizers else ():
            if spec.shape not in live and not self._elsewhere:
                self.source.backed("optimizer", key)  # its shape is only what the checkpoint says
        self._take_numbers(judged["joined"])
        shared = overlapping(self._live_tensors())
        tensors = self._live.model.tensors
        keys = self._model.keys if self._model.is_loaded else {}
        filled = [("model", key, tensors[name]) for name, key in keys.items()]  # they are live
        new: list[tuple[str, str, torch.Tensor]] = []
        for optimizer in self._optimizers:
            there, allocated = optimizer.tensors(shared)
            filled += [("optimizer", key, tensor) for key, tensor in there]
            new += [("optimizer", key, tensor) for key, tensor in allocated]
        extra = self.source.document("model") or {}
        self.for_code, aside = self._model.aside.allocate()
        if "model" in self._live.parts:
            wanted = (name for name in extra if name in self._live.extra_state and not self._skips(name))
            self.extra_state = {name: decode_small(extra[name]) for name in wanted}
        for key, tensor in self._read_trainer().items():
            (filled if tensor is self._live.placed.get(key) else new).append(("trainer", key, tensor))
        optimizers = [one for one in new if one[0] == "optimizer"]
        placed = [("trainer", key, tensor) for key, tensor in self._live.placed.items()]  # some are in the JSON
        _refuse_meta(self.source.path, [*filled, *placed, *self._model.aside.live(), *optimizers])
        targets = [ReadTarget(component, key, tensor, fresh=not keep_live) for component, key, tensor in filled]
        for target in targets:
            if is_expanded(target.local):
                raise StateError(
                    f"{target.component}/{target.key} cannot be filled: elements of the tensor, of shape "
                    f"{tuple(target.local.shape)} and strides {target.local.stride()}, are one; load into a clone of it"
                )
        return targets + aside + [ReadTarget(component, key, tensor, fresh=True) for component, key, tensor in new]

    def _live_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that optimizer state could share memory with."""
        if self._optimizers:
            yield from self._live.model.tensors.values()
            yield from self._live.placed.values()
        for optimizer in self._optimizers:
            yield from optimizer.live_tensors()

    def _take_numbers(self, joined: Mapping[str, list[list[str]]]) -> None:
        """Find which parameters the stored numbers mean, on pipeline stages."""
        found = Differences()
        for optimizer in self._optimizers:
            if optimizer.is_joined:
                optimizer.take_numbers(joined[str(optimizer.number)], found)
        if found.problems and self._strict:
            listed = "\n  ".join(found.problems[:_LISTED])
            raise MismatchError(f"cannot load {self.source.path!r} into this model:\n  {listed}")
        self.notes += found.problems

    def _compare_optimizers(
        self, live: Sequence[Optimizer], model: ModelMatch, reshaped: frozenset[str], found: Differences
    ) -> None:
        document = self.source.document("optimizer")
        if document is None:
            raise MismatchError(
                f"cannot resume training from {self.source.path!r}: it holds weights only, no optimizer state. "
                "validate, test and predict can use it, and training can begin with it: "
                'ShardedStrategy(pretrained=path), or ShardCkptIO(resume=["model"]). To resume training, save with '
                "save_weights_only=False."
            )
        if self._live.regroup is not None:
            self._live.regroup(self.source.trainer(lambda key: torch.empty(0)))
        component, same = self._components.get("optimizer"), model.same_tensor()
        dtypes = model.dtype if self._live.cast else None
        if len(document) != len(live):
            found.add("optimizers", f"{len(document)} in checkpoint, {len(live)} in model")
        for number, optimizer in enumerate(live[: len(document)]):
            one = StoredOptimizer(number, document[str(number)], component, decode_equal)
            load = OptimizerLoad(
                number,
                optimizer,
                one,
                self._live.names,
                same,
                self._live.whole.parameters,
                parts=self._live.parts,
                skips=self._skips if self._live.skip else None,
                dtypes=dtypes,
                reshaped=reshaped,
            )
            load.compare(found, self._elsewhere, partial(are_equal, self.source, "optimizer"))
            self._optimizers.append(load)

    def _read_trainer(self) -> dict[str, torch.Tensor]:
        """Read the trainer's state, and return its tensors by key, which are to be filled with the others."""
        component = self._components.get("trainer", Component({}))
        tensors: dict[str, torch.Tensor] = {}
        model = self._live.model
        live = model.tensors | {alias: model.tensors[of] for alias, of in model.aliases.items()}
        for key, spec in component.tensors.items():
            placed, dtype = self._live.placed.get(key), TORCH_DTYPES[spec.dtype]
            if placed is not None and (tuple(placed.shape), placed.dtype) == (spec.shape, dtype):
                tensors[key] = placed
                continue
            # pinned: a plain tensor of one rank, which stays one
            like = None if spec.pinned else self._live.like.get(key, sharded_like(key, spec.shape, live))
            device = "meta" if self._is_elsewhere(key) else None
            if like is not None and tuple(like.shape) == spec.shape:
                tensors[key] = new_like(like, dtype)
                continue
            shape = spec.shape if device == "meta" else self.source.backed("trainer", key)
            tensors[key] = torch.empty(shape, dtype=dtype, device=device)
        self.trainer = self.source.trainer(tensors.__getitem__)
        if self._elsewhere:
            drop_elsewhere(self.trainer, self._is_elsewhere)
        first = decode_small(self.source.document("rank"))
        rank = 0 if first is None else self._pick_rank(first)
        self.trainer["rank_state"] = first if rank == 0 else decode_small(self.source.document("rank", rank))
        return {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}

    def _is_elsewhere(self, key: str) -> bool:
        """Return whether a key of trainer state is about what only other pipeline stages have."""
        return bool(self._elsewhere) and entry_of(key, self._live.whole.state) in self._elsewhere

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Verify what the targets need; returns the function that fills them, in their dtypes. Runs on every rank."""
        return read_converted(self.source, targets) if self._live.cast else self.source.read(targets)

    def apply(self) -> None:
        """Put the filled optimizer state in place; the model's tensors were filled where they are."""
        for optimizer in self._optimizers:
            self.notes += optimizer.apply(self.sources)


def _refuse_meta(path: str, filled: Sequence[tuple[str, str, torch.Tensor]]) -> None:
    """Raise a StateError for tensors that have no memory to be filled."""
    found = (f"{component}/{key}" for component, key, tensor in filled if local_tensor(tensor).is_meta)
    names = list(dict.fromkeys(found))
    if names:
        listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        raise StateError(
            f"cannot load {path!r} into tensors on the meta device, which have no memory: {listed}. Give them some "
            'first, such as by module.to_empty(device="cpu"), or in Fabric load after fabric.setup'
        )
