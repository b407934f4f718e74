"""The position of a loader in an epoch, and resuming there: torch's DataLoaders, and loaders with their own state.

A loader of training gets a class that records its progress, and a resumed run gives it a position: a dict of plain
values. There are three ways back to a position.

1. With a DistributedSampler, seed and epoch determine the order of all ranks together (`draw_orders_by_epoch` for a
   sampler within it). A position is a number of samples (``used``), from which another number of ranks with the same
   global batch can continue: ``Division``.
2. Another sampler, or an IterableDataset, draws from the random state at the start of the epoch (``epoch_start``). A
   resumed epoch draws from that state again, skips the used batches (of indices, for map-style datasets), and leaves
   the process in the state that it had before. The random state of worker processes is not restored.
3. A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader, gets the ``state``
   before its first unused batch.

Streams (IterableDatasets, and loaders with a state) may have drawn more batches than training has used: Lightning draws
one batch ahead of a loader without a length, and an exception may interrupt a batch. So their position is recorded
before each draw. Random numbers that they drew from the process for unused batches are not drawn again; the position
notes this.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_shardckpt.compat.data_loading import (
    deals_samples,
    order_of_all_ranks,
    replace_indices,
    sampler_of,
    sized_len,
    user_sampler,
)
from lightning_shardckpt.system.random_generators import get_rng_state, preserve_rng, rng_checksum, set_rng_state

_REPEATED = (
    "{left} samples are left of this epoch, and its last step has fewer samples than ranks: {repeated} of {ranks} "
    "data-parallel ranks repeat a sample of another rank, since each needs a batch. Pass drop_last=True to the "
    "DataLoader to leave them out."
)
_KEPT = 3  # draws of a stream: Lightning draws one batch ahead, and one is in use
_PROGRESS = "shardckpt_progress"
LoaderPosition = Mapping[str, Any]
"""The position of one loader, as a checkpoint stores it."""


@dataclass(slots=True)
class Progress:
    """The progress of a loader of training. It doesn't refer to the loader, whose workers end with it."""

    kind: Any  # the loader's own class
    count: Callable[[], tuple[int, int]]  # the number of the current epoch, and of its drawn batches
    has_state: bool  # of its own
    is_stream: bool  # it has a state, or its dataset has no indices
    waits: bool = False  # iterations are empty, until the position to resume from is known
    upcoming: LoaderPosition | None = None  # at which the next iteration begins; None to begin anew
    begun: LoaderPosition = field(default_factory=dict)  # at which the current one began
    batches: int = 0  # of the current iteration of a stream, with skipped ones
    has_drawn: bool = False  # a stream has drawn random numbers of the process after its first batch
    # the last draws of a stream: the number of the epoch and of its batch, and the position before it
    draws: deque[tuple[tuple[int, int], dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=_KEPT))


def progress_of(loader: object) -> Progress | None:
    """Return the progress of a loader of ``make_resumable``; None for others."""
    return getattr(loader, "__dict__", {}).get(_PROGRESS)


def make_resumable(loader: Any, count: Callable[[], tuple[int, int]], *, waits: bool = False) -> None:
    """Make a new loader resumable in place, except an iterable without state, or of a class that can't be changed.

    ``count`` returns the number of the current epoch, from 1, and of its drawn batches. If the loader waits, iterations
    are empty until ``resume_loader``.
    """
    kind = getattr(type(loader), "shardckpt_kind", type(loader))  # Lightning makes loaders of the new class, too
    has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    if not has_state and not isinstance(loader, DataLoader):
        return
    is_stream = has_state or isinstance(loader.dataset, IterableDataset)
    if kind is type(loader):
        added = {"__module__": kind.__module__, "__iter__": _iterate, "shardckpt_kind": kind}
        if not has_state:  # Lightning asks for these methods to learn whether a loader can resume
            added |= {"state_dict": dict, "load_state_dict": lambda loader, state: None}
        if not is_stream:
            added |= replace_indices(kind, _Indices)
        try:
            loader.__class__ = type(kind.__name__, (kind,), added)
        except TypeError:  # a class with __slots__, or an extension type
            return
    vars(loader)[_PROGRESS] = Progress(kind, count, has_state, is_stream, waits)


def _iterate(loader: Any) -> Iterator[Any]:
    """Begin an iteration: the ``__iter__`` of resumable loaders."""
    progress: Progress = vars(loader)[_PROGRESS]
    if progress.waits:
        return iter(())
    position = progress.upcoming
    if not progress.is_stream:
        progress.begun = {}
        with _preserve_random_state(loader, is_needed=position is not None):
            iterator: Iterator[Any] = progress.kind.__iter__(loader)
        return iterator
    progress.upcoming = None
    if position is None:
        return _draw_all(loader, _begin_stream(loader, {}))
    with preserve_rng(every_device=True):
        iterator = _begin_stream(loader, position)
    _set_random_state(loader, position)
    return _draw_all(loader, iterator)


def position_of(loader: Any, used: int | None, *, cycles: bool) -> LoaderPosition | None:
    """Return the position of a loader after ``used`` batches of the epoch, None if it is over; None if unknown.

    ``used`` is of all loaders together; if they cycle, a shorter one begins again at its end.
    """
    progress = progress_of(loader)
    if progress is None:
        return None
    if progress.is_stream:
        return _position_of_stream(loader, progress, used)
    used, length = used or 0, sized_len(loader)
    if length is not None and used > length:
        used = (used - 1) % length + 1 if cycles else length
    begun, division, samples = progress.upcoming or progress.begun, _division_of(loader), _samples_of(loader)
    position = _describe(loader, progress, used) | {"samples": samples}
    if division is not None and samples is not None:
        before = begun.get("used", 0)
        position["used"] = before + sum(division.sizes(samples - before)[: used - begun.get("batches", 0)])
    return position


def _describe(loader: Any, progress: Progress, batches: int) -> dict[str, Any]:
    """Return the part of a position that does not depend on an order of all ranks."""
    start = (progress.upcoming or progress.begun).get("epoch_start")
    sampling = {"seed": getattr(sampler_of(loader), "seed", None), "epoch_start": start}
    sampling["own"] = [generator.get_state() for generator in _generators(loader)]
    state = {"state": deepcopy(progress.kind.state_dict(loader))} if progress.has_state else {}
    return {**sampling, "batches": batches, "batch_size": batch_size_of(loader), **state}


def resume_loader(loader: Any, position: LoaderPosition | None, *, batches: int | None, same_ranks: bool) -> bool:
    """Begin the next iteration of a loader where an interrupted run was, or anew without a position.

    Args:
        loader: of training.
        position: of the interrupted run.
        batches: of its epoch that were used; None if the next epoch begins.
        same_ranks: whether this rank has the data of the rank that saved; else no random or other state fits.

    Returns whether the data goes on exactly. The order of the next epoch depends only on a state of the loader.
    """
    progress = progress_of(loader)
    if progress is None:
        return not batches
    progress.waits, progress.upcoming, has_state = False, None, progress.has_state
    if batches is None and not has_state and loader.persistent_workers:
        with _preserve_random_state(loader):
            iter(loader)  # the workers have begun, and drawn their seeds, in an earlier epoch
    if position is None or ("state" in position) != has_state or (has_state and not same_ranks):
        return not batches and not has_state
    if not same_ranks:
        position = {**position, "epoch_start": None, "own": []}
    if position["seed"] is not None and hasattr(sampler := sampler_of(loader), "seed"):
        sampler.seed = position["seed"]
    if batches is None and has_state:
        with _preserve_random_state(loader):
            _begin_stream(loader, position)  # the iteration that is over
    _set_random_state(loader, {"own": position["own"]})
    has_begun = position["epoch_start"] is not None or position["batches"] or "used" in position
    if batches is not None and (has_begun or has_state):
        progress.upcoming = position
    knows_order = has_state or position["epoch_start"] is not None
    if progress.is_stream:
        return not batches or (knows_order and not position.get("draws_random_numbers", True))
    knows_rest = knows_order if _division_of(loader) is None else "used" in position
    return not batches or (knows_rest and position.get("samples") == _samples_of(loader))


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples of this rank in a batch; None if unknown, or for a loader with its own state."""
    progress = progress_of(loader)
    if progress is None or progress.has_state:
        return None
    is_dealt = not progress.is_stream and deals_samples(loader)
    size: int | None = (loader.batch_sampler if is_dealt else loader).batch_size
    return size


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the loader's own generators."""
    found = (getattr(each, "generator", None) for each in (loader, user_sampler(sampler_of(loader))))
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def _random_state(loader: Any) -> dict[str, Any]:
    """Return the random states of this process and of the loader's own generators."""
    return {"process": get_rng_state(), "own": [generator.get_state() for generator in _generators(loader)]}


def _set_random_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Set the random states of a position's ``epoch_start``, or those of the loader's own generators alone."""
    if "process" in state:
        set_rng_state(state["process"])
    for generator, own in zip(_generators(loader), state["own"], strict=False):
        generator.set_state(own)


@contextmanager
def _preserve_random_state(loader: Any, *, is_needed: bool = True) -> Iterator[None]:
    state = _random_state(loader)
    try:
        yield
    finally:
        if is_needed:
            _set_random_state(loader, state)


# ── loaders with indices ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Division:
    """The division of an order of all ranks into steps, the same number on every data-parallel rank.

    A step takes the next ``ranks * batch_size`` samples. The rest makes a shorter last step, in which some ranks have
    one sample less than others, unless ``drop_last``. If the rest has fewer samples than there are ranks, the last two
    steps share their samples.
    """

    ranks: int
    batch_size: int
    drop_last: bool = False

    def sizes(self, samples: int) -> list[int]:
        """Return how many of ``samples`` all ranks together use in each step."""
        full, rest = divmod(samples, self.ranks * self.batch_size)
        sizes = [self.ranks * self.batch_size] * full
        if not rest or self.drop_last:
            return sizes
        moved = self.batch_size // 2 * self.ranks if full and rest < self.ranks else 0
        return [*sizes[:-1], *(size - moved for size in sizes[-1:]), moved + rest]

    def repeats(self, samples: int) -> int:
        """Return how many ranks repeat another rank's sample in the last step, for want of samples."""
        return max(0, self.ranks - min(self.sizes(samples)[-1:], default=self.ranks))

    def deal(self, order: Sequence[Any], rank: int) -> Iterator[list[Any]]:
        """Yield one rank's batches of ``order``."""
        start = 0
        for size in self.sizes(len(order)):
            batch = order[start : start + size]
            yield list(batch[rank :: self.ranks]) or [batch[rank % len(batch)]]
            start += size


def _division_of(loader: Any) -> Division | None:
    """Return the division of the order of all ranks into steps; None if the order is unknown."""
    if not deals_samples(loader):
        return None
    batches = loader.batch_sampler
    return Division(batches.sampler.num_replicas, batches.batch_size, batches.drop_last)


def _samples_of(loader: Any) -> int | None:
    """Return the number of samples of an epoch of all ranks; None if unknown."""
    return sized_len(sampler_of(loader).dataset if deals_samples(loader) else loader.dataset)


class _Indices:
    """The indices of each epoch of a loader, or the rest of an interrupted one, which leaves random states unchanged.

    Iterators of persistent workers keep it over epochs.
    """

    def __init__(self, loader: Any, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler

    def __len__(self) -> int:
        division, samples = _division_of(self._loader), _samples_of(self._loader)
        return len(self._sampler) if division is None or samples is None else len(division.sizes(samples))

    def __iter__(self) -> Iterator[Any]:  # runs when the first index is asked for
        loader, progress = self._loader, vars(self._loader)[_PROGRESS]
        position, progress.upcoming = progress.upcoming or {}, None
        batches, used, start = position.get("batches", 0), position.get("used", 0), position.get("epoch_start")
        if (division := _division_of(loader)) is not None:
            sampler = sampler_of(loader)
            progress.begun, left = {"batches": batches, "used": used}, order_of_all_ranks(sampler)[used:]
            if sampler.rank == 0 and batches and (repeated := division.repeats(len(left))):
                warnings.warn(_REPEATED.format(left=len(left), repeated=repeated, ranks=division.ranks), stacklevel=2)
            yield from division.deal(left, sampler.rank)
            return
        with _preserve_random_state(loader, is_needed=start is not None):
            if start is not None:
                _set_random_state(loader, start)
            progress.begun, indices = {"epoch_start": _random_state(loader)}, iter(self._sampler)
            first = [*islice(indices, batches, batches + 1)]  # draws the order
        yield from chain(first, indices)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _position_of_stream(loader: Any, progress: Progress, used: int | None) -> LoaderPosition | None:
    if progress.upcoming is not None:
        return progress.upcoming
    first = None if used is None else (progress.count()[0], used)
    unused = [] if first is None else [(number, position) for number, position in progress.draws if number >= first]
    if progress.waits or (unused and unused[0][0] != first):
        return None
    position = unused[0][1] if unused else _describe(loader, progress, progress.batches)
    ahead = any(each.get("draws_random_numbers", False) for _, each in unused)
    draws = ahead if progress.has_state else progress.has_drawn
    return position | {"draws_random_numbers": draws}


def _begin_stream(loader: Any, position: LoaderPosition) -> Iterator[Any]:
    """Begin an iteration at a position, from the random state in which its epoch began; without one, a new epoch."""
    progress: Progress = vars(loader)[_PROGRESS]
    start = position.get("epoch_start") or _random_state(loader)
    if position:
        _set_random_state(loader, start)
    if "state" in position:
        progress.kind.load_state_dict(loader, position["state"])
    progress.begun, progress.batches = {"epoch_start": start}, position.get("batches", 0)
    progress.has_drawn = position.get("draws_random_numbers", False)
    iterator: Iterator[Any] = progress.kind.__iter__(loader)
    for _ in islice(iterator, 0 if progress.has_state else progress.batches):
        pass
    return iterator


def _draw_all(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield all batches. The record of a draw that raises is kept, since the loader's state is unusable after it."""
    progress: Progress = vars(loader)[_PROGRESS]
    watches = not getattr(loader, "num_workers", 0)  # workers have generators of their own
    while True:
        position, before = _describe(loader, progress, progress.batches), rng_checksum() if watches else 0
        progress.draws.append((progress.count(), position))
        try:
            batch = next(iterator)
        except StopIteration:
            progress.draws.pop()
            return
        position["draws_random_numbers"] = watches and before != rng_checksum()
        progress.has_drawn |= progress.batches > 0 and position["draws_random_numbers"]
        progress.batches += 1
        yield batch
