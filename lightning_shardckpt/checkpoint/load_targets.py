"""The live objects that a load fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.parts import PARTS
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.load_code import NO_CODE, LoadCode
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.snapshot import Leaves


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
