"""Run a rank's part of a schedule: forward and backward passes of its stages, with messages to neighbouring stages.

After a failure a rank continues with its list, so that no other rank waits for it: it discards the messages that it
receives, and sends the failure instead of each result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.gates import Gates, StageRun
from lightning_shardckpt.parallel.pipeline.microbatch import Results, copy_batch
from lightning_shardckpt.parallel.pipeline.p2p import Message, PeerFailed, Transport
from lightning_shardckpt.parallel.pipeline.schedule import Op, Part, Receive, Schedule, needed_by, sent_after
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.system.random_generators import seed_rng


class UserStep(Protocol):
    """A user's step, as the pipeline needs it."""

    name: str
    batch: Any
    train: bool

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


@dataclass(slots=True)
class StepState:
    """The state of the running step.

    Attributes:
        seed: of random numbers drawn outside of modules, the same on all stages.
        scale: the gradient of the loss.
        whole_steps: True if the last stage runs the whole step on each microbatch.
        batches: the microbatches.
        sizes: the number of samples of each.
        draws: True if the step draws random numbers before its layers.
        positions: for each stage of this rank, the positions of the arguments that cross the boundary after it.
        forwards: the runs whose entries and outputs a backward needs, by stage and microbatch.
        outputs: the outputs of whole runs of the step, with their shares of the samples.
        results: of the layers, for the rest of the step.
        gradients: of the results, per microbatch.
    """

    step: UserStep
    seed: int
    scale: Tensor | None
    whole_steps: bool
    batches: list[Any]
    sizes: list[int]
    draws: bool = False
    positions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    forwards: dict[tuple[int, int], StageRun] = field(default_factory=dict)
    outputs: list[tuple[Any, float]] = field(default_factory=list)
    loss: Tensor | None = None
    results: Results | None = None
    gradients: list[list[Tensor | None]] = field(default_factory=list)

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


class StageRunner:
    """Runs the operations of this rank's stages."""

    def __init__(self, gates: Gates, plan: StagePlan, schedule: Schedule, transport: Transport) -> None:
        self._gates, self._plan = gates, plan
        self._schedule, self._transport = schedule, transport
        self._last = schedule.stages - 1

    def flush(self) -> None:
        """Wait until all sent messages have arrived. Call it after all ranks have received their messages."""
        self._transport.flush()

    def run(
        self,
        state: StepState,
        microbatches: int,
        part: Part,
        *,
        first: Callable[[StepState], None] | None = None,
        failure: Exception | None = None,
    ) -> None:
        """Run ``first``, then a part of the schedule. After an earlier ``failure`` only send it to the neighbours.

        Collective: every rank of the pipeline must call it.

        Raises:
            Exception: the first failure, after all operations are done or discarded.
        """
        plan = self._schedule.plan(self._transport.rank, microbatches, part)
        for item in plan:
            if isinstance(item, Receive):
                self._transport.post_header(item)
        try:
            if first is not None:
                first(state)
        except Exception as error:
            failure = error
        for item in plan:
            if isinstance(item, Receive):
                self._transport.post_tensors(item)
                continue
            try:
                if failure is None:
                    run = self._forward if item.kind == "forward" else self._backward
                    self._send(item, run(state, item))
            except Exception as error:
                failure = error
            if failure is not None:
                if (message := needed_by(item, self._schedule.stages)) is not None:
                    self._transport.discard(message)
                self._send(item, None)
        if failure is not None:
            self._transport.flush()
            raise failure

    def _send(self, op: Op, message: Message | None) -> None:
        if (place := sent_after(op, self._schedule.stages)) is not None:
            self._transport.send(place, message)

    def _forward(self, state: StepState, op: Op) -> Message:
        stage, microbatch = op.stage, op.microbatch
        start, stop = self._plan.ranges[stage]
        whole = stage == self._last and state.whole_steps
        positions = state.positions.get(stage, ())
        receive = partial(self._transport.receive, Receive("forward", stage - 1, microbatch))
        run = StageRun("run", start, stop, whole=whole, positions=positions, receive=receive, draws=state.draws)
        share = state.sizes[microbatch] / sum(state.sizes)
        batch = copy_batch(state.batches[microbatch])
        seed_rng(state.seed + microbatch)
        with state.running(microbatch):
            self._gates.run(run, lambda: state.step.run(batch, share if whole else None))
        if whole:
            loss = state.step.loss(run.returned)
            if loss is None:
                raise UnsupportedCodeError(
                    f'{state.step.name} returned no loss for a microbatch; use Pipeline(loss="batch") to skip a batch'
                )
            state.outputs.append((run.returned, share))
            run.outputs = [loss]
        if state.step.train or stage == self._last:
            state.forwards[stage, microbatch] = run
        tensors = zip(positions, run.outputs, strict=False)
        return Message({position: (t, t.requires_grad) for position, t in tensors}, run.checks)

    def _backward(self, state: StepState, op: Op) -> Message:
        stage, microbatch = op.stage, op.microbatch
        forward = state.forwards.pop((stage, microbatch))
        gradients: list[Tensor | None]
        if stage < self._last:
            received = self._transport.receive(Receive("backward", stage, microbatch)).tensors
            gradients = [received[p][0] if p in received else None for p in state.positions[stage]]
        elif state.whole_steps:
            assert state.scale is not None
            gradients = [state.scale.double() * (state.sizes[microbatch] / sum(state.sizes))]
        else:
            gradients = state.gradients[microbatch]
        pairs = [(o, g) for o, g in zip(forward.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        entries = {p: entry for p, entry in forward.entries.items() if entry is not None}
        if pairs:  # else the loss does not depend on this stage
            torch.autograd.backward([o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs])
        return Message({p: (e.grad, False) for p, e in entries.items() if e.grad is not None})
