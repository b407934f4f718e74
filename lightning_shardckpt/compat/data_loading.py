"""Private names of torch's DataLoader and Lightning's samplers: the source of indices, the order of all ranks.

Checked with torch 2.12 to 2.15, Lightning 2.5.6 and 2.6.6."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.data import sized_len
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

from lightning_shardckpt.system.random_generators import seed_temporarily


class IndexSource(Protocol):
    """The source of a DataLoader's iterators: yields indices, or lists of indices if the loader makes batches."""

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""

    def __len__(self) -> int:
        """Return the number of indices or lists."""


class IndexedLoader(DataLoader[Any]):
    """A DataLoader whose subclass may replace the source of indices.

    Relies on ``DataLoader._index_sampler``: each iterator reads it when it is made, and iterates over it at its first
    index; an iterator of persistent workers does so again in every epoch. ``len(loader)`` is its length.
    """

    @property
    def _index_sampler(self) -> Any:
        return self.index_source(super()._index_sampler)

    def index_source(self, sampler: Any) -> IndexSource:
        """Return the source of indices; by default the DataLoader's sampler or batch sampler itself."""
        source: IndexSource = sampler
        return source


def sampler_of(loader: Any) -> Any:
    """Return the sampler that draws a loader's order, from its batch sampler if it has one; None without a sampler."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def is_strided(sampler: object) -> bool:
    """Return whether rank r of R gets every R-th index of an order, from the r-th on.

    True for torch's DistributedSampler and Lightning's DistributedSamplerWrapper, but not for their subclasses.
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


@contextmanager
def show_samplers(loader: object) -> Iterator[None]:
    """Let Lightning see the original arguments of a DataLoader while it makes the loader again inside the context.

    It takes torch's BatchSampler for the loader's own, and makes batches of one sample; of every batch sampler it
    distributes ``DataLoader.sampler``, which is torch's default then. In the place of a RandomSampler or
    SequentialSampler it distributes the whole dataset, also if that draws ``num_samples`` or with replacement.

    Relies on ``DataLoader.batch_size`` being None for a batch sampler that was given, and on the loader's attribute
    ``sampler``, which torch does not allow to assign.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        yield
        return
    given: Any = loader.batch_sampler if loader.batch_size is None else None
    kind, own = type(given), loader.sampler
    sampler: Any = getattr(given, "sampler", None)
    if sampler is None:
        sampler = own
    if isinstance(sampler, RandomSampler | SequentialSampler):
        again = getattr(sampler, "replacement", False)
        if again or sized_len(sampler) != sized_len(loader.dataset):
            sampler = _Drawn(sampler)
    try:
        if kind is BatchSampler:
            given.__class__ = GivenBatchSampler
        vars(loader)["sampler"] = sampler  # a loader with batches does not use it
        yield
    finally:
        vars(loader)["sampler"] = own
        if kind is BatchSampler:
            given.__class__ = kind


@contextmanager
def seed_by_epoch(sampler: DistributedSampler[Any]) -> Iterator[None]:
    """Seed all global generators with the seed and the epoch of a sampler inside the context; restore them on exit.

    So ranks whose generators are in different states draw the same order.
    """
    with seed_temporarily(zlib.crc32(f"{sampler.seed} {sampler.epoch}".encode())):
        yield


def draw_alike(loader: object) -> None:
    """Make the user's sampler in a loader that Lightning made draw the same orders on all ranks.

    A sampler with its own ``generator`` does so anyway.
    """
    sampler = sampler_of(loader)
    if own_generator(sampler) is None:
        draw_orders_within(sampler, partial(seed_by_epoch, sampler))


def makes_plain_batches(batch_sampler: object) -> bool:
    """Return whether batches are consecutive indices: without a batch sampler, or with torch's BatchSampler."""
    return batch_sampler is None or type(batch_sampler) in (BatchSampler, GivenBatchSampler)


def wrapped_sampler(sampler: object) -> Any | None:
    """Return the user's sampler within a DistributedSamplerWrapper; None for other samplers.

    Relies on ``DistributedSamplerWrapper.dataset._sampler``.
    """
    return sampler.dataset._sampler if type(sampler) is DistributedSamplerWrapper else None  # type: ignore[attr-defined]


def last_order(sampler: object) -> list[Any] | None:
    """Return the order that the sampler within a DistributedSamplerWrapper drew last; None for other samplers.

    Relies on ``DistributedSamplerWrapper.dataset``, whose items are the order.
    """
    return [*sampler.dataset] if type(sampler) is DistributedSamplerWrapper else None  # type: ignore[misc]  # it is one


def draw_orders_within(sampler: object, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Make the sampler within a DistributedSamplerWrapper draw each order inside the context ``around``.

    Replaces the context of an earlier call; does nothing for other samplers. Relies on
    ``DistributedSamplerWrapper.dataset.reset``, which each iteration calls first.
    """
    if type(sampler) is not DistributedSamplerWrapper:
        return
    dataset: Any = sampler.dataset

    def reset() -> None:
        with around():
            type(dataset).reset(dataset)

    dataset.reset = reset


def order_of_all_ranks(sampler: DistributedSampler[Any]) -> list[Any]:
    """Return the indices of the current epoch in the order of all ranks together, none repeated or left out.

    Relies on ``num_samples`` and ``total_size``, which a DistributedSampler derives from the number of ranks and reads
    when it is iterated over: with a single rank it neither pads nor drops.
    """
    alone = copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(alone.dataset)  # type: ignore[arg-type]
    return list(alone)


def own_generator(sampler: object) -> torch.Generator | None:
    """Return the ``generator`` of the user's sampler within a DistributedSamplerWrapper, if it has one."""
    generator = getattr(wrapped_sampler(sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None
