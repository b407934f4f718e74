"""The samples of the training data that the running computation is for.

The code that runs steps sets them for each batch, and pipelines for each microbatch; `keyed_dropout` reads them.
Nothing here knows models, loaders or topologies.
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
        epoch: the epoch.
        numbers: the position of each sample in the global order of all ranks; int64, on the CPU.
        calls: the number of calls for these samples, by module name.
        alone: whether other random numbers are forbidden.
        divided: True if it was split into parts, which count calls on their own.
    """

    epoch: int
    numbers: Tensor
    calls: Counter[str] = field(default_factory=Counter)
    alone: bool = False
    divided: bool = False

    def uncounted(self) -> SampleNumbers:
        """Return the same samples, without calls."""
        return self.part(self.numbers)

    def part(self, numbers: Tensor) -> SampleNumbers:
        """Return some of the samples, without calls."""
        return SampleNumbers(self.epoch, numbers, alone=self.alone)


_running: list[SampleNumbers | None] = [None]
"""The samples of the running step; not per thread, as backward passes on a GPU run in other threads."""


def running_samples() -> SampleNumbers | None:
    """Return the samples that the running computation is for, if they are set."""
    return _running[-1]


def set_running_samples(samples: SampleNumbers | None) -> None:
    """Set the samples that the computation from now on is for."""
    _running[-1] = samples


@contextmanager
def for_samples(samples: SampleNumbers | None, *, counted: bool = True) -> Iterator[None]:
    """Inside, the computation is for these samples; ``counted``: whether its calls count as calls for them."""
    _running.append(samples if counted or samples is None else samples.uncounted())
    try:
        yield
    finally:
        _running.pop()


def split_running_samples(sizes: Sequence[int]) -> list[SampleNumbers | None]:
    """Split the running samples into parts; return None for each part if no samples are set.

    Args:
        sizes: the sizes of the parts; a single one is taken for all samples.

    Raises:
        UnsupportedCodeError: if the samples were split before, as calls can't be counted twice.
    """
    samples = running_samples()
    if samples is None:
        return [None] * len(sizes)
    if samples.divided:
        raise UnsupportedCodeError(
            "a pipeline ran a second training step on one batch (as optimizers with a closure do), and its calls of "
            "dropouts cannot be distinguished from those of the first: leave out DropoutBySample, or pipelines"
        )
    samples.divided = True
    if len(sizes) == 1:
        return [samples.uncounted()]
    return [samples.part(numbers) for numbers in torch.split(samples.numbers, list(sizes))]


@contextmanager
def forbid_other_draws(what: str) -> Iterator[None]:
    """Check that a computation, ``what``, draws nothing from the generators, if its samples forbid that.

    Raises:
        UnsupportedCodeError: at the end, if it has drawn random numbers.
    """
    samples = running_samples()
    before = rng_checksum() if samples is not None and samples.alone else None
    yield
    if before is not None and before != rng_checksum():
        raise other_draws_error(what)


def other_draws_error(what: str) -> UnsupportedCodeError:
    """Return the error for ``what``, which drew random numbers that depend on the topology."""
    return UnsupportedCodeError(
        f"{what} drew random numbers without nn.Dropout modules, with functions such as "
        "torch.nn.functional.dropout or scaled_dot_product_attention(dropout_p=…): these depend on the topology. Use "
        "modules, or allow them with DropoutBySample(strict=False)."
    )
