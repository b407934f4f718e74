"""Private names of torch's DataLoader and Lightning's samplers: the source of indices, the order of all ranks.

Checked with torch 2.12 to 2.15, Lightning 2.5.6 and 2.6.6."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len as sized_len  # for state, which does not import Lightning
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.system.random_generators import seed_temporarily


def replace_indices(kind: Any, source: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return attributes for a subclass of a DataLoader's class, whose loaders draw from another source of indices.

    ``source`` takes a loader and its sampler, and returns an iterable of indices, or of lists of them, with a length.
    An iterator reads ``_index_sampler`` when it is made, and iterates over it at its first index of each epoch.
    """
    return {"_index_sampler": property(lambda loader: source(loader, kind._index_sampler.fget(loader)))}


def sampler_of(loader: Any) -> Any:
    """Return the sampler that draws a loader's order, from its batch sampler if it has one; None without a sampler."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def deals_samples(loader: Any) -> bool:
    """Return whether rank r of R gets every R-th index of an order, from the r-th on, in batches of consecutive ones.

    A subclass of a sampler may do otherwise, and one may leave out samples that not all ranks would get.
    """
    sampler = sampler_of(loader)
    is_strided = type(sampler) in (DistributedSampler, DistributedSamplerWrapper) and not sampler.drop_last
    return is_strided and type(loader.batch_sampler) is BatchSampler


def keeps_samplers(loader: object, ranks: int) -> bool:
    """Return whether a DataLoader must not be made again by Lightning, since its samples or batches would be others.

    Lightning distributes ``DataLoader.sampler``: of a loader that was given a batch sampler, that is torch's default.
    It takes torch's BatchSampler for the loader's own, and makes batches of one sample. In the place of a RandomSampler
    or SequentialSampler it distributes the whole dataset, also if that draws others.

    Raises:
        UnsupportedCodeError: for such a loader on several ``ranks``, unless its sampler is a DistributedSampler.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = sampler_of(loader)
    given = loader.batch_sampler is not None or isinstance(sampler, BatchSampler)
    if loader.batch_size is None and given:
        what = f"batches of the {type(loader.batch_sampler or sampler).__name__} that it was given"
    elif isinstance(sampler, RandomSampler | SequentialSampler) and (
        type(sampler) not in (RandomSampler, SequentialSampler)
        or getattr(sampler, "replacement", False)
        or sized_len(sampler) != sized_len(loader.dataset)
    ):
        what = f"samples of a {type(sampler).__name__} that may not draw each sample of the dataset once"
    else:
        return False
    if ranks > 1 and not isinstance(sampler, DistributedSampler):
        raise UnsupportedCodeError(
            f"the {type(loader).__name__} reads {what}, which Lightning cannot divide among {ranks} ranks: give it a "
            "DistributedSampler(dataset, **trainer.distributed_sampler_kwargs), if need be inside of the batch "
            "sampler, or pass use_distributed_sampler=False, with which every rank reads the same batches"
        )
    return True


def user_sampler(sampler: object) -> Any:
    """Return the user's sampler within a DistributedSamplerWrapper; others as they are."""
    return sampler.dataset._sampler if type(sampler) is DistributedSamplerWrapper else sampler  # type: ignore[attr-defined]


def draw_orders_by_epoch(loader: object) -> None:
    """Make the sampler within a loader's DistributedSamplerWrapper draw each order from the wrapper's seed and epoch.

    The generators of the process, and the sampler's own ``generator``, are seeded while it draws, and restored then. So
    ranks whose generators are in different states draw the same order, and a resumed run draws that of its epoch again.
    Does nothing for other samplers. Relies on ``dataset.reset`` of the wrapper, by which each iteration draws.

    Raises:
        UnsupportedCodeError: for a sampler that draws another order from the same states.
    """
    sampler = sampler_of(loader)
    if type(sampler) is not DistributedSamplerWrapper:
        return
    dataset: Any = sampler.dataset

    def reset() -> None:
        seed = zlib.crc32(f"{sampler.seed} {sampler.epoch}".encode())
        generator = getattr(user_sampler(sampler), "generator", None)
        generator = generator if isinstance(generator, torch.Generator) else torch.Generator()
        own = generator.get_state()
        with seed_temporarily(seed):
            generator.manual_seed(seed)
            type(dataset).reset(dataset)
        generator.set_state(own)

    def draw() -> list[Any]:
        reset()
        return [*dataset]

    dataset.reset = reset
    if draw() != draw():
        raise UnsupportedCodeError(
            f"{type(user_sampler(sampler)).__name__} draws another order from generators in the same states, so "
            "ranks and resumed runs would not read each sample once: draw from the generators of torch, numpy or "
            "python, or from the sampler's own `generator`, or give the loader a DistributedSampler"
        )


def order_of_all_ranks(sampler: DistributedSampler[Any]) -> list[Any]:
    """Return the indices of the current epoch in the order of all ranks together, none repeated or left out.

    Relies on ``num_samples`` and ``total_size``: with a single rank a DistributedSampler neither pads nor drops.
    """
    alone = copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(alone.dataset)  # type: ignore[arg-type]
    return list(alone)
