"""Check on a step's first batches that its layers compute of parts of a batch what they compute of the whole.

Microbatches pass through the layers, and what comes out is joined in their order. That is what the whole batch would
have given if each row of it follows from its own sample alone: not if samples are not the first dim, if the step joins
two views of the batch before the layers, or if a layer computes with the other samples. No shape tells, so some samples
pass through the layers, then those in their middle alone, without gradients and dropout, and the results are compared.
So are the gradients of the autograd functions that they apply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.torch_modules import not_compiled, withholds_state
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.microbatch import some_and_middle
from lightning_shardckpt.parallel.pipeline.side_effects import Memory
from lightning_shardckpt.parallel.pipeline.stage_runner import StageRunner
from lightning_shardckpt.parallel.pipeline.step import StepState, UserStep
from lightning_shardckpt.parallel.sharding.replaced_functions import watch_functions
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder
from lightning_shardckpt.system.random_generators import preserve_rng, rng_checksum

_WHEN = (1, 10, 100)  # layers that begin as the identity show later
_PARTS = 2  # all samples of a trial, and those in the middle
_HALF_PRECISION, _REDUCED_PRECISION, _FULL_PRECISION = 5e-2, 2e-2, 1e-4
_UNIT = 1e6  # of numbers that ranks exchange as integers
NOTHING_TO_COMPARE = (1, 0, 0)
"""What `MicrobatchCheck.look` returns if random numbers were drawn."""


@dataclass(slots=True)
class _QuietStep:
    """A step that is run on parts of its batch without any effect; notes whether it draws random numbers."""

    step: UserStep
    name: str
    batch: Any
    train: bool = False
    drew: bool = False

    def run(self, batch: Any, share: float | None) -> Any:
        before = rng_checksum()
        try:
            return self.step.run(batch, None)
        finally:
            self.drew = self.drew or self.step.drew or rng_checksum() != before

    def loss(self, output: Any) -> Tensor | None:
        return self.step.loss(output)

    def report(self, outputs: list[tuple[Any, float]]) -> Any:
        return self.step.report(outputs)


class MicrobatchCheck:
    """Compares, for the steps of one module, layers on whole batches and on parts of them.

    Args:
        root: the module, split into stages.
        common: those of its modules that every stage has, which steps restore by themselves.
        last: the last stage.
        in_order: whether the order of the rows that come out of the layers counts.
    """

    def __init__(
        self,
        root: nn.Module,
        common: Sequence[nn.Module],
        stages: StageRunner,
        last: int,
        *,
        in_order: bool,
    ) -> None:
        self._root, self._stages, self._last = root, stages, last
        self._in_order = in_order
        others = set(common)
        self._own = [m for m in root.modules() if m not in others and not withholds_state(m)]
        self._steps: Counter[str] = Counter()

    def is_due(self, state: StepState) -> bool:
        """Return whether to look at this step; the same on all ranks that run it."""
        if len(state.batches) == 1:
            return False
        self._steps[state.step.name] += 1
        return self._steps[state.step.name] in _WHEN

    def look(self, state: StepState, failure: Exception | None) -> tuple[int, int, int]:
        """Run the layers; return what `differs` needs of each rank.

        Collective: every rank of the pipeline must call it.

        Args:
            state: of the step, with what crosses the boundaries of stages; random generators are left anywhere.
            failure: of this rank, of which the others are told.

        Raises:
            Exception: what the step raised on parts of the batch.
        """
        step = _QuietStep(state.step, state.step.name, state.step.batch)
        trial = replace(state, step=step, batches=[], shares=[1.0] * _PARTS, scale=None, whole_steps=False)
        trial.samples, trial.stored = [None] * _PARTS, {}
        applied: list[list[list[Tensor | None]]] = [[] for _ in range(_PARTS)]
        trial.watched = lambda stage, part: self._as_it_was(applied[part])
        precision, places = _Precision(), (0, 0, 0)
        with torch.no_grad(), not_compiled(), _evaluating(self._root), precision:
            try:
                trial.batches, places = some_and_middle(state.step.batch, len(state.batches))
            except Exception as error:
                failure = error
            self._stages.run(trial, _PARTS, "forward", failure=failure)
        off = 0.0
        if trial.stored:
            some, middle = (trial.stored[self._last, part].outputs for part in range(_PARTS))
            off = self._difference(some, middle, places)
        for inputs, of_middle in zip(*applied, strict=False):
            off = max(off, self._difference(inputs, of_middle, places))
        return int(step.drew), round(_UNIT * precision.tolerance), round(_UNIT * min(off, 1.0))

    @staticmethod
    def differs(every: Sequence[Sequence[int]]) -> bool:
        """Return whether layers compute something else of parts, given what `look` returned on all ranks.

        If random numbers were drawn, there is nothing to compare.
        """
        drew, tolerances, differences = zip(*every, strict=True)
        return not any(drew) and max(differences) > max(tolerances)

    def error(self, state: StepState, layer: str) -> UnsupportedCodeError:
        """The error for layers that compute something else of parts."""
        return UnsupportedCodeError(
            f"the layers of {state.step.name} compute something else of parts of a batch than of the whole: what comes "
            f"out of {layer} differs. A pipeline passes microbatches through the layers. So the first dim of the "
            "batch's tensors must be the samples (not time, nor may a batch be a list of samples); the step must keep "
            "their order on the way to the layers (views of a sample next to each other, as in torch.stack([a, b], "
            "1).flatten(0, 1), not torch.cat([a, b])); and layers must not compute with other samples of the batch, as "
            "means over it do, in a forward or in the backward of an autograd.Function, or with what they kept of "
            "earlier calls. Change that, or use pipeline_microbatches=1."
        )

    @contextmanager
    def _as_it_was(self, applied: list[list[Tensor | None]]) -> Iterator[None]:
        """At the end, the modules of this stage have the attributes and buffers that they had.

        Args:
            applied: gets the gradients of the arguments of each autograd function that is applied inside.
        """
        memory, attributes = Memory(self._own), [(vars(module), dict(vars(module))) for module in self._own]
        try:
            with watch_functions(lambda function, args: applied.append(_gradients(function, args))):
                yield
        finally:
            memory.restore()
            for now, before in attributes:  # those that a memory doesn't cover, too
                now.clear()
                now.update(before)

    def _difference(
        self, some: Sequence[Tensor | None], middle: Sequence[Tensor | None], places: tuple[int, int, int]
    ) -> float:
        if len(some) != len(middle):
            return 0.0  # it depends on values how many there are; the joining of microbatches says so
        pairs = [(a, b) for a, b in zip(some, middle, strict=True) if a is not None and b is not None]
        return max((self._distance(a, b, *places) for a, b in pairs), default=0.0)

    def _distance(self, some: Tensor, middle: Tensor, samples: int, start: int, stop: int) -> float:
        """How far results of samples in the middle are from those among all, relative to their size."""
        shapes = list(enumerate(zip(some.shape, middle.shape, strict=False)))
        others = [(dim, sizes) for dim, sizes in shapes if sizes[0] != sizes[1]]
        numbers = some.is_floating_point() or some.is_complex()
        if some.ndim != middle.ndim or len(others) != 1 or not middle.numel() or not numbers:
            return 0.0
        ((dim, (rows, rows_of_middle)),) = others
        if rows * (stop - start) != rows_of_middle * samples:
            return 0.0
        a, b = ((t.to(torch.complex128 if t.is_complex() else torch.float64)) for t in (some, middle))
        if self._in_order:
            a = a.narrow(dim, rows * start // samples, rows_of_middle)
        else:  # code that has the losses of microbatches never joins them: any row of all will do
            a, b = (t.movedim(dim, 0).flatten(1).norm(dim=1) for t in (a, b))
            a = a[(b[:, None] - a).abs().argmin(1)]
        difference, size = float((a - b).norm()), float(b.norm())
        return difference / size if difference > 0 and size > 0 else float(difference > 0)


def _gradients(function: Any, args: tuple[Any, ...]) -> list[Tensor | None]:
    """Return the gradients of the arguments of an autograd function, given the values of its results as theirs."""
    with suppress(Exception), preserve_rng(), torch.enable_grad():  # it need not have a backward
        leaves = {n: arg.detach().requires_grad_() for n, arg in enumerate(args) if _is_of_reals(arg)}
        found = function.apply(*(leaves[n].clone() if n in leaves else arg for n, arg in enumerate(args)))
        outputs = [out for out in (found if isinstance(found, tuple) else [found]) if _is_of_reals(out)]
        outputs = [out for out in outputs if out.requires_grad]
        values = [out.detach() for out in outputs]
        return list(torch.autograd.grad(outputs, list(leaves.values()), values, allow_unused=True))
    return []


def _is_of_reals(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Placeholder) and value.is_floating_point()


class _Precision(TorchFunctionMode):
    """Finds how exact results can be, by the dtypes that functions inside return."""

    tolerance = _FULL_PRECISION

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype.itemsize < 8 and found.dtype.is_floating_point:
            self.tolerance = max(self.tolerance, _tolerance(function, found))
        return found


_OF_CUDNN = ("conv", "lstm", "gru", "rnn")


def _tolerance(function: Any, result: Tensor) -> float:
    """Return how far results of a function may be apart, where TF32 may be used; not run on a GPU."""
    if result.dtype.itemsize < 4:
        return _HALF_PRECISION
    if getattr(function, "__name__", "").startswith(_OF_CUDNN):
        has_tf32 = torch.backends.cudnn.allow_tf32
    else:
        has_tf32 = torch.get_float32_matmul_precision() != "highest"
    return _REDUCED_PRECISION if has_tf32 and result.device.type != "cpu" else _FULL_PRECISION


@contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """Inside, all modules are in evaluation mode; methods ``train`` of users are not called."""
    modes = [(module, module.training) for module in root.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
