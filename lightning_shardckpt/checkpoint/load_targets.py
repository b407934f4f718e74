"""The live objects that a load fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import NO_HOOKS, LoadHooks
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.system.text import count_text, list_some

# ── parts of a checkpoint, and names to skip ──────────────────────────────────────────────────────────────────────────


PARTS = ("model", "optimizer", "param_groups", "schedulers", "loops", "data", "callbacks", "random")
"""The parts that ``ShardCkptIO(resume=…)`` may name. A load leaves other parts of the live objects unchanged."""



def check_parts(resume: Sequence[str] | None) -> frozenset[str]:
    """Return the parts that a fit restores; None means all.

    Raises:
        ValueError: naming unknown parts, or a part that needs another one.
    """
    if resume is None:
        return frozenset(PARTS)
    if isinstance(resume, str):
        raise ValueError(f"resume is a list of parts, such as [{resume!r}], got {resume!r}")
    unknown = [part for part in resume if part not in PARTS]
    if unknown:
        raise ValueError(f"resume has unknown parts {unknown}; the parts of a checkpoint are {', '.join(PARTS)}")
    if not resume:
        raise ValueError("resume is empty: to restore nothing, train without a ckpt_path")
    if "data" in resume and "loops" not in resume:
        raise ValueError(
            'resume has "data" without "loops", which count the batches of the position in the data: '
            'take both, or leave "data" out'
        )
    return frozenset(resume)


def check_patterns(option: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of an option.

    Raises:
        ValueError: for a single string, whose letters would be taken for patterns.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{option} is a list of patterns, such as [{patterns!r}], got {patterns!r}")
    return tuple(patterns)


@dataclass(slots=True)
class Skips:
    """Patterns of names that a load skips; records the patterns that matched and the names skipped on this rank.

    Names are those that ``metadata`` lists, as the live objects have them: ``head.weight`` of the model,
    ``optimizer/0/head.weight/exp_avg``, ``optimizer/0/param_groups/1/lr``. ``*`` matches any text.

    >>> skips = Skips(("head.*", "tail.*"))
    >>> skips("head.weight"), skips("body.weight"), skips.used
    (True, False, {'head.*'})
    """

    patterns: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)
    names: dict[str, None] = field(default_factory=dict)
    """The skipped names, in order."""

    def __call__(self, name: str) -> bool:
        """Return True if the tensor or value of this name is skipped."""
        matches = [pattern for pattern in self.patterns if fnmatchcase(name, pattern)]
        self.used.update(matches)
        if matches:
            self.names[name] = None
        return bool(matches)


def note_of_skipped(patterns: Sequence[str], used: Iterable[str], names: Sequence[str], path: str) -> list[str]:
    """Return a sentence for the user about the names that all ranks skipped, or none."""
    unused = [pattern for pattern in patterns if pattern not in {*used}]
    if unused:
        raise MismatchError(
            f"cannot load {path!r}: no name to skip in the checkpoint or the live objects matches "
            f"{', '.join(map(repr, unused))}. Names are the names of the model's and optimizers' tensors, as "
            "`lightning_shardckpt.metadata` lists them; * matches any text"
        )
    count = count_text(len(names), "entry", "entries")
    return [f"{path!r}: skipped, and left as they are: {count}, {list_some(names)}"] if names else []


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The objects to load into.

    Attributes:
        model: the model's tensors, by name.
        extra_state: canonical names of the model's non-tensor values.
        optimizers: the optimizers to fill; None loads weights only.
        names: FQN by ``id`` of the parameter.
        whole: names of the model over all pipeline stages.
        adapters: keys of ``model`` that belong to adapters of PEFT.
        fit_source: converts a source to the names of the model; returns it with a line for each problem.
        trainer_tensors: the user's tensors to fill, by key of trainer state.
        like: tensors with the layout for trainer state that is allocated, by its key.
        remedy: the way to load in spite of differences, for messages.
        regroup: called with the trainer's state, without tensors, before the optimizers are compared; may change their
            param groups.
        parts: a subset of ``PARTS``; only the first three have an effect here.
        skip: patterns of names that are skipped, see ``Skips``.
        hooks: the load hooks of the model's modules.
    """

    model: Leaves
    extra_state: frozenset[str]
    optimizers: Sequence[Optimizer] | None
    names: Mapping[int, str]
    whole: WholeNames
    adapters: frozenset[str] = frozenset()
    fit_source: Callable[[Source], tuple[Source, list[str]]] | None = None
    trainer_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    like: Mapping[str, torch.Tensor] = field(default_factory=dict)
    remedy: str = "Set strict_loading=False on the LightningModule"
    regroup: Callable[[Mapping[str, Any]], None] | None = None
    parts: frozenset[str] = frozenset(PARTS)
    skip: tuple[str, ...] = ()
    hooks: LoadHooks = NO_HOOKS
