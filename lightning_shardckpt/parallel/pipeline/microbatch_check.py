"""Checks that training on microbatches equals training on batches: of results of the layers, and of state.

Results of microbatches are joined in order. They equal the results of the batch only if each row depends on its own
sample. That fails if the first dim is not the samples, if the step joins two views of the batch before the layers, or
if a layer computes with other samples. Shapes don't show it, so on the first batch of each step a slice of the samples
passes through the layers, then a part of the slice alone, without gradients and dropout, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.torch_modules import BatchNorm, buffer_slots, run_eagerly, withholds_state
from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.pipeline.microbatch import slice_for_trial
from lightning_shardckpt.parallel.pipeline.side_effects import ModuleSnapshot
from lightning_shardckpt.parallel.pipeline.stage_runner import StageRunner, StepState
from lightning_shardckpt.parallel.pipeline.stages import StagePlan
from lightning_shardckpt.parallel.sharding.fqn import is_inside
from lightning_shardckpt.system.random_generators import rng_checksum, seed_rng

_SLICES = 2  # a slice of the samples, and a part of it
_HALF_PRECISION, _REDUCED_PRECISION, _FULL_PRECISION = 5e-2, 2e-2, 1e-4  # the second is that of TF32
_UNIT = 1e6  # ranks exchange numbers as integers, in millionths


class MicrobatchState:
    """Checks of the state that training on microbatches would change otherwise than training on batches.

    ``rest_runs_once``: whether modules after the layers run once, on the whole batch.
    """

    def __init__(self, root: nn.Module, plan: StagePlan, *, rest_runs_once: bool) -> None:
        whole = [unit for unit, where in plan.others.items() if where == "last" and rest_runs_once]
        self._buffers, self._norms = list[tuple[str, nn.Module, str]](), list[tuple[str, nn.Module]]()
        for name, module in root.named_modules():
            clean, holders = clean_fqn(name), plan.holders(clean_fqn(name))
            if is_inside(clean, whole):  # it sees the whole batch
                continue
            if len(holders) == 1:
                self._buffers += [(f"{name}.{key}", module, key) for key in buffer_slots(module)]
            if isinstance(module, BatchNorm):
                self._norms.append((name, module))

    def check_norms(self) -> None:
        """Check the module before it trains on microbatches.

        Raises:
            UnsupportedCodeError: for batch norms.
        """
        if any(module.training for _, module in self._norms):
            raise UnsupportedCodeError(
                f"{self._norms[0][0]} is a batch norm, which would compute statistics of microbatches. Use another "
                "norm, or Pipeline(microbatches=1)."
            )

    def buffer_marks(self) -> dict[str, tuple[int, int]]:
        """Return marks of the buffers of modules that see microbatches, by name. A mark changes with the values."""
        buffers = [(name, buffer_slots(module).get(key)) for name, module, key in self._buffers]
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers if buffer is not None}

    def check_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        """Check the buffers after training on microbatches.

        Raises:
            UnsupportedCodeError: for a buffer that training changes, such as an average of activations in a layer.
        """
        changed = [name for name, mark in self.buffer_marks().items() if before.get(name) != mark]
        if changed:
            raise UnsupportedCodeError(
                f"{changed[0]} is a buffer that training changes in a layer or before the layers, where it sees "
                "microbatches, not batches. Use Pipeline(microbatches=1), or keep such state out of these modules."
            )


class MicrobatchCheck:
    """Compares results of the layers on a slice of a batch and on a part of the slice.

    ``staged`` are the modules that some stages have; `UserStep.run` restores the others.
    """

    def __init__(self, root: nn.Module, staged: Sequence[nn.Module], stages: StageRunner, last: int) -> None:
        self._root, self._stages, self._last = root, stages, last
        here = set(staged)
        self._own = [module for module in root.modules() if module in here and not withholds_state(module)]
        self._checked = set[str]()  # the names of steps

    def is_due(self, name: str) -> bool:
        """Return True if the step of this name is to be checked; the same on all ranks that run it."""
        is_first = name not in self._checked
        self._checked.add(name)
        return is_first

    def measure(self, state: StepState, failure: Exception | None) -> tuple[int, int, int]:
        """Run the layers on both slices, and return this rank's numbers for `differs`.

        Collective: every rank of the pipeline must call it. Does not restore the random generators.

        Raises:
            Exception: an error of the step on a slice of the batch.
        """
        trial = replace(state, batches=[], sizes=[1] * _SLICES, scale=None, whole_steps=False, forwards={})
        precision, bounds = _Precision(), (0, 0, 0)
        snapshot = ModuleSnapshot(self._own if failure is None else ())  # after a failure no layer runs
        with torch.no_grad(), run_eagerly(), _eval_mode(self._root), precision:
            try:
                trial.batches, bounds = slice_for_trial(state.step.batch, len(state.batches))
            except Exception as error:
                failure = error
            try:
                self._stages.run(trial, _SLICES, "forward", failure=failure)
            finally:
                snapshot.restore()
        after, difference = rng_checksum(), 0.0
        seed_rng(state.seed + _SLICES - 1)  # from which the last run began
        drew = after != rng_checksum()
        if (self._last, 0) in trial.forwards:
            every, part = (trial.forwards[self._last, number].outputs for number in range(_SLICES))
            if len(every) == len(part):  # else their number depends on values, which `Results` refuses
                pairs = zip(every, part, strict=True)
                difference = max((self._distance(a, b, *bounds) for a, b in pairs), default=0.0)
        return int(drew), round(_UNIT * precision.tolerance), round(_UNIT * min(difference, 1.0))

    @staticmethod
    def differs(rows: Sequence[Sequence[int]]) -> bool:
        """Return True if results differ between the slices, given the results of `measure` on all ranks.

        False if random numbers were drawn, since then the results cannot be compared.
        """
        drew, tolerances, differences = zip(*rows, strict=True)
        return not any(drew) and max(differences) > max(tolerances)

    def error(self, state: StepState, layer: str) -> UnsupportedCodeError:
        """Return the error for layers whose results differ."""
        return UnsupportedCodeError(
            f"the layers of {state.step.name} compute something else of parts of a batch than of the whole: the output "
            f"of {layer} differs. A pipeline passes microbatches through the layers. So the first dim of the batch's "
            "tensors must be the samples (not time, nor may a batch be a list of samples); the step must keep their "
            "order before the layers (views of a sample next to each other, as in torch.stack([a, b], 1).flatten(0, 1),"
            " not torch.cat([a, b])); and layers must not compute with other samples of the batch, such as means over "
            "it, or with state of earlier calls. Change that, or use Pipeline(microbatches=1)."
        )

    def _distance(self, all_rows: Tensor, part: Tensor, samples: int, start: int, stop: int) -> float:
        """Return the relative distance between results of some samples, computed alone and among all samples."""
        shapes = list(enumerate(zip(all_rows.shape, part.shape, strict=False)))
        differing = [(dim, sizes) for dim, sizes in shapes if sizes[0] != sizes[1]]
        is_numeric = all_rows.is_floating_point() or all_rows.is_complex()
        if all_rows.ndim != part.ndim or len(differing) != 1 or not part.numel() or not is_numeric:
            return 0.0
        ((dim, (rows, rows_of_part)),) = differing
        if rows * (stop - start) != rows_of_part * samples:
            return 0.0
        a, b = ((t.to(torch.complex128 if t.is_complex() else torch.float64)) for t in (all_rows, part))
        a = a.narrow(dim, rows * start // samples, rows_of_part)
        difference, size = float((a - b).norm()), float(b.norm())
        return difference / size if difference > 0 and size > 0 else float(difference > 0)


class _Precision(TorchFunctionMode):
    """Finds the tolerance of results, by the dtypes that functions inside return."""

    tolerance = _FULL_PRECISION

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype.itemsize < 8 and result.dtype.is_floating_point:
            if result.dtype.itemsize < 4:
                tolerance = _HALF_PRECISION
            else:
                is_of_cudnn = getattr(function, "__name__", "").startswith(("conv", "lstm", "gru", "rnn"))
                matmul_has_tf32 = torch.get_float32_matmul_precision() != "highest"
                has_tf32 = torch.backends.cudnn.allow_tf32 if is_of_cudnn else matmul_has_tf32
                tolerance = _REDUCED_PRECISION if has_tf32 and result.device.type != "cpu" else _FULL_PRECISION
            self.tolerance = max(self.tolerance, tolerance)
        return result


@contextmanager
def _eval_mode(root: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, without calling users' ``train`` methods."""
    modes = [(module, module.training) for module in root.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
