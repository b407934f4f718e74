"""Know which samples of the training data the computation at hand is for.

Whoever runs steps says so here, for a batch; a pipeline says which part of it a microbatch is. What keys random numbers
by samples asks. Nothing here knows models, loaders or topologies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.system.random_generators import rng_checksum


@dataclass(slots=True)
class SampleNumbers:
    """The samples of a batch, or of a part of it.

    Attributes:
        epoch: in which they are used.
        numbers: of each, its place in the order of all ranks together; int64, on the CPU.
        calls: how often each module, by name, was called for them.
        alone: whether no other random numbers may be drawn for them.
        divided: whether there are parts of it, whose calls are counted apart.
    """

    epoch: int
    numbers: Tensor
    calls: Counter[str] = field(default_factory=Counter)
    alone: bool = False
    divided: bool = False

    def uncounted(self) -> SampleNumbers:
        """Return the same samples, for which nothing was called yet."""
        return self.part(self.numbers)

    def part(self, numbers: Tensor) -> SampleNumbers:
        """Return some of them, for which nothing was called yet."""
        return SampleNumbers(self.epoch, numbers, alone=self.alone)


_running: list[SampleNumbers | None] = [None]
"""Those of the step that runs now; not per thread, as backward passes on a GPU run in threads of their own."""


def running_samples() -> SampleNumbers | None:
    """Return the samples that the computation at hand is for; None if nobody said."""
    return _running[-1]


def set_running_samples(samples: SampleNumbers | None) -> None:
    """Say what the computation from now on is for."""
    _running[-1] = samples


@contextmanager
def for_samples(samples: SampleNumbers | None, *, counted: bool = True) -> Iterator[None]:
    """Say what the computation inside is for; ``counted``: whether its calls are among those of the samples."""
    _running.append(samples if counted or samples is None else samples.uncounted())
    try:
        yield
    finally:
        _running.pop()


def split_running_samples(sizes: Sequence[int]) -> list[SampleNumbers | None]:
    """Divide the running samples into parts of so many each; None for each if nobody said what runs.

    Args:
        sizes: of the parts; one stands for all samples, whatever it is.

    Raises:
        UnsupportedCodeError: if these samples were divided before: their calls cannot be counted on.
    """
    samples = running_samples()
    if samples is None:
        return [None] * len(sizes)
    if samples.divided:
        raise UnsupportedCodeError(
            "a pipeline ran a second training step on one batch (as optimizers with a closure do), in which the calls "
            "of dropouts cannot be told from those of the first: leave out DropoutBySample, or pipelines"
        )
    samples.divided = True
    if len(sizes) == 1:
        return [samples.uncounted()]
    return [samples.part(numbers) for numbers in torch.split(samples.numbers, list(sizes))]


@contextmanager
def forbid_other_draws(what: str) -> Iterator[None]:
    """Surround a computation, ``what``, that must draw nothing from the generators if its samples say so.

    Raises:
        UnsupportedCodeError: if it does.
    """
    samples = running_samples()
    before = rng_checksum() if samples is not None and samples.alone else None
    yield
    if before is not None and before != rng_checksum():
        raise other_draws_error(what)


def other_draws_error(what: str) -> UnsupportedCodeError:
    """The error that ``what`` drew random numbers that depend on the topology."""
    return UnsupportedCodeError(
        f"{what} drew random numbers otherwise than by nn.Dropout modules, with functions such as "
        "torch.nn.functional.dropout or scaled_dot_product_attention(dropout_p=…): these depend on the topology. Use "
        "modules, or let them be with DropoutBySample(strict=False)."
    )
