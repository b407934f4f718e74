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
from lightning_shardckpt.state.module_io import NO_CODE, LoadCode
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.system.text import count_text

# ── parts of a checkpoint, and names to skip ──────────────────────────────────────────────────────────────────────────
# The parts of a checkpoint that a load takes. Everything else stays as it is in the live objects. No torch.


PARTS = ("model", "optimizer", "param_groups", "schedulers", "loops", "data", "callbacks", "random")
"""The parts that ``ShardCkptIO(resume=…)`` may name, in the words of torch and Lightning."""

_LISTED = 10


def check_parts(resume: Sequence[str] | None) -> frozenset[str]:
    """The parts that a fit takes; None is all of them.

    Raises:
        ValueError: naming what is no part, or what cannot be taken without another.
    """
    if resume is None:
        return frozenset(PARTS)
    if isinstance(resume, str):
        raise ValueError(f"resume is a list of parts, such as [{resume!r}], got {resume!r}")
    unknown = [part for part in resume if part not in PARTS]
    if unknown:
        raise ValueError(f"resume has unknown parts {unknown}; those of a checkpoint are {', '.join(PARTS)}")
    if not resume:
        raise ValueError("resume names nothing to take; train without a ckpt_path")
    if "data" in resume and "loops" not in resume:
        raise ValueError(
            'resume has "data" without "loops", which count the batches that the position in the data is about: '
            'take both, or leave "data" out'
        )
    return frozenset(resume)


def check_patterns(option: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns of an option.

    Raises:
        ValueError: for a single text, whose letters would be patterns.
    """
    if isinstance(patterns, str):
        raise ValueError(f"{option} is a list of patterns, such as [{patterns!r}], got {patterns!r}")
    return tuple(patterns)


@dataclass(slots=True)
class Skips:
    """Patterns of names that a load leaves as they are, and which of them were the name of anything on this rank.

    The names are those that ``metadata`` lists, as the live objects have them: ``head.weight`` of the model,
    ``optimizer/0/head.weight/exp_avg``, ``optimizer/0/param_groups/1/lr``. ``*`` is any text.

    >>> skips = Skips(("head.*", "tail.*"))
    >>> skips("head.weight"), skips("body.weight"), skips.used
    (True, False, {'head.*'})
    """

    patterns: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)
    names: dict[str, None] = field(default_factory=dict)
    """Of what is left, in order."""

    def __call__(self, name: str) -> bool:
        """Return whether the tensor or value of that name is left as it is."""
        hits = [pattern for pattern in self.patterns if fnmatchcase(name, pattern)]
        self.used.update(hits)
        if hits:
            self.names[name] = None
        return bool(hits)


def note_of_skipped(patterns: Sequence[str], used: Iterable[str], names: Sequence[str], path: str) -> list[str]:
    """Return what a person should know of what was left, of all ranks.

    Args:
        patterns: all of them.
        used: those that are the name of anything on any rank.
        names: what was left as it is.
        path: of the checkpoint.

    Raises:
        MismatchError: listing patterns that are the name of nothing.
    """
    unused = [pattern for pattern in patterns if pattern not in {*used}]
    if unused:
        raise MismatchError(
            f"cannot load {path!r}: nothing to skip has the name {', '.join(map(repr, unused))}, neither in it nor "
            "live. Names are those of tensors of the model and of optimizers, as `lightning_shardckpt.metadata` lists "
            "them, and * is any text"
        )
    count = count_text(len(names), "entry", "entries")
    return [f"{path!r}: skipped, and left as they are: {count}, {list_names(names)}"] if names else []


def list_names(names: Sequence[str]) -> str:
    """Names with commas, of many the first.

    >>> list_names(["a", "b"])
    'a, b'
    """
    more = f", … and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The objects to load into.

    Attributes:
        model: its tensors, by name.
        extra_state: canonical names of the model's values that are no tensors.
        optimizers: to be filled; None loads weights only.
        names: FQN by ``id`` of the parameter.
        whole: names of the model over all pipeline stages.
        adapters: keys of ``model`` that PEFT made for adapters.
        fitting: makes of a source one with the names of the model, and tells what cannot be fitted, a line each.
        placed: tensors of the user's to fill, by key of trainer state.
        like: how trainer state is laid out that is not there yet, by its key.
        remedy: how to load in spite of differences, for messages.
        regroup: gets the trainer's state, without tensors, before the optimizers are compared, and may change their
            param groups.
        cast: whether floating tensors may be read into those of another floating dtype.
        parts: of ``parts.PARTS``; of those the first three matter here.
        skip: patterns of names that stay as they are, see ``parts.Skips``.
        code: the code that runs when the model's state dict is loaded.
    """

    model: Leaves
    extra_state: frozenset[str]
    optimizers: Sequence[Optimizer] | None
    names: Mapping[int, str]
    whole: WholeNames
    adapters: frozenset[str] = frozenset()
    fitting: Callable[[Source], tuple[Source, list[str]]] | None = None
    placed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    like: Mapping[str, torch.Tensor] = field(default_factory=dict)
    remedy: str = "Set strict_loading=False on the LightningModule"
    regroup: Callable[[Mapping[str, Any]], None] | None = None
    cast: bool = True
    parts: frozenset[str] = frozenset(PARTS)
    skip: tuple[str, ...] = ()
    code: LoadCode = NO_CODE
