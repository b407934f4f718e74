"""The live objects that a load fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.sources.open_source import LiveState
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import NO_HOOKS, LoadHooks
from lightning_shardckpt.state.snapshot import Leaves


class LoadState(LiveState, Protocol):
    """Live state that becomes targets when the ranks have agreed on it."""

    @property
    def in_stages(self) -> bool:
        """True if ranks may be pipeline stages, whose optimizers have other parameters; the same on all ranks."""

    def join(self, ranks: Ranks) -> None:
        """Exchange the names of pipeline stages, if they differ. Collective: every rank must call it."""

    def targets(self) -> LoadTargets:
        """Return the objects to fill."""


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
        has_model: False loads the optimizers alone.
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
    has_model: bool = True
    hooks: LoadHooks = NO_HOOKS

    @property
    def in_stages(self) -> bool:
        """True if the names of the whole model are given."""
        return bool(self.whole.parameters)

    def look(self) -> None:
        """Return nothing: every rank knows what it fills."""

    def agree(self, views: list[None]) -> None:
        """Return nothing."""

    def take(self, answer: None) -> None:
        """Do nothing."""

    def join(self, ranks: Ranks) -> None:
        """Do nothing: the names of other pipeline stages are known."""

    def targets(self) -> LoadTargets:
        """Return the objects themselves."""
        return self
