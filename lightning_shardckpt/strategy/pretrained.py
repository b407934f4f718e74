"""Pretrained weights, in call order: open, compare with the model, shard the model, read. Each is a ``Ranks.step``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.checkpoint.load_job import LoadJob, start_load
from lightning_shardckpt.checkpoint.match import LoadTargets, match_targets
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.key_mapping import KeyMapping, map_names
from lightning_shardckpt.sources.model_names import fit_names
from lightning_shardckpt.sources.open_source import open_on_ranks
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.load_hooks import LoadedModules
from lightning_shardckpt.state.model import WholeNames, tied_names
from lightning_shardckpt.state.peft import added_names, made_from_base
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.system.text import count_text, list_some


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The arguments of ``ShardedStrategy`` that start with ``pretrained``, and whether a checkpoint is loaded after."""

    path: str
    key_mapping: KeyMapping = field(default_factory=KeyMapping)
    strict: bool = False
    before_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """Stored weights that were compared with a model.

    Attributes:
        source: the stored weights, under the model's names; None if there are none.
        names: of the parameters and buffers that only these weights fill.
        problems: tensors that cannot be loaded and why, a line each.
        report: on missing, unexpected and unused names, as one text; empty if there are none.
        strict: whether differences that load hooks leave are errors.
    """

    source: Source | None = None
    names: frozenset[str] = frozenset()
    problems: Sequence[str] = ()
    report: str = ""
    strict: bool = False

    def fill(self, module: nn.Module, whole: WholeNames, ranks: Ranks) -> None:
        """Read this rank's slices of the model, which has been sharded.

        Collective: every rank of ``ranks`` must call it.
        """
        if self.source is None:
            return
        source, live = self.source, module.state_dict()
        jobs = list[LoadJob]()

        def read() -> None:
            jobs.append(start_load(source, replace(LoadTargets.of_module(module, live, whole), has_trainer=False)))
            jobs[0].fill({})

        def load() -> list[str]:
            loaded = LoadedModules({"": module}, live, jobs[0].hooked, whole)
            return loaded.load(loaded.state_dict(jobs[0].extra_state), strict=self.strict, keep_parameters=True)

        ranks.step(f"reading pretrained weights from {source.path!r}", read, lambda _: None)
        phase = f"loading pretrained weights from {source.path!r} into {type(module).__name__}"
        notes: list[str] = ranks.step(phase, load, lambda every: list(dict.fromkeys(chain(*every))))
        if notes and ranks.rank == 0:
            warnings.warn(f"pretrained weights at {source.path!r}: " + list_some(notes, between="\n  "), stacklevel=4)


@contextmanager
def compare_pretrained(
    pretrained: Pretrained | None, module: nn.Module, *, ranks: Ranks, storage: Storage
) -> Iterator[PretrainedWeights]:
    """Open pretrained weights, and compare them with a module, which is to be sharded and filled inside the context.

    Collective: every rank of ``ranks`` must enter it. Without ``pretrained`` it does nothing.

    Raises:
        MismatchError: listing the tensors that cannot be loaded; with ``strict`` also missing and unexpected ones.
        Exception: the error of opening the source, on all ranks.
    """
    if pretrained is None:
        yield PretrainedWeights()
        return
    with ExitStack() as closing:
        try:
            source, _ = closing.enter_context(open_on_ranks(pretrained.path, ranks=ranks, storage=storage))
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no pretrained weights: {error}. For a model on the Hugging Face hub, pass the path of a local copy, "
                "as made by `hf download NAME --local-dir PATH`."
            ) from None
        weights: list[PretrainedWeights] = []

        def compare() -> dict[str, Any]:
            weights.append(compare_weights(source, module, pretrained))
            return {"problems": weights[0].problems, "report": weights[0].report}

        phase = f"comparing pretrained weights at {source.path!r} with the model"
        report = ranks.step(phase, compare, partial(_check_reports, source.path, pretrained.strict))
        if report and ranks.rank == 0:
            warnings.warn(report, stacklevel=3)
        yield weights[0]


def compare_weights(source: Source, module: nn.Module, pretrained: Pretrained) -> PretrainedWeights:
    """Compare stored weights with a whole model. Entries that code of the model loads are not in the names."""
    live, mapping = module.state_dict(), pretrained.key_mapping
    state = frozenset(clean_fqn(name) for name, value in live.items() if isinstance(value, torch.Tensor))
    whole = WholeNames(state, tuple(map(tuple, tied_names(module))))
    source, unused = map_names(source, mapping, optimizers=())
    fitted = fit_names(source, module, state, mapping.option)
    match = match_targets(fitted.source, LoadTargets.of_module(module, live, whole))
    loaded = {name for row in match.rows if row.stored is not None for name in row.names}
    fix = "was computed by PEFT from the weights that these replace: begin with from_pretrained, not pretrained="
    computed = () if pretrained.before_checkpoint else made_from_base(module, state - loaded)
    differing = (row for row in match.rows if not (row.is_missing or row.is_apart or row.is_left_out))
    problems = [*fitted.problems, *(f"{name}  {fix}" for name in computed)]
    problems += [f"{row.key}  {problem}" for row in differing for problem in row.problems]
    added = added_names(state)
    missing = [row.key for row in match.rows if (row.is_missing or row.is_left_out) and row.key not in added]
    apart = "tied in the model and stored with several values, of which the first is used"
    kinds = [
        ("not in it, so with first values", [n for n in missing if not fitted.may_be_missing(n)], "tensor", "tensors"),
        ("not in the model", [fitted.names[n] for n in match.unexpected], "tensor", "tensors"),
        (apart, [", ".join(row.names) for row in match.rows if row.is_apart], "tie", "ties"),
        ("unused", unused, "entry", "entries"),
    ]
    counted = [(f"{kind}: {count_text(len(names), one, many)}", sorted(names)) for kind, names, one, many in kinds]
    lines = [list_some([kind, *names], 11, "\n  ") for kind, names in counted if names]
    report = f"pretrained weights at {source.path!r}: " + "\n".join(lines) if lines else ""
    names = frozenset[str]() if match.is_hooked else frozenset(loaded)
    return PretrainedWeights(fitted.source, names, problems, report, pretrained.strict)


def _check_reports(path: str, strict: bool, reports: list[dict[str, Any]]) -> str:
    """Return the report of rank 0, or raise a MismatchError with the problems of all ranks."""
    problems = list(dict.fromkeys(line for one in reports for line in one["problems"]))
    if problems:
        listed = list_some(problems, 20, "\n  ")
        raise MismatchError(
            f"cannot begin with the weights at {path!r}: {count_text(len(problems), 'difference')}\n  {listed}\n"
            "Leave them out with a pretrained_key_mapping of their names to None, or change the model."
        )
    report: str = reports[0]["report"]
    if report and strict:
        raise MismatchError(f"{report}\nSet pretrained_strict=False to begin with the others.")
    return report
