"""Run a user's step over all stages of a pipeline.

Every stage runs the unchanged step; gates in front of the modules let it compute only its own layers.

- ``loss_of="batch"``: microbatches pass through the layers, then the last stage runs the rest of the step once, on the
  whole batch. Exact for any loss.
- ``loss_of="microbatch"``: the last stage runs the whole step for each microbatch, and backward passes may start at
  once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.distributed.host_numbers import HostCopy, gather_numbers, host_group, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.absent_parameters import AbsentParameters, has_gradient
from lightning_shardckpt.parallel.pipeline.agree import agree_on_numbers, agree_on_report, refuse_after_interrupt
from lightning_shardckpt.parallel.pipeline.gates import Gates, StageRun
from lightning_shardckpt.parallel.pipeline.microbatch import Results, copy_batch, count_samples, split_batch
from lightning_shardckpt.parallel.pipeline.microbatch_check import MicrobatchCheck, MicrobatchState
from lightning_shardckpt.parallel.pipeline.p2p import Transport
from lightning_shardckpt.parallel.pipeline.schedule import Schedule
from lightning_shardckpt.parallel.pipeline.stage_runner import StageRunner, StepState, UserStep
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.sharding.consistency import SAME_SAMPLES, fingerprint
from lightning_shardckpt.parallel.sharding.fqn import walk_modules
from lightning_shardckpt.parallel.sharding.gathered_parameters import KeptGathers
from lightning_shardckpt.parallel.sharding.gradient_sync import GradientSync
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.system.random_generators import preserve_rng, seed_and_watch

LossOf = Literal["batch", "microbatch"]


class PipelineRunner:
    """Runs the steps of one module over the stages of this rank's pipeline, with at most ``microbatches`` per batch.

    ``staged`` are the modules that some stages have: those of layers, and others with a place.
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
        microbatches: int,
        loss_of: LossOf,
        staged: Sequence[nn.Module],
    ) -> None:
        self._root, self._staged = root, frozenset(map(id, staged))  # metrics hash by their state
        self._gates, self._plan, self._schedule = gates, plan, schedule
        self._gradients, self._microbatches, self._loss_of = gradients, microbatches, loss_of
        self.absent = absent
        self._kept = KeptGathers()
        self._group, self._device = host_group(meshes.pipeline_group), device
        self._data_group = host_group(meshes.data_parallel_group) if meshes.topology.data_parallel > 1 else None
        self._rank = meshes.pipeline_rank
        transport = Transport(schedule, meshes.pipeline_group, self._group, self._rank, device)
        transport.warm_up()
        self._stages = StageRunner(gates, plan, schedule, transport)
        self._last = schedule.stages - 1
        self._changing = MicrobatchState(root, plan, rest_runs_once=loss_of == "batch")
        self._microbatch_check = MicrobatchCheck(root, staged, self._stages, self._last)
        self._state: StepState | None = None

    @property
    def common(self) -> dict[str, nn.Module]:
        """The modules that every stage has, by name; also those registered since, which others may lack."""
        return dict(walk_modules(self._root, self._staged))

    @property
    def has_last_stage(self) -> bool:
        """True if this rank runs the last stage, which returns the results of the step."""
        return self._schedule.rank_of(self._last) == self._rank

    @property
    def backward_early(self) -> bool:
        """True if `forward` runs the backward passes, too."""
        return self._schedule.interleaves_backward

    def forward(self, step: UserStep, scale: Tensor | None = None) -> Any:
        """Run ``step`` on its batch, and return the report of the last stage on every rank.

        Collective: every rank of the world must call it, with the same batch on all ranks of a pipeline.

        Args:
            step: a training, validation, test or predict step.
            scale: the gradient of the loss, if the schedule interleaves forward and backward passes.

        Raises:
            Exception: the first failure of any stage, on every rank of the pipeline.
        """
        with refuse_after_interrupt(step.name, self._group):
            return self._forward(step, scale)

    def _forward(self, step: UserStep, scale: Tensor | None) -> Any:
        self._state, self._kept = None, KeptGathers()
        count, seed, digest = self._agree_on_microbatches(step)
        whole_steps = self._loss_of == "microbatch" and step.train
        state = StepState(step, seed, scale, whole_steps, [None] * count, [])
        early = step.train and self.backward_early
        failure: Exception | None = None

        def work() -> tuple[Any, int]:
            before = self._changing.buffer_marks()
            with self._gathering():
                self._stages.run(state, count, "step" if early else "forward", failure=failure)
                if step.train and count > 1:
                    self._changing.check_buffers(before)
                if self.has_last_stage and not whole_steps:
                    self._finish(state)
                report = step.report(state.outputs) if self.has_last_stage else None
                wait_for_copies(self._device)
                self.absent.check_hooks()
                return report, 0 if digest is None else int(digest.read())

        source = self._schedule.rank_of(self._last)
        with preserve_rng():  # each run starts from a seed of its own
            try:
                self._split_and_probe(state)
            except Exception as error:  # the ranks agree on it below
                failure = error
            if count > 1 and self._microbatch_check.is_due(step.name):
                self._check_microbatches(state, failure)
            report, checksums = agree_on_report(f"running {step.name}", work, source, self._group)
        self._stages.flush()
        if len(set(checksums)) > 1:
            raise self._batches_differ(step, checksums)
        self._state = state if step.train and not early else None
        return report

    def backward(self, scale: Tensor) -> None:
        """Run the backward passes of the latest `forward`; ``scale`` is the gradient of its loss.

        Collective: every rank of the world must call it.
        """
        state, self._state = self._state, None
        if state is None:
            raise UnsupportedCodeError("a pipelined training step has no graph left: call backward once per step")
        with refuse_after_interrupt(f"the backward of {state.step.name}", self._group):
            self._backward(state, scale)

    def _backward(self, state: StepState, scale: Tensor) -> None:
        state.scale = scale
        finish = self._finish_backward if self.has_last_stage and not state.whole_steps else None

        def work() -> list[int]:
            with self._gathering():
                self._stages.run(state, len(state.batches), "backward", first=finish)
            if not alone:
                return []
            with self._gradients.no_sync():
                self._kept.reduce()
            # A gradient of a shared parameter on one rank means that all its ranks will have one.
            return self.absent.gradient_flags(lambda p: has_gradient(p) or self._gradients.set_aside.get(p) is not None)

        alone = self._gradients.has_stage_alone
        self._gradients.begin_passes()
        count = len(self.absent.parameters) if alone else 0
        flags = agree_on_numbers(f"the backward of {state.step.name}", work, count, self._group)
        self._stages.flush()
        if alone:
            self._gradients.finish_passes()
            self.absent.set_gradient_flags(flags)
        else:
            self._finish_gradients()

    def add(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Accumulate the gradients that an interleaved `forward` computed. Called instead of `backward`.

        Collective: every rank of the world must call it.
        """
        with refuse_after_interrupt("a backward", self._group):
            self._gradients.begin_passes()
            with self._gradients.no_sync():
                for parameter, gradient in gradients:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._finish_gradients()

    def _finish_gradients(self) -> None:
        with self._gradients.no_sync():
            self._kept.reduce()
        self._gradients.finish_passes()
        flags = gather_numbers(torch.tensor(self.absent.gradient_flags(has_gradient)), self._group)
        self.absent.set_gradient_flags(flags)

    def reset(self) -> None:
        """Discard the state of a step that failed."""
        self._state = self._gates.running = None
        self._kept = KeptGathers()

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Keep gathered parameters between passes, and reduce no gradients."""
        with self._gradients.no_sync(), self._kept.used():
            yield

    # ── before the passes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _agree_on_microbatches(self, step: UserStep) -> tuple[int, int, HostCopy | None]:
        """Return the number of microbatches and the seed of all ranks, and a digest of the batch on a GPU."""
        digest: HostCopy | None = None

        def measure() -> tuple[int, int, int]:
            nonlocal digest
            self.absent.check_data()
            self.absent.check_hooks()
            count = min(self._microbatches, count_samples(step.batch)) if self._microbatches > 1 else 1
            checksum, digest = fingerprint(step.batch)
            return count, checksum, int(torch.randint(1 << 31, ()))

        rows = agree_on_numbers(f"preparing {step.name}", measure, 3, self._group).tolist()
        count, _, seed = rows[0]
        if any(row[:2] != rows[0][:2] for row in rows):
            count = 0  # makes other pipelines fail, too
        if self._data_group is not None:  # FSDP communicates in every pass: all ranks need the same number
            fewest = torch.tensor(count)
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self._data_group)
            count = int(fewest)
        if count == 0:
            raise self._batches_differ(step, [row[:2] for row in rows])
        return count, seed, digest

    def _batches_differ(self, step: UserStep, marks: Sequence[Any]) -> UnsupportedCodeError:
        return UnsupportedCodeError(
            f"the ranks of a pipeline got different batches for {step.name}: ranks "
            f"{dist.get_process_group_ranks(self._group)} have the numbers of microbatches or checksums "
            f"{marks}. {SAME_SAMPLES}"
        )

    def _check_microbatches(self, state: StepState, failure: Exception | None) -> None:
        """Raise an UnsupportedCodeError, on all ranks, if results of the layers depend on the other samples."""

        def work() -> tuple[int, ...]:
            with self._gradients.no_sync(), KeptGathers().used():
                return self._microbatch_check.measure(state, failure)

        try:
            rows = agree_on_numbers("comparing parts of a batch", work, 3, self._group).tolist()
            differs = torch.tensor(int(self._microbatch_check.differs(rows)))
        except Exception:  # steps need not run on a part of a batch; the step itself raises any other error again
            differs = torch.tensor(0)
        self._stages.flush()
        if self._data_group is not None:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self._data_group)
        if differs:
            raise self._microbatch_check.error(state, self._plan.layers[-1])

    def _split_and_probe(self, state: StepState) -> None:
        """Split the batch, and find the tensors that cross the boundary after each of this rank's stages.

        These are the arguments that later stages don't know. Repeated in each step, since steps may differ. Also finds
        out if the step draws random numbers before that boundary; `_finish` does so before the last layer.
        """
        count = len(state.batches)
        state.batches, state.sizes = split_batch(state.step.batch, count)
        for stage in self._schedule.stages_of(self._rank):
            if stage == self._last:
                continue
            run = StageRun("probe", 0, self._plan.ranges[stage][1])
            has_drawn = seed_and_watch(state.seed)
            with torch.no_grad(), state.running(0):
                self._gates.run(run, lambda: state.step.run(copy_batch(state.batches[0]), None))
                state.draws = state.draws or has_drawn(0)
            state.positions[stage] = run.positions
        self._check_draws(state)
        if count > 1 and state.step.train:
            self._changing.check_norms()

    def _check_draws(self, state: StepState) -> None:
        """Raise an UnsupportedCodeError if microbatches and the rest of the step would draw different numbers."""
        if state.draws and not state.whole_steps and len(state.batches) > 1:
            raise UnsupportedCodeError(
                f"{state.step.name} draws random numbers outside of modules before its layers. Microbatches and the "
                "rest of the step, which sees the whole batch, would draw different ones: draw them in the dataloader "
                'or inside a module, or use Pipeline(loss="microbatch") (for training) or Pipeline(microbatches=1).'
            )

    # ── the rest of the step, on the whole batch ──────────────────────────────────────────────────────────────────────

    def _finish(self, state: StepState) -> None:
        """Run the step once on the whole batch, with the joined results in place of the layers."""
        count = len(state.batches)
        forwards = [state.forwards[self._last, microbatch] for microbatch in range(count)]
        state.results = Results([f.outputs for f in forwards], [f.positions for f in forwards], self._plan.layers[-1])
        has_drawn = seed_and_watch(state.seed + (count if count > 1 else 0))
        run = StageRun("finish", 0, len(self._plan.layers), fill_in=state.results.fill_in)
        if count > 1:  # else a step that has drawn goes on, and a check would draw, too
            run.has_drawn = has_drawn
        self._gates.run(run, lambda: state.step.run(copy_batch(state.step.batch), 1.0))
        state.draws = state.draws or run.drew
        self._check_draws(state)
        state.outputs.append((run.returned, 1.0))
        state.loss = state.step.loss(run.returned) if state.step.train else None

    def _finish_backward(self, state: StepState) -> None:
        assert state.loss is not None and state.results is not None and state.scale is not None
        torch.autograd.backward([state.loss], [state.scale.to(state.loss.dtype)])
        state.gradients = state.results.gradients()
