"""Run a step of a user over all stages of a pipeline.

Every stage runs the user's own step; gates in front of its modules let it compute only what it has.

- With the loss of the *batch*, microbatches pass through the layers, then the last stage runs the rest of the step
  once, on the whole batch: exact for any loss.
- With the loss of each *microbatch*, the last stage runs the whole step per microbatch, and backward passes may begin
  at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.distributed.host_numbers import HostCopy, host_group, wait_for_copies
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.absent_parameters import AbsentParameters, has_gradient
from lightning_shardckpt.parallel.pipeline.agree import (
    Packed,
    agree_on_numbers,
    agree_on_report,
    packed,
    refused_once_interrupted,
)
from lightning_shardckpt.parallel.pipeline.checks import StepChecks, guarded_hooks
from lightning_shardckpt.parallel.pipeline.gates import Gates, StageRun
from lightning_shardckpt.parallel.pipeline.layer_attributes import results_as_placeholders
from lightning_shardckpt.parallel.pipeline.microbatch import Results, copied, samples_in, split_batch
from lightning_shardckpt.parallel.pipeline.microbatch_check import NOTHING_TO_COMPARE, MicrobatchCheck
from lightning_shardckpt.parallel.pipeline.p2p import Transport
from lightning_shardckpt.parallel.pipeline.schedule import Schedule
from lightning_shardckpt.parallel.pipeline.stage_runner import StageRunner
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.pipeline.step import StepState, UserStep
from lightning_shardckpt.parallel.sharding.consistency import fingerprint_without_wait
from lightning_shardckpt.parallel.sharding.fqn import named_modules
from lightning_shardckpt.parallel.sharding.gathered_parameters import KeptGathers
from lightning_shardckpt.parallel.sharding.gradient_sync import GradientSync
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.sharding.sample_numbers import for_samples, split_running_samples
from lightning_shardckpt.system.random_generators import draw_seed, preserve_rng, rng_checksum, seed_rng

LossOf = Literal["batch", "microbatch"]


class Pipeline:
    """Runs steps of one module over the stages of this rank's pipeline.

    Args:
        root: the module.
        gradients: reduces them when all passes are done.
        absent: the parameters of other stages.
        microbatches: into how many a batch is split, if it has so many samples.
        loss_of: what the loss is computed of, as the module's docstring says.
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
        microbatches: int,
        loss_of: LossOf,
        common: Sequence[nn.Module],
    ) -> None:
        self.common = common
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
        here = named_modules(root)
        self._layers = {name: here[name] for name in plan.layers}
        self._checks = StepChecks(root, plan, rest_runs_once=loss_of == "batch")
        in_order = loss_of == "batch"
        self._microbatch_check = MicrobatchCheck(root, common, self._stages, self._last, in_order=in_order)
        self._state: StepState | None = None

    @property
    def has_last_stage(self) -> bool:
        """True if this rank runs the last stage, whose results are those of the step."""
        return self._schedule.rank_of(self._last) == self._rank

    @property
    def backward_early(self) -> bool:
        """True if `forward` already runs the backward passes."""
        return self._schedule.interleaves_backward

    def forward(self, step: UserStep, scale: Tensor | None = None) -> Any:
        """Run ``step`` on its batch, and return on every rank what the last stage reports.

        Collective: every rank of the world must call it, with the same batch on all ranks of a pipeline.

        Args:
            step: a training, validation, test or predict step.
            scale: the gradient of the loss, where the schedule runs backward passes at once.

        Raises:
            Exception: the first failure of any stage, on every rank of the pipeline.
        """
        with refused_once_interrupted(step.name, self._group):
            return self._forward(step, scale)

    def _forward(self, step: UserStep, scale: Tensor | None) -> Any:
        self._state, self._kept = None, KeptGathers()
        state = self._prepare(step, scale)
        notes, failure = self._checks.notes(), None
        early = step.train and self.backward_early

        def work() -> tuple[Packed | None, int]:
            before = self._checks.buffer_marks()
            with self._gathering():
                self._stages.run(state, len(state.batches), "step" if early else "forward", failure=failure)
                self._checks.check_buffers(state, before)
                self._checks.compare_parameters()
                if self.has_last_stage and not state.whole_steps:
                    self._finish(state)
                report = step.report(state.outputs) if self.has_last_stage else None
                wait_for_copies(self._device)
                self.absent.check_hooks()
                self._checks.check_parameters(state)
                if not early:
                    self._checks.check_notes(state, notes)
                digest = 0 if state.batch_digest is None else int(state.batch_digest.read())
                return packed(report, self._group) if self.has_last_stage else None, digest

        source = self._schedule.rank_of(self._last)
        with preserve_rng(), guarded_hooks():  # each run starts from a seed of its own
            failure = _failure_of(self._look, state)
            if self._microbatch_check.is_due(state):
                self._check_microbatches(state, failure)
            report, digests = agree_on_report(f"running {step.name}", work, source, self._group)
        self._stages.flush()
        if len(set(digests)) > 1:
            raise self._other_batches(step, digests)
        self._state = state if step.train and not early else None
        return report

    def backward(self, scale: Tensor) -> None:
        """Run the backward passes of the step before; ``scale`` is the gradient of its loss.

        Collective: every rank of the world must call it.
        """
        state, self._state = self._state, None
        if state is None:
            raise UnsupportedCodeError("no pipelined training step is left to go back through: call backward once")
        with refused_once_interrupted(f"the backward of {state.step.name}", self._group):
            self._backward(state, scale)

    def _backward(self, state: StepState, scale: Tensor) -> None:
        state.scale = scale
        finish = self._finish_backward if self.has_last_stage and not state.whole_steps else None

        def work() -> list[int]:
            failure = _failure_of(self.absent.check_hooks)
            with self._gathering():
                self._stages.run(state, len(state.batches), "backward", first=finish, failure=failure)
            self.absent.check_hooks()
            if not alone:
                return []
            self._gradients.finish_kept(self._kept)
            # Where one rank has a gradient of a parameter that several hold, all of them will.
            return self.absent.own_gradients(lambda p: has_gradient(p) or self._gradients.has_earlier(p))

        alone, what = self._gradients.has_stage_alone, f"the backward of {state.step.name}"
        self._gradients.begin_passes()
        words = self.absent.gradient_words if alone else 0
        every = agree_on_numbers(what, work, words, self._group)
        self._stages.flush()
        if alone:
            self._gradients.finish_passes()
            self.absent.note_gradients(every)
        else:
            self._finish_gradients()

    def add(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Add gradients that `forward` made where it ran the backward passes already; it is called in place of
        `backward`.

        Collective: every rank of the world must call it.
        """
        with refused_once_interrupted("a backward", self._group):
            self._gradients.begin_passes()
            with self._gradients.no_sync():
                for parameter, gradient in gradients:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._finish_gradients()

    def _finish_gradients(self) -> None:
        self._gradients.finish_kept(self._kept)
        self._gradients.finish_passes()
        self.absent.share_gradients()

    def reset(self) -> None:
        """Forget a step that did not finish."""
        self._state = self._gates.running = None
        self._kept = KeptGathers()

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Surround passes that make up a step: what they need of parameters, and what becomes of their gradients."""
        with self._gradients.no_sync(), self._kept.used():
            yield

    # --- before the first stage run ---

    def _prepare(self, step: UserStep, scale: Tensor | None) -> StepState:
        self._checks.begin()
        digest: list[HostCopy | None] = [None]

        def measure() -> tuple[int, int, int]:
            self.absent.check_own()
            self.absent.check_hooks()
            self._checks.check_calls()
            most = self._microbatches
            wanted = min(most, samples_in(step.batch)) if most > 1 else 1
            known, digest[0] = fingerprint_without_wait(step.batch)
            self._checks.mark_parameters()
            return wanted, known, draw_seed()

        every = agree_on_numbers(f"preparing {step.name}", measure, 3, self._group)
        count, _, seed = every[0]
        if any(one[:2] != every[0][:2] for one in every):
            count = 0  # so that other pipelines hear of it, too
        if self._data_group is not None:  # FSDP communicates in every pass: all must make as many
            fewest = torch.tensor(count)
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self._data_group)
            count = int(fewest)
        if count == 0:
            raise self._other_batches(step, [one[:2] for one in every])

        whole_steps = self._loss_of == "microbatch" and step.train
        return StepState(step, [None] * count, [], seed, scale, whole_steps, batch_digest=digest[0])

    def _other_batches(self, step: UserStep, marks: Sequence[Any]) -> UnsupportedCodeError:
        return UnsupportedCodeError(
            f"the ranks of a pipeline got different batches for {step.name}. Those of "
            f"{dist.get_process_group_ranks(self._group)} have these microbatches or checksums: {marks}. Every rank of "
            "a pipeline must load the same samples: use strategy.distributed_sampler_kwargs (Lightning does for "
            "samplers that it adds), and seed random augmentations by the data-parallel rank."
        )

    def _check_microbatches(self, state: StepState, failure: Exception | None) -> None:
        """Raise an UnsupportedCodeError, on all ranks, if layers compute something else of parts of a batch."""

        def work() -> tuple[int, ...]:
            with self._gradients.no_sync(), KeptGathers().used():
                found = self._microbatch_check.look(state, failure)
            self._checks.compare_parameters()
            return NOTHING_TO_COMPARE if self._checks.changed_parameter() else found  # the step itself finds that

        try:
            every = agree_on_numbers("comparing parts of a batch", work, 3, self._group)
            differs = torch.tensor(int(self._microbatch_check.differs(every)))
        except Exception:  # a step need not run on a part of a batch; if the error is another one, it comes again
            differs = torch.tensor(0)
        self._stages.flush()
        if self._data_group is not None:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self._data_group)
        if differs:
            raise self._microbatch_check.error(state, self._plan.layers[-1])

    def _look(self, state: StepState) -> None:
        """Split the batch and look at the step."""
        state.batches, sizes = split_batch(state.step.batch, len(state.batches))
        state.shares = [size / sum(sizes) for size in sizes]
        state.samples = split_running_samples(sizes)
        self._probe(state)
        self._checks.check_start(state)
        if state.step.train and len(sizes) > 1:
            state.watched = self._checks.attributes(sizes, self._device).watched

    def _probe(self, state: StepState) -> None:
        """Find what crosses the boundary after each of this rank's stages: arguments that a later stage cannot know.

        In each step, since steps may change what they do; also whether the step draws random numbers on its way there.
        On the way to the last layer, the run of its rest tells that.
        """
        for stage in self._schedule.stages_of(self._rank):
            if stage == self._last and not (state.whole_steps and state.samples[0] is not None):
                continue
            run = StageRun("probe", 0, self._plan.ranges[stage][1])
            seed_rng(state.seed)
            with torch.no_grad(), for_samples(state.samples[0], counted=False):
                before = rng_checksum()
                self._gates.run(run, lambda: state.step.run(copied(state.batches[0]), None))
                state.draws = state.draws or rng_checksum() != before or state.step.drew
            state.carries[stage] = run.carry
        self._checks.check_draws(state)

    # --- the rest of the step, on the whole batch ---

    def _finish(self, state: StepState) -> None:
        """Run the step once on the whole batch, with the joined results of the layers in their place."""
        count = len(state.batches)
        stored = [state.stored[self._last, microbatch] for microbatch in range(count)]
        state.results = Results([one.outputs for one in stored], [one.carry for one in stored], self._plan.layers[-1])
        seed = state.seed + (count if count > 1 else 0)
        run = StageRun("finish", 0, len(self._plan.layers), results=state.results.give, seed=seed)
        hidden = self._layers if count > 1 else {}
        seed_rng(seed)
        with results_as_placeholders(hidden, self._device):
            self._gates.run(run, lambda: state.step.run(copied(state.step.batch), 1.0))
        state.draws = state.draws or run.drew or state.step.drew
        self._checks.check_draws(state)
        state.outputs.append((run.returned, 1.0))
        state.loss = state.step.loss(run.returned) if state.step.train else None

    def _finish_backward(self, state: StepState) -> None:
        assert state.loss is not None and state.results is not None and state.scale is not None
        torch.autograd.backward([state.loss], [state.scale.to(state.loss.dtype)])
        state.gradients = state.results.gradients()


def _failure_of(work: Callable[..., None], *args: Any) -> Exception | None:
    """Do ``work``; return what is wrong, for all ranks to hear once they have met."""
    try:
        work(*args)
    except Exception as error:
        return error
    return None
