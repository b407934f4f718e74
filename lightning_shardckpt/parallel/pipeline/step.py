"""The state of one pipelined step while it runs, and the protocol of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_shardckpt.distributed.host_numbers import HostCopy
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.microbatch import Results
from lightning_shardckpt.parallel.pipeline.p2p import PeerFailed
from lightning_shardckpt.parallel.pipeline.placeholder import GraphEntry
from lightning_shardckpt.parallel.pipeline.split_backward import DeferredBackward


class UserStep(Protocol):
    """A user's step, as the pipeline needs it."""

    name: str
    batch: Any
    train: bool

    @property
    def drew(self) -> bool:
        """True if a run without effects drew from a random generator of the module."""

    def run(self, batch: Any, share: float | None) -> Any:
        """Run the step on a part of the batch.

        Args:
            batch: the part.
            share: its share of the samples; None for a run without effects, whose logged values are discarded.
        """

    def loss(self, output: Any) -> Tensor | None:
        """Return the loss in the output of the step."""

    def report(self, outputs: list[tuple[Any, float]]) -> Any:
        """Return the results that all stages need, from the outputs of the step and their shares of the samples.

        Runs on the last stage.
        """


@dataclass(frozen=True, slots=True)
class StashedForward:
    """The values that one stage's forward on one microbatch keeps for its backward; as in `StageRun`."""

    entries: dict[int, GraphEntry | None]
    outputs: list[Tensor]
    positions: tuple[int, ...] = ()


@dataclass(slots=True)
class StepState:
    """The state of the running step.

    Attributes:
        shares: the share of the samples of each microbatch.
        sizes: the number of samples of each microbatch.
        samples: the numbers of the samples of each microbatch, if known.
        seed: of random numbers drawn outside of modules, the same on all stages.
        scale: the gradient of the loss.
        whole_steps: True if the last stage runs the whole step on each microbatch.
        draws: True if the step draws random numbers before its layers.
        around: returns a context manager for the forward of a stage on a microbatch.
        positions: for each stage of this rank, the positions of the arguments that cross the boundary after it.
        forwards: by stage and microbatch.
        deferred: the weight gradients to be computed later, by stage and microbatch.
        outputs: the outputs of whole runs of the step, with their shares of the samples.
        results: of the layers, for the rest of the step.
        gradients: of the results, per microbatch.
        batch_digest: of the batch's tensors on a GPU, while it is copied.
    """

    step: UserStep
    batches: list[Any]
    shares: list[float]
    seed: int
    scale: Tensor | None
    whole_steps: bool
    sizes: list[int] = field(default_factory=list)
    draws: bool = False
    around: Callable[[int, int], AbstractContextManager[None]] = lambda stage, microbatch: nullcontext()
    positions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    forwards: dict[tuple[int, int], StashedForward] = field(default_factory=dict)
    deferred: dict[tuple[int, int], DeferredBackward] = field(default_factory=dict)
    outputs: list[tuple[Any, float]] = field(default_factory=list)
    loss: Tensor | None = None
    results: Results | None = None
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    batch_digest: HostCopy | None = None

    @contextmanager
    def running(self, microbatch: int) -> Iterator[None]:
        """Add the number of samples to errors of user code on a microbatch, whose shapes are not those of the batch."""
        try:
            yield
        except Exception as error:
            if len(self.sizes) > 1 and not isinstance(error, PeerFailed | UnsupportedCodeError):
                error.add_note(
                    f"(on {self.sizes[microbatch]} of the batch's {sum(self.sizes)} samples: a pipeline splits batches "
                    "into microbatches; Pipeline(microbatches=1) leaves them whole)"
                )
            raise
