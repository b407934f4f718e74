"""One step of a LightningModule, run by all stages of a pipeline: what happens when.

Every stage runs the user's own step (see ``gates.py``). With the loss of the *batch*, microbatches pass through the
layers, then the last stage runs the rest of the step once, on the whole batch: exact for any loss. With the loss of
each *microbatch*, the last stage runs the whole step per microbatch, and backward passes may begin at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.absent import AbsentParameters
from lightning_shardckpt.parallel.backward import backward_input, backward_weight
from lightning_shardckpt.parallel.effects import results_unknown
from lightning_shardckpt.parallel.gates import Gates, Pass
from lightning_shardckpt.parallel.gradients import GradientSync
from lightning_shardckpt.parallel.mesh import Meshes
from lightning_shardckpt.parallel.microbatch import Results, copied, samples_in, split_batch
from lightning_shardckpt.parallel.names import named_modules
from lightning_shardckpt.parallel.outcome import Packed, agree, broadcast_packed, gathered, packed
from lightning_shardckpt.parallel.replicas import fingerprint
from lightning_shardckpt.parallel.rng import draw_seed, rng_mark, seeded_rng
from lightning_shardckpt.parallel.schedule import Op, Schedule
from lightning_shardckpt.parallel.sharding.step_cache import step_cache
from lightning_shardckpt.parallel.sharding.units import KeptGathers
from lightning_shardckpt.parallel.soundness import Soundness
from lightning_shardckpt.parallel.stages import StagePlan
from lightning_shardckpt.parallel.step import Job, Step, Stored
from lightning_shardckpt.parallel.transport import Message, PeerFailed, Transport

LossOf = Literal["batch", "microbatch"]


class Pipeline:
    """Runs steps of one module over the stages of this rank's pipeline.

    Args:
        root: the module.
        gradients: reduces them when all passes are done.
        absent: the parameters of other stages.
        keep_gathered: whether to gather parameters once for all passes. Only then may a schedule put off gradients of
            weights.
        microbatches: into how many a batch is cut, if it has so many samples.
        loss_of: see the module's docstring.
        common: the modules that every stage has.
    """

    def __init__(
        self,
        root: nn.Module,
        gates: Gates,
        plan: StagePlan,
        schedule: Schedule,
        meshes: Meshes,
        device: torch.device,
        gradients: GradientSync,
        absent: AbsentParameters,
        *,
        keep_gathered: bool,
        microbatches: int,
        loss_of: LossOf,
        common: Sequence[nn.Module],
    ) -> None:
        self.common = common
        self._gates, self._plan, self._schedule = gates, plan, schedule
        self._gradients, self._microbatches, self._loss_of = gradients, microbatches, loss_of
        self.absent = absent
        self._keeps = keep_gathered
        self._kept = KeptGathers()
        self._group, self._device = meshes.pipeline_group, device
        self._data_group = meshes.data_parallel_group if meshes.topology.data_parallel > 1 else None
        self._rank = meshes.pipeline_rank
        self._transport = Transport(schedule, self._group, self._rank, device)
        self._last = schedule.stages - 1
        here = named_modules(root)
        self._layers = {name: here[name] for name in plan.layers}
        self._soundness = Soundness(root, plan, rest_runs_once=loss_of == "batch")
        self._now: Step | None = None

    @property
    def has_last_stage(self) -> bool:
        return self._schedule.rank_of(self._last) == self._rank

    @property
    def backward_early(self) -> bool:
        """Whether `forward` already runs the backward passes."""
        return self._schedule.interleaves_backward

    def forward(self, job: Job, scale: Tensor | None = None) -> Any:
        """Run ``job`` on its batch; returns what the last stage reports, on every rank.

        Collective: every rank of the world must call it, with the same batch on all ranks of a pipeline.

        Args:
            job: the step.
            scale: the gradient of the loss, where the schedule runs backward passes at once.

        Raises:
            Exception: the first failure of any stage, on every rank of the pipeline.
        """
        self._now, self._kept = None, KeptGathers()
        self.absent.check_own()
        parameters = self._soundness.parameter_marks()
        now = self._prepare(job, scale)
        operations = self._schedule.operations(self._rank, len(now.batches))
        if not (job.train and self.backward_early):
            operations = [op for op in operations if op.kind == "forward"]

        before = self._soundness.buffer_marks()

        def work() -> Packed | None:
            self._run(now, operations)
            self._soundness.check_buffers(now, before)
            self._soundness.check_parameters(now, parameters)
            if not self.has_last_stage:
                return None
            if not self._whole(job):
                self._finish(now)
            return packed(job.report(now.outputs), self._group, self._device)

        with self._passes():
            report = agree(f"running {job.name}", work, self._group, self._device)
        self._transport.flush()
        self._now = now if job.train and not self.backward_early else None
        source = dist.get_global_rank(self._group, self._schedule.rank_of(self._last))
        return broadcast_packed(report, source, self._group, self._device)

    def backward(self, scale: Tensor) -> None:
        """Run the backward passes of the step before; ``scale`` is the gradient of its loss.

        Collective: every rank of the world must call it.
        """
        now, self._now = self._now, None
        if now is None:
            raise TopologyError("there is no pipelined training step to go back through: one backward for each step")
        operations = self._schedule.operations(self._rank, len(now.batches))

        now.scale = scale
        finish = self._finish_backward if self.has_last_stage and not self._whole(now.job) else None

        def work() -> None:
            self._run(now, [op for op in operations if op.kind != "forward"], first=finish)

        self._gradients.begin_passes()
        with self._passes():
            agree(f"the backward of {now.job.name}", work, self._group, self._device)
        self._transport.flush()
        self._finish_gradients()

    def add(self, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        """In place of `backward`, where `forward` ran the backward passes already and made these gradients.

        Collective: every rank of the world must call it.
        """
        self._gradients.begin_passes()
        for parameter, gradient in found:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._finish_gradients()

    def _finish_gradients(self) -> None:
        self._gradients.finish_passes(self._kept)
        self.absent.share_gradients()

    def reset(self) -> None:
        """Forget a step that did not finish."""
        self._now = self._gates.running = None
        self._kept = KeptGathers()

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Around passes that make up a step: what they need of parameters, and what becomes of their gradients."""
        with self._gradients.hold(), self._kept.used() if self._keeps else nullcontext():
            yield

    # --- before the first pass ---

    def _whole(self, job: Job) -> bool:
        """Whether the last stage runs whole steps on microbatches."""
        return self._loss_of == "microbatch" and job.train

    def _prepare(self, job: Job, scale: Tensor | None) -> Step:
        def measure() -> tuple[int, int, int]:
            most = self._microbatches
            wanted = min(most, samples_in(job.batch)) if most > 1 else 1
            return wanted, fingerprint(job.batch), draw_seed()

        found = agree(f"preparing {job.name}", measure, self._group, self._device)
        every = gathered(found, self._group, self._device)
        count, _, seed = every[0]
        if any(one[:2] != every[0][:2] for one in every):
            count = 0  # so that other pipelines hear of it, too
        if self._data_group is not None:  # FSDP communicates in every pass: all must make as many
            fewest = torch.tensor(count, device=self._device)
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self._data_group)
            count = int(fewest)
        if count == 0:
            raise TopologyError(
                f"the ranks of a pipeline got different batches for {job.name}. Those of "
                f"{dist.get_process_group_ranks(self._group)} have these microbatches and checksums: "
                f"{[one[:2] for one in every]}. Every rank of a pipeline must load the same samples: use "
                "strategy.distributed_sampler_kwargs (Lightning does for samplers that it adds), and seed random "
                "augmentations by the data-parallel rank."
            )

        def look() -> Step:
            batches, sizes = split_batch(job.batch, count)
            now = Step(job, batches, [size / sum(sizes) for size in sizes], seed, scale)
            self._probe(now)
            self._soundness.check_start(now, whole=self._whole(job))
            return now

        return agree(f"looking at {job.name}", look, self._group, self._device)

    def _probe(self, now: Step) -> None:
        """Find what crosses the boundary behind each of this rank's stages: arguments that a later stage cannot know.

        In each step, since steps may change what they do; also whether the step draws random numbers on its way there.
        """
        for stage in self._schedule.stages_of(self._rank):
            this = Pass("probe", 0, self._plan.ranges[stage][1])
            with torch.no_grad(), seeded_rng(now.seed):
                before = rng_mark()
                self._pass(this, lambda: now.job.step(copied(now.batches[0]), None))
                now.draws = now.draws or rng_mark() != before or now.job.drew
            now.carries[stage] = this.carry

    # --- passes ---

    def _pass(self, this: Pass, step: Callable[[], Any]) -> None:
        with step_cache():
            self._gates.run(this, step)

    def _run(self, now: Step, operations: Sequence[Op], *, first: Callable[[Step], None] | None = None) -> None:
        """Run ``first``, then the operations in order.

        After a failure, neighbours get a word of it in place of what they wait for.
        """
        failure: Exception | None = None
        try:
            if first is not None:
                first(now)
        except Exception as error:
            failure = error
        for op in operations:
            if failure is not None:
                self._discard(op)
                continue
            try:
                if op.kind == "forward":
                    self._forward_one(now, op)
                elif op.kind == "backward_weight":
                    self._finish_weights(now, [(op.stage, op.microbatch)])
                else:
                    self._backward_one(now, op)
            except Exception as error:
                failure = error
                self._send(op, None)
        if failure is not None:
            self._transport.flush()
            raise failure
        self._finish_weights(now, list(now.rests))

    def _discard(self, op: Op) -> None:
        with suppress(PeerFailed):
            if op.kind == "forward" and op.stage > 0:
                self._transport.receive("forward", op.stage - 1, op.microbatch)
            elif op.kind in ("backward", "backward_input") and op.stage < self._last:
                self._transport.receive("backward", op.stage, op.microbatch)
        self._send(op, None)

    def _send(self, op: Op, message: Message | None) -> None:
        if op.kind == "forward" and op.stage < self._last:
            self._transport.send("forward", op.stage, op.microbatch, message)
        elif op.kind in ("backward", "backward_input") and op.stage > 0:
            self._transport.send("backward", op.stage - 1, op.microbatch, message)

    def _forward_one(self, now: Step, op: Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        start, stop = self._plan.ranges[stage]
        received = self._transport.receive("forward", stage - 1, microbatch) if stage > 0 else Message({})
        incoming = received.tensors
        whole = stage == self._last and self._whole(now.job)
        carry = now.carries[stage]
        this = Pass("run", start, stop, whole=whole, carry=carry, incoming=incoming, random=received.facts)
        share = now.shares[microbatch]
        with seeded_rng(now.seed + microbatch):
            self._pass(this, lambda: now.job.step(copied(now.batches[microbatch]), share if whole else None))
        outputs = this.outputs
        if whole:
            loss = now.job.loss(this.returned)
            if loss is None:
                raise TopologyError(
                    f'{now.job.name} returned no loss for a microbatch; use pipeline_loss="batch" to skip a batch'
                )
            now.outputs.append((this.returned, share))
            outputs = [loss]
        if now.job.train or stage == self._last:
            entered = dict(zip(sorted(incoming), this.entered, strict=True))
            now.stored[stage, microbatch] = Stored(entered, outputs)
        tensors = zip(carry, outputs, strict=False)
        facts = (this.random_left,) if now.draws else ()
        self._send(op, Message({position: (t, t.requires_grad) for position, t in tensors}, facts))

    def _backward_one(self, now: Step, op: Op) -> None:
        stage, microbatch = op.stage, op.microbatch
        stored = now.stored.pop((stage, microbatch))
        gradients: list[Tensor | None]
        if stage < self._last:
            received = self._transport.receive("backward", stage, microbatch).tensors
            gradients = [received[p][0] if p in received else None for p in now.carries[stage]]
        elif self._whole(now.job):
            assert now.scale is not None
            gradients = [now.scale.double() * now.shares[microbatch]]
        else:
            gradients = now.gradients[microbatch]
        pairs = [(o, g) for o, g in zip(stored.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        if pairs:  # else the loss does not depend on this part
            outputs, grads = [o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs]
            tokens = [entry.token for entry in stored.entered.values() if entry is not None]
            if op.kind == "backward_input" and self._keeps and tokens:
                now.rests[stage, microbatch] = backward_input(outputs, grads, tokens)
            else:
                torch.autograd.backward(outputs, grads)
        entered = {p: entry.grad for p, entry in stored.entered.items() if entry is not None}
        tensors = {p: (grad, False) for p, grad in entered.items() if grad is not None}
        self._send(op, Message(tensors))

    def _finish_weights(self, now: Step, places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            rest = now.rests.pop(place, None)  # nothing, if all of the backward ran at once
            if rest is not None:
                backward_weight(rest)

    # --- the rest of the step, on the whole batch ---

    def _finish(self, now: Step) -> None:
        """Run the step once on the whole batch, with the joined results of the layers in their place."""
        count = len(now.batches)
        outputs = [now.stored[self._last, microbatch].outputs for microbatch in range(count)]
        now.results = Results(outputs, self._plan.layers[-1])
        this = Pass("finish", 0, len(self._plan.layers), results=now.results.give)
        hidden = self._layers if count > 1 else {}
        with seeded_rng(now.seed + (count if count > 1 else 0)), results_unknown(hidden, self._device):
            self._pass(this, lambda: now.job.step(copied(now.job.batch), 1.0))
        now.outputs.append((this.returned, 1.0))
        now.loss = now.job.loss(this.returned) if now.job.train else None

    def _finish_backward(self, now: Step) -> None:
        assert now.loss is not None and now.results is not None and now.scale is not None
        torch.autograd.backward([now.loss], [now.scale.to(now.loss.dtype)])
        now.gradients = now.results.gradients()
