"""Run a rank's part of a schedule: forward and backward passes of its stages, with messages to neighbouring stages.

After a failure a rank continues with its list, so that no other rank waits for it: it discards the messages that it
receives, and sends the failure instead of each result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.gates import Gates, StageRun
from lightning_shardckpt.parallel.pipeline.microbatch import copy_batch
from lightning_shardckpt.parallel.pipeline.p2p import Message, Transport
from lightning_shardckpt.parallel.pipeline.schedule import Op, Part, Receive, Schedule, needed_by, sent_after
from lightning_shardckpt.parallel.pipeline.split_backward import backward_input, backward_weight
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.pipeline.step import StashedForward, StepState
from lightning_shardckpt.system.random_generators import seed_rng


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
        self._finish_weights(state, list(state.deferred))

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
            self._transport.send(place, message)

    def _forward_one(self, state: StepState, op: Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        start, stop = self._plan.ranges[stage]
        whole = stage == self._last and state.whole_steps
        positions = state.positions.get(stage, ())

        receive = partial(self._transport.receive, Receive("forward", stage - 1, microbatch))
        run = StageRun("run", start, stop, whole=whole, positions=positions, receive=receive, draws=state.draws)
        share = state.shares[microbatch]
        batch = copy_batch(state.batches[microbatch])
        seed_rng(state.seed + microbatch)
        in_microbatch = state.running(microbatch)
        with state.around(stage, microbatch), in_microbatch:
            self._gates.run(run, lambda: state.step.run(batch, share if whole else None))
        outputs = run.outputs
        if whole:
            loss = state.step.loss(run.returned)
            if loss is None:
                raise UnsupportedCodeError(
                    f'{state.step.name} returned no loss for a microbatch; use Pipeline(loss="batch") to skip a batch'
                )
            state.outputs.append((run.returned, share))
            outputs = [loss]
        if state.step.train or stage == self._last:
            state.forwards[stage, microbatch] = StashedForward(run.entries, outputs, run.positions)
        tensors = zip(positions, outputs, strict=False)
        self._send(op, Message({position: (t, t.requires_grad) for position, t in tensors}, run.checks))

    def _backward_one(self, state: StepState, op: Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        forward = state.forwards.pop((stage, microbatch))
        gradients: list[Tensor | None]
        if stage < self._last:
            received = self._transport.receive(Receive("backward", stage, microbatch)).tensors
            gradients = [received[p][0] if p in received else None for p in state.positions[stage]]
        elif state.whole_steps:
            assert state.scale is not None
            gradients = [state.scale.double() * state.shares[microbatch]]
        else:
            gradients = state.gradients[microbatch]
        pairs = [(o, g) for o, g in zip(forward.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        entries = {p: entry for p, entry in forward.entries.items() if entry is not None}
        if pairs:  # else the loss does not depend on this stage
            outputs, grads = [o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs]
            if op.kind == "backward_input" and entries:
                tokens = [entry.token for entry in entries.values()]
                state.deferred[stage, microbatch] = backward_input(outputs, grads, tokens)
            else:
                torch.autograd.backward(outputs, grads)
        self._send(op, Message({p: (e.grad, False) for p, e in entries.items() if e.grad is not None}))

    def _finish_weights(self, state: StepState, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            deferred = state.deferred.pop(key, None)  # None if the whole backward ran at once
            if deferred is not None:
                backward_weight(deferred)
