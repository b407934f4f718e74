"""Give a DataLoader's iterators another source of indices, and ask samplers for the order of all ranks together.

Checked with torch 2.12 to 2.15, Lightning 2.5.6 and 2.6.6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import copy
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)


class IndexSource(Protocol):
    """The source from which the iterators of a DataLoader draw: indices, or lists of them where it makes batches."""

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""

    def __len__(self) -> int:
        """Return how many indices or lists there are."""


class IndexedLoader(DataLoader[Any]):
    """A DataLoader whose subclass may replace what its iterators draw indices from.

    Relies on ``DataLoader._index_sampler``: each iterator reads it when it is made, iterates over that at its first
    index, and an iterator of persistent workers again for every epoch. ``len(loader)`` is that of what it gives.
    """

    @property
    def _index_sampler(self) -> Any:
        return self.index_source(super()._index_sampler)

    def index_source(self, sampler: Any) -> IndexSource:
        """Return what to draw from, given a DataLoader's sampler or batch sampler; by default that itself."""
        source: IndexSource = sampler
        return source


def is_strided(sampler: object) -> bool:
    """Return whether a sampler gives rank r of R every R-th index of an order, from the r-th on.

    So do torch's DistributedSampler, and the one that Lightning puts around a sampler of the user's. Subclasses may do
    otherwise.
    """
    return type(sampler) in (DistributedSampler, DistributedSamplerWrapper)


class GivenBatchSampler(BatchSampler):
    """torch's BatchSampler, given to a loader: Lightning makes subclasses again with their own arguments."""


class _Drawn(Sampler[Any]):
    """A sampler of torch's that is taken for one of the user's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.generator = sampler, getattr(sampler, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def show_samplers(loader: object) -> None:
    """Let Lightning see, in place, what a DataLoader was given, before it makes the loader again.

    It takes torch's BatchSampler for the loader's own, and makes batches of one sample; of every batch sampler it
    distributes ``DataLoader.sampler``, which is torch's default then. In the place of a RandomSampler or
    SequentialSampler it distributes the whole dataset, also if that draws ``num_samples`` or with replacement.

    Relies on ``DataLoader.batch_size`` being None for a batch sampler that was given, and on the loader's attribute
    ``sampler``, which torch lets nobody assign.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    given: Any = loader.batch_sampler if loader.batch_size is None else None
    sampler: Any = getattr(given, "sampler", None)
    if sampler is None:
        sampler = loader.sampler
    if type(given) is BatchSampler:
        given.__class__ = GivenBatchSampler
    if isinstance(sampler, RandomSampler | SequentialSampler):
        again = getattr(sampler, "replacement", False)
        if again or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]  # one of torch's has a length
            sampler = _Drawn(sampler)
    vars(loader)["sampler"] = sampler  # a loader with batches does not use it


def makes_plain_batches(batch_sampler: object) -> bool:
    """Return whether batches are consecutive indices: of a loader without batches, or with torch's BatchSampler."""
    return batch_sampler is None or type(batch_sampler) in (BatchSampler, GivenBatchSampler)


def wrapped_sampler(sampler: object) -> Any | None:
    """Return the sampler of the user's that Lightning has put its own around, if it has.

    Relies on ``DistributedSamplerWrapper.dataset._sampler``.
    """
    return sampler.dataset._sampler if type(sampler) is DistributedSamplerWrapper else None  # type: ignore[attr-defined]


def drawn_order(sampler: object) -> list[Any] | None:
    """Return the order that the sampler of the user's gave when Lightning's around it last began; None without that.

    Relies on ``DistributedSamplerWrapper.dataset._sampler_list``.
    """
    return sampler.dataset._sampler_list if type(sampler) is DistributedSamplerWrapper else None  # type: ignore[attr-defined]


def draw_orders_within(sampler: object, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the sampler of the user's that Lightning put its own around draw each order inside of a context from now on.

    Replaces what an earlier call has set; does nothing for other samplers. Relies on
    ``DistributedSamplerWrapper.dataset.reset``, with which it begins.
    """
    if type(sampler) is not DistributedSamplerWrapper:
        return
    dataset: Any = sampler.dataset

    def reset() -> None:
        with around():
            type(dataset).reset(dataset)

    dataset.reset = reset


def order_of_all_ranks(sampler: DistributedSampler[Any]) -> list[Any]:
    """Return the indices of the present epoch in the order of all ranks together, none repeated or left out.

    Relies on the fields that a DistributedSampler derives from the number of ranks (``num_samples``, ``total_size``),
    and reads when it is iterated over: that of a single rank neither pads nor drops.
    """
    alone = copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(alone.dataset)  # type: ignore[arg-type]
    return list(alone)


def own_generator(sampler: object) -> torch.Generator | None:
    """Return the generator that the sampler of the user's draws from, if it has one of its own."""
    generator = getattr(wrapped_sampler(sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None
