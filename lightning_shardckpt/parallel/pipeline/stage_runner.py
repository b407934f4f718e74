"""Run a rank's part of a schedule: its stages' forward and backward passes, in order, with messages to its neighbours.

After a failure a rank goes on with its list, so that nobody waits for it: it discards what it receives, and sends word
of the failure in place of each result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.gates import Gates, StageRun
from lightning_shardckpt.parallel.pipeline.microbatch import copied
from lightning_shardckpt.parallel.pipeline.p2p import Message, Transport
from lightning_shardckpt.parallel.pipeline.schedule import Op, Part, Receive, Schedule, needed_by, sent_after
from lightning_shardckpt.parallel.pipeline.split_backward import backward_input, backward_weight
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.pipeline.step import StashedForward, StepState
from lightning_shardckpt.parallel.sharding.sample_numbers import for_samples
from lightning_shardckpt.system.random_generators import seed_rng


class StageRunner:
    """Runs operations of this rank's stages.

    Args:
        transport: between this rank and the others of its pipeline.
    """

    def __init__(self, gates: Gates, plan: StagePlan, schedule: Schedule, transport: Transport) -> None:
        self._gates, self._plan = gates, plan
        self._schedule, self._transport = schedule, transport
        self._last = schedule.stages - 1

    def flush(self) -> None:
        """Wait until all messages have arrived. Call when every peer has received what it is going to."""
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
        """Run ``first``, then a part of the schedule; after a ``failure``, only tell the neighbours of it.

        Raises:
            Exception: the first failure, when all operations are done or discarded.
        """
        plan = self._schedule.plan(self._transport.rank, microbatches, part)
        for item in plan:
            if isinstance(item, Receive):
                self._transport.expect(item)
        try:
            if first is not None:
                first(state)
        except Exception as error:
            failure = error
        for item in plan:
            if isinstance(item, Receive):
                self._transport.begin(item)
            elif failure is not None:
                self._discard(item)
            else:
                try:
                    self._run_one(state, item)
                except Exception as error:
                    failure = error
                    self._discard(item)
        if failure is not None:
            self._transport.flush()
            raise failure
        self._finish_weights(state, list(state.rests))

    def _run_one(self, state: StepState, op: Op) -> None:
        if op.kind == "forward":
            self._forward_one(state, op)
        elif op.kind == "backward_weight":
            self._finish_weights(state, [(op.stage, op.microbatch)])
        else:
            self._backward_one(state, op)

    def _discard(self, op: Op) -> None:
        if (message := needed_by(op, self._schedule.stages)) is not None:
            self._transport.discard(message)
        self._send(op, None)

    def _send(self, op: Op, message: Message | None) -> None:
        if (place := sent_after(op, self._schedule.stages)) is not None:
            self._transport.send(place.direction, place.boundary, place.microbatch, message)

    def _forward_one(self, state: StepState, op: Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        start, stop = self._plan.ranges[stage]
        whole = stage == self._last and state.whole_steps
        carry = state.carries.get(stage, ())
        receive = partial(self._transport.receive, "forward", stage - 1, microbatch)
        run = StageRun("run", start, stop, whole=whole, carry=carry, receive=receive, draws=state.draws)
        share = state.shares[microbatch]
        seed_rng(state.seed + microbatch)
        with for_samples(state.samples[microbatch]), state.watched(stage, microbatch):
            self._gates.run(run, lambda: state.step.run(copied(state.batches[microbatch]), share if whole else None))
        outputs = run.outputs
        if whole:
            loss = state.step.loss(run.returned)
            if loss is None:
                raise UnsupportedCodeError(
                    f'{state.step.name} returned no loss for a microbatch; use pipeline_loss="batch" to skip a batch'
                )
            state.outputs.append((run.returned, share))
            outputs = [loss]
        if state.step.train or stage == self._last:
            state.stored[stage, microbatch] = StashedForward(run.entered, outputs, run.carry)
        tensors = zip(carry, outputs, strict=False)
        self._send(op, Message({position: (t, t.requires_grad) for position, t in tensors}, run.facts))

    def _backward_one(self, state: StepState, op: Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        stored = state.stored.pop((stage, microbatch))
        gradients: list[Tensor | None]
        if stage < self._last:
            received = self._transport.receive("backward", stage, microbatch).tensors
            gradients = [received[p][0] if p in received else None for p in state.carries[stage]]
        elif state.whole_steps:
            assert state.scale is not None
            gradients = [state.scale.double() * state.shares[microbatch]]
        else:
            gradients = state.gradients[microbatch]
        pairs = [(o, g) for o, g in zip(stored.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        if pairs:  # else the loss does not depend on this part
            outputs, grads = [o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs]
            tokens = [entry.token for entry in stored.entered.values() if entry is not None]
            if op.kind == "backward_input" and tokens:
                with for_samples(state.samples[microbatch]):
                    state.rests[stage, microbatch] = backward_input(outputs, grads, tokens)
            else:
                with for_samples(state.samples[microbatch]):  # whose layers activation checkpointing may run again
                    torch.autograd.backward(outputs, grads)
        entered = {p: entry.grad for p, entry in stored.entered.items() if entry is not None}
        tensors = {p: (grad, False) for p, grad in entered.items() if grad is not None}
        self._send(op, Message(tensors))

    def _finish_weights(self, state: StepState, places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            rest = state.rests.pop(place, None)  # nothing, if all of the backward ran at once
            if rest is not None:
                with for_samples(state.samples[place[1]]):
                    backward_weight(rest)
