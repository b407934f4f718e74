"""What is known of one pipelined step while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_shardckpt.parallel.backward import Rest
from lightning_shardckpt.parallel.microbatch import Results
from lightning_shardckpt.parallel.unknown import Entry


class Job(Protocol):
    """A step of the user's to run; what the pipeline needs to know about it."""

    name: str
    batch: Any
    train: bool

    drew: bool
    """Whether a run that doesn't count drew from a generator of the module's."""

    def step(self, batch: Any, share: float | None) -> Any:
        """Run it on a part of the batch. ``share``: of the samples; None if what it logs doesn't count."""

    def loss(self, output: Any) -> Tensor | None:
        """The loss in what the step returned."""

    def report(self, outputs: list[tuple[Any, float]]) -> Any:
        """On the last stage: what all stages must know of its outputs, each with its share of the samples."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a forward of one stage on one microbatch leaves for its backward."""

    entered: dict[int, Entry | None]
    outputs: list[Tensor]


@dataclass(slots=True)
class Step:
    """What is known of the step that runs now.

    Attributes:
        shares: of the samples, per microbatch.
        seed: of what the step draws outside of modules, the same on all stages.
        scale: the gradient of the loss.
        draws: whether it draws random numbers before its layers.
        carries: for each stage of this rank, the positions of the arguments that cross the boundary behind it.
        stored: by stage and microbatch.
        rests: backward passes whose gradients of weights are put off.
        outputs: what whole runs of the step returned, with their shares.
        results: of the layers, for the rest of the step.
        gradients: of these, per microbatch.
    """

    job: Job
    batches: list[Any]
    shares: list[float]
    seed: int
    scale: Tensor | None
    draws: bool = False
    carries: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stored: dict[tuple[int, int], Stored] = field(default_factory=dict)
    rests: dict[tuple[int, int], Rest] = field(default_factory=dict)
    outputs: list[tuple[Any, float]] = field(default_factory=list)
    loss: Tensor | None = None
    results: Results | None = None
    gradients: list[list[Tensor | None]] = field(default_factory=list)
