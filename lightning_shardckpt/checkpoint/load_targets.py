"""The live objects that a load fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.open_source import LiveState
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.load_hooks import NO_HOOKS, LoadHooks
from lightning_shardckpt.state.model import WholeNames, is_value, model_leaves, parameter_names
from lightning_shardckpt.state.peft_modules import adapter_tensors, made_from_base
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.system.memory import gc_paused


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
        has_trainer: False leaves out the trainer's state.
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
        is_changed: bool = False,
    ) -> LoadTargets:
        """Return the targets for a module's state dict, and the state of optimizers.

        Args:
            module: of the state dict.
            state_dict: with the tensors that are filled in place.
            whole: the names of all pipeline stages.
            optimizers: of the module's parameters; None to load only weights.
            is_changed: True if other code will change the entries before the module takes them.
        """
        values = {name for name, value in state_dict.items() if is_value(name, value)}
        tensors = {k: v for k, v in state_dict.items() if k not in values} if values else state_dict
        leaves, _ = model_leaves(tensors, module, whole)
        adapters = adapter_tensors(module, leaves.tensors).difference(made_from_base(module, leaves.tensors))
        names = parameter_names(module, whole) if optimizers is not None else {}
        hooks = LoadHooks.of({"": module}, state_dict, of_all=is_changed)
        return cls(leaves, frozenset(map(clean_fqn, values)), optimizers, names, whole, adapters, hooks=hooks)

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
