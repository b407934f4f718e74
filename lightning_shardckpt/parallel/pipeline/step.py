"""State of one pipelined step while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_shardckpt.distributed.host_numbers import HostCopy
from lightning_shardckpt.parallel.pipeline.microbatch import Results
from lightning_shardckpt.parallel.pipeline.split_backward import DeferredBackward
from lightning_shardckpt.parallel.sharding.sample_numbers import SampleNumbers
from lightning_shardckpt.parallel.tensors.graph_entry import GraphEntry


class UserStep(Protocol):
    """A step of the user's to run; what the pipeline needs to know about it."""

    name: str
    batch: Any
    train: bool

    @property
    def drew(self) -> bool:
        """Whether a run that does not count drew from a generator of the module's."""

    def run(self, batch: Any, share: float | None) -> Any:
        """Run it on a part of the batch. ``share``: of the samples; None if what it logs doesn't count."""

    def loss(self, output: Any) -> Tensor | None:
        """The loss in what the step returned."""

    def report(self, outputs: list[tuple[Any, float]]) -> Any:
        """Return what all stages must know of the last one's outputs, each with its share of the samples.

        Runs on the last stage.
        """


@dataclass(frozen=True, slots=True)
class StashedForward:
    """The values that a forward of one stage on one microbatch leaves for its backward."""

    entered: dict[int, GraphEntry | None]
    outputs: list[Tensor]
    carry: tuple[int, ...] = ()


@dataclass(slots=True)
class StepState:
    """State of the step that runs now.

    Attributes:
        shares: of the samples, per microbatch.
        samples: which these are, per microbatch, where somebody said so.
        seed: of what the step draws outside of modules, the same on all stages.
        scale: the gradient of the loss.
        whole_steps: whether the last stage runs the whole step on each microbatch.
        draws: whether it draws random numbers before its layers.
        watched: returns what surrounds the forward of a stage on a microbatch.
        carries: for each stage of this rank, the positions of the arguments that cross the boundary after it.
        stored: by stage and microbatch.
        rests: backward passes whose gradients of weights are put off.
        outputs: what whole runs of the step returned, with their shares.
        results: of the layers, for the rest of the step.
        gradients: of these, per microbatch.
        batch_digest: of its batch's tensors on a GPU, on its way.
    """

    step: UserStep
    batches: list[Any]
    shares: list[float]
    seed: int
    scale: Tensor | None
    whole_steps: bool
    draws: bool = False
    watched: Callable[[int, int], AbstractContextManager[None]] = lambda stage, microbatch: nullcontext()
    samples: list[SampleNumbers | None] = field(default_factory=list)
    carries: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stored: dict[tuple[int, int], StashedForward] = field(default_factory=dict)
    rests: dict[tuple[int, int], DeferredBackward] = field(default_factory=dict)
    outputs: list[tuple[Any, float]] = field(default_factory=list)
    loss: Tensor | None = None
    results: Results | None = None
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    batch_digest: HostCopy | None = None
