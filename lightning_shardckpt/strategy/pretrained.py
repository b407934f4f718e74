"""Pretrained weights, in call order: open, compare with the model, shard the model, read. Each is a ``Ranks.step``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from lightning_shardckpt.checkpoint.load_job import LoadJob
from lightning_shardckpt.checkpoint.load_targets import LoadTargets
from lightning_shardckpt.checkpoint.model_match import ModelMatch
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.match import Match, apply_match, map_names, match_model, report_match
from lightning_shardckpt.sources.open_source import open_on_ranks
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.load_hooks import load_remaining, loaded_state_dict
from lightning_shardckpt.state.model import WholeNames, tied_names
from lightning_shardckpt.state.peft_modules import made_from_base
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
        source: the stored weights; None if there are none.
        match: of the stored names with the model's.
        names: of the parameters and buffers that only these weights fill.
        strict: whether differences that load hooks leave are errors.
    """

    source: Source | None = None
    match: Match = field(default_factory=Match)
    names: frozenset[str] = frozenset()
    strict: bool = False

    def fill(self, module: nn.Module, whole: WholeNames, ranks: Ranks) -> None:
        """Read this rank's slices of the model, which has been sharded.

        Collective: every rank of ``ranks`` must call it.
        """
        if self.source is None:
            return
        path, live, modules = self.source.path, module.state_dict(), {"": module}

        def fit(source: Source) -> tuple[Source, list[str]]:
            return apply_match(source, self.match, whole.ties), []

        targets = replace(LoadTargets.of_module(module, live, whole), fit_source=fit, has_trainer=False)
        job = LoadJob(self.source, targets, strict=False, pick_rank=lambda _: 0)

        def read() -> None:
            job.match()
            job.fill()

        def load() -> list[str]:
            loaded, strict = loaded_state_dict(modules, live, job.extra_state, job.hooked), self.strict
            return load_remaining(modules, live, loaded, job.hooked, whole, strict=strict, keep_parameters=True)

        ranks.step(f"reading pretrained weights from {path!r}", read, lambda _: None)
        phase = f"loading pretrained weights from {path!r} into {type(module).__name__}"
        notes: list[str] = ranks.step(phase, load, lambda every: list(dict.fromkeys(chain(*every))))
        if notes and ranks.rank == 0:
            warnings.warn(f"pretrained weights at {path!r}: " + list_some(notes, between="\n  "), stacklevel=4)


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
    with _open(pretrained.path, ranks, storage) as source:
        weights: list[PretrainedWeights] = []

        def compare() -> dict[str, list[str]]:
            weights.append(_compare(source, module, pretrained))
            return {"problems": weights[0].match.problems, "report": report_match(weights[0].match, source.path)}

        phase = f"comparing pretrained weights at {source.path!r} with the model"
        notes = ranks.step(phase, compare, partial(_check_reports, source.path, pretrained.strict))
        for note in notes if ranks.rank == 0 else ():
            warnings.warn(note, stacklevel=3)
        yield weights[0]


@contextmanager
def _open(path: str, ranks: Ranks, storage: Storage) -> Iterator[Source]:
    with ExitStack() as closing:
        try:
            source = closing.enter_context(open_on_ranks(path, ranks=ranks, storage=storage))
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no pretrained weights: {error}. For a model on the Hugging Face hub, pass the path of a local copy, "
                "as made by `hf download NAME --local-dir PATH`."
            ) from None
        yield source


def _compare(source: Source, module: nn.Module, pretrained: Pretrained) -> PretrainedWeights:
    """Return the weights; their match has all problems, and their names are those that no code of the model loads."""
    live = module.state_dict()
    state = {clean_fqn(name) for name, value in live.items() if isinstance(value, torch.Tensor)}
    whole = WholeNames(frozenset(state), tuple(map(tuple, tied_names(module))))
    mapping = pretrained.key_mapping
    source, unused = map_names(source, mapping, optimizers=())
    match = match_model(source, module, whole, mapping.option)
    match.unused = unused
    model = ModelMatch(apply_match(source, match, whole.ties), LoadTargets.of_module(module, live, whole))
    rows = {name: row for row in model.rows for name in row.names}
    match.missing = [name for name in match.missing if name in rows and rows[name].is_missing]
    match.unexpected = [match.others[name][0] for name in model.unexpected if name in match.others]
    fix = "was computed by PEFT from the weights that these replace: begin with from_pretrained, not pretrained="
    computed = () if pretrained.before_checkpoint else made_from_base(module, state - match.names)
    match.problems += [f"{name}  {fix}" for name in computed]
    different = (row for row in model.rows if not row.is_missing and row.key in match.names)
    match.problems += [f"{row.key}  {problem}" for row in different for problem in row.problems]
    names = frozenset(name for name in match.names if name in rows and not model.is_seen(rows[name]))
    return PretrainedWeights(source, match, names, pretrained.strict)


def _check_reports(path: str, strict: bool, reports: list[dict[str, list[str]]]) -> list[str]:
    """Return the notes of rank 0, or raise a MismatchError with the problems of all ranks."""
    problems = list(dict.fromkeys(line for one in reports for line in one["problems"]))
    if problems:
        listed = list_some(problems, 20, "\n  ")
        raise MismatchError(
            f"cannot begin with the weights at {path!r}: {count_text(len(problems), 'difference')}\n  {listed}\n"
            "Leave them out with a pretrained_key_mapping of their names to None, or change the model."
        )
    notes = reports[0]["report"]
    if notes and strict:
        raise MismatchError(f"{notes[0]}\nSet pretrained_strict=False to begin with the others.")
    return notes
