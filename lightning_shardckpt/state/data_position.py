"""The position of a DataLoader in an epoch, and resuming there.

With a DistributedSampler, seed and epoch determine the order of all ranks together (`draw_orders_by_epoch` for a
sampler within it). A position in it is a number of samples, from which another number of ranks with the same global
batch can continue: ``GlobalBatches``.

Another sampler draws the order from the random state at the start of the epoch; dropout draws from the state at the
save. A resumed epoch therefore draws its order from the first state, skips the used batches (without loading them, for
map-style datasets), and leaves the process in the state that it had before. The random state of worker processes is not
restored.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_shardckpt.compat.data_loading import (
    IndexedLoader,
    is_strided,
    makes_plain_batches,
    order_of_all_ranks,
    own_generator,
    sampler_of,
    wrapped_sampler,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.system.random_generators import get_rng_state, rng_checksum, set_rng_state

# ── random state of loaders ───────────────────────────────────────────────────────────────────────────────────────────


OTHER_ORDER = (
    "{sampler} drew another order for this epoch than in the interrupted run: the rest of this epoch repeats or omits "
    "samples. Only the states of torch's, numpy's and python's generators, and of the sampler's own `generator`, are "
    "restored. Resume from the end of an epoch, or draw from one of these."
)


def checksum_of(order: list[Any]) -> int | None:
    """Return a checksum of an order; None if its items are not integers."""
    try:
        return zlib.crc32(array("q", order))
    except TypeError:
        return None


def random_state(loader: Any) -> dict[str, Any]:
    """Return the random states of this process and of the loader's own generators."""
    return {"process": get_rng_state(), "own": own_states(loader)}


def set_random_state(loader: Any, state: dict[str, Any]) -> None:
    """Restore the result of ``random_state``."""
    set_rng_state(state["process"])
    set_own_states(loader, state["own"])


@contextmanager
def _preserve_random_state(loader: Any) -> Iterator[None]:
    state = random_state(loader)
    try:
        yield
    finally:
        set_random_state(loader, state)


def own_states(loader: Any) -> list[torch.Tensor]:
    """Return the states of the loader's own generators."""
    return [generator.get_state() for generator in _generators(loader)]


def set_own_states(loader: Any, states: list[torch.Tensor]) -> None:
    """Restore the states of the loader's own generators."""
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def seed_of(loader: Any) -> int | None:
    """Return the ``seed`` of the loader's sampler; None if it has none."""
    return getattr(sampler_of(loader), "seed", None)


def set_seed(loader: Any, seed: int | None) -> None:
    """Set the ``seed`` of the loader's sampler to the interrupted run's."""
    sampler = sampler_of(loader)
    if seed is not None and hasattr(sampler, "seed"):
        sampler.seed = seed


def _generators(loader: Any) -> list[torch.Generator]:
    sampler = sampler_of(loader)
    generators = [getattr(loader, "generator", None), getattr(sampler, "generator", None), own_generator(sampler)]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


# ── batches of all ranks ──────────────────────────────────────────────────────────────────────────────────────────────
# An epoch's order of samples, dealt to data-parallel ranks. Pure: nothing here knows DataLoaders.
#
# Each step takes the next samples of the order of all ranks together, whatever the number of ranks. So a number of
# samples is a position in the epoch, and another number of ranks with the same global batch can continue there.


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """The division of an order into steps, the same number on every rank.

    A step takes ``ranks * batch_size`` samples. The rest makes a shorter last step, in which some ranks have one sample
    less than others. If the rest has fewer samples than there are ranks, the last two steps share their samples.

    Args:
        ranks: the number of data-parallel ranks.
        batch_size: samples of each rank in a step.
        drop_last: leave out a shorter last step.
        drop_uneven: leave out at most ``ranks - 1`` samples, so that all ranks have equally many in each step.
    """

    ranks: int
    batch_size: int
    drop_last: bool = False
    drop_uneven: bool = False

    def steps(self, samples: int) -> int:
        """Return the number of steps in ``samples``."""
        full, rest = self._split(samples)
        return full + len(rest)

    def used(self, samples: int, steps: int) -> int:
        """Return how many of ``samples`` the first ``steps`` use."""
        full, rest = self._split(samples)
        return min(steps, full) * self.ranks * self.batch_size + sum(rest[: max(0, steps - full)])

    def repeats(self, samples: int) -> int:
        """Return how many ranks repeat another rank's sample in the last step, for want of samples."""
        _, rest = self._split(samples)
        return max(0, self.ranks - rest[-1]) if rest else 0

    def deal(self, order: Sequence[Any], rank: int) -> Iterator[list[Any]]:
        """Yield one rank's batches of ``order``."""
        full, rest = self._split(len(order))
        start, size = 0, self.ranks * self.batch_size
        for step in range(full + len(rest)):
            stop = start + (size if step < full else rest[step - full])
            batch = order[start:stop]
            yield list(batch[rank :: self.ranks]) or [batch[rank % len(batch)]]
            start = stop

    def _split(self, samples: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of full steps, and the sizes of the shorter steps after them."""
        if self.drop_uneven:
            samples -= samples % self.ranks
        full, rest = divmod(samples, self.ranks * self.batch_size)
        if not rest or self.drop_last:
            return full, ()
        if rest >= self.ranks or not full or self.batch_size == 1:
            return full, (rest,)
        half = self.batch_size // 2
        return full - 1, (self.ranks * (self.batch_size - half), self.ranks * half + rest)


_END = object()
_REPEATED = (
    "{left} samples are left of this epoch, and its last step has fewer samples than ranks: {repeated} of {ranks} "
    "data-parallel ranks repeat a sample of another rank, since each needs a batch. Pass drop_last=True to the "
    "DataLoader to leave them out."
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where an iteration begins.

    Attributes:
        batches: the number of earlier batches of its epoch.
        samples: the number of samples that all ranks have used in them, of an order of all ranks.
        checksum: of the order of all ranks; None if it is not known.
        start: the result of ``random_state`` when the order of this rank was drawn; None if it was not drawn yet.
    """

    batches: int = 0
    samples: int = 0
    checksum: int | None = None
    start: dict[str, Any] | None = None


class ResumableLoader(IndexedLoader):
    """The class that ``make_resumable`` puts before a DataLoader's own.

    Attributes:
        waits: whether iterations are empty, until the position to resume from is known.
    """

    waits = False
    _current = Beginning()
    _upcoming: Beginning | None = None  # of the next iteration; it leaves random states as they are
    _draws_random_numbers = False

    def __iter__(self) -> Any:
        if self.waits:
            return iter(())
        self._current = Beginning()
        with nullcontext() if self._upcoming is None else _preserve_random_state(self):
            return self._iterate_over_stream() if isinstance(self.dataset, IterableDataset) else super().__iter__()

    def _iterate_over_stream(self) -> Iterator[Any]:
        begins, self._upcoming = self._upcoming or Beginning(), None
        if begins.start is not None:
            set_random_state(self, begins.start)
        self._current, self._draws_random_numbers = Beginning(start=random_state(self)), False
        iterator: Iterator[Any] = super().__iter__()
        if not self.num_workers:
            iterator = self._note_draws(iterator)
        for _ in islice(iterator, begins.batches):
            pass
        return iterator

    def _note_draws(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a stream, and note if it draws from the process's generators after its first batch."""
        for number in count():
            watches = number > 0 and not self._draws_random_numbers
            before = rng_checksum() if watches else 0  # takes 0.1 ms
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._draws_random_numbers |= watches and before != rng_checksum()
            yield batch

    def index_source(self, sampler: Any) -> Any:
        """Return a source that resumes, for a map-style dataset; else the sampler."""
        return sampler if isinstance(self.dataset, IterableDataset) else _ResumableIndices(self, sampler)

    def draw_indices(self, sampler: Any) -> Iterator[Any]:
        """Yield the indices of a new epoch, or the rest of an interrupted one, which leaves random states unchanged."""
        begins, self._upcoming = self._upcoming or Beginning(), None
        if (division := self.global_batches()) is not None:
            yield from self._deal(division, begins)
            return
        with nullcontext() if begins.start is None else _preserve_random_state(self):
            if begins.start is not None:
                set_random_state(self, begins.start)
            self._current, indices = Beginning(start=random_state(self)), iter(sampler)
            first = next(islice(indices, begins.batches, None), _END)
        if first is not _END:
            yield first
            yield from indices

    # --- an order of all ranks together ---

    def global_batches(self) -> GlobalBatches | None:
        """Return the division of the order of all ranks into steps; None if the order is unknown."""
        sampler, batches = sampler_of(self), self.batch_sampler
        if not (is_strided(sampler) and makes_plain_batches(batches)) or isinstance(self.dataset, IterableDataset):
            return None
        size, drop_last = (1, False) if batches is None else (batches.batch_size, batches.drop_last)  # type: ignore[attr-defined]
        return GlobalBatches(sampler.num_replicas, size, drop_last, sampler.drop_last)

    @property
    def samples_of_batch(self) -> int | None:
        """The number of samples of this rank in a batch; None if unknown."""
        division = self.global_batches()
        return self.batch_size if division is None else division.batch_size

    @property
    def samples(self) -> int | None:
        """The number of samples of an epoch of all ranks; None if unknown."""
        sampler = sampler_of(self)
        try:
            return len(sampler.dataset if is_strided(sampler) else self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def _deal(self, division: GlobalBatches, begins: Beginning) -> Iterator[Any]:
        """Yield this rank's indices of a new or a resumed epoch, without repeating samples."""
        sampler = sampler_of(self)
        order = order_of_all_ranks(sampler)
        self._current = replace(begins, checksum=checksum_of(order))
        left, is_first = order[begins.samples :], sampler.rank == 0
        if begins.checksum not in (None, self._current.checksum) and is_first:
            kind = type(wrapped_sampler(sampler) or sampler).__name__
            warnings.warn(OTHER_ORDER.format(sampler=kind), stacklevel=2)
        if begins.batches and (repeated := division.repeats(len(left))) and is_first:
            warnings.warn(_REPEATED.format(left=len(left), repeated=repeated, ranks=division.ranks), stacklevel=2)
        batches_of_rank = division.deal(left, sampler.rank)
        yield from batches_of_rank if self.batch_sampler is not None else (index for (index,) in batches_of_rank)

    # --- the position ---

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: Lightning looks for this method to learn whether a loader can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see ``resume``."""

    def position(self, batches: int) -> dict[str, Any]:
        """Return the state to resume from.

        Args:
            batches: that this loader has yielded for training since it last began.
        """
        begun, division = self._upcoming or self._current, self.global_batches()
        position = {"own": own_states(self), "seed": seed_of(self), "batches": batches}
        position |= {"samples": self.samples, "batch_size": self.samples_of_batch}
        if isinstance(self.dataset, IterableDataset):
            position["draws_random_numbers"] = self._draws_random_numbers
        if division is None or self.samples is None:
            return position | {"epoch_start": begun.start}
        used = begun.samples + division.used(self.samples - begun.samples, batches - begun.batches)
        return position | {"order": {"used": used, "checksum": begun.checksum}}

    def resume(self, position: Mapping[str, Any] | None, *, is_over: bool, same_ranks: bool) -> None:
        """Begin the next iteration after the used batches, or anew without a position.

        Args:
            position: of the interrupted run.
            is_over: whether the position is the end of an epoch, so that the next iteration is that of the next epoch.
            same_ranks: whether this rank has the data of the rank that saved; else no random state fits.
        """
        self.waits, self._upcoming = False, None
        if is_over and self.persistent_workers:
            with _preserve_random_state(self):
                iter(self)  # the workers have begun, and drawn their seeds, in an earlier epoch
        if position is None:
            return
        set_seed(self, position["seed"])
        set_own_states(self, position["own"] if same_ranks else [])
        order, start = position.get("order", {}), position.get("epoch_start") if same_ranks else None
        if not is_over and (order or start is not None or position["batches"]):
            checksum = order.get("checksum") if position["samples"] == self.samples else None
            self._upcoming = Beginning(position["batches"], order.get("used", 0), checksum, start)


class _ResumableIndices:
    """The indices of each epoch, from the loader. Iterators of persistent workers keep it over epochs."""

    def __init__(self, loader: ResumableLoader, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader.draw_indices(self._sampler)  # runs when the first index is asked for

    def __len__(self) -> int:
        division, samples = self._loader.global_batches(), self._loader.samples
        return len(self._sampler) if division is None or samples is None else division.steps(samples)


@lru_cache(maxsize=64)
def _resumable_class(kind: Any) -> Any:
    return type(kind.__name__, (ResumableLoader, kind), {"__module__": kind.__module__})


def make_resumable(loader: object) -> bool:
    """Make a DataLoader resumable in place; return False for a loader with its own state, or another iterable."""
    if isinstance(loader, DataLoader) and not isinstance(loader, ResumableLoader) and not hasattr(loader, "state_dict"):
        kind: Any = type(loader)
        loader.__class__ = _resumable_class(kind)
    return isinstance(loader, ResumableLoader)


def refuse_batches_of_batches(loader: object) -> None:
    """Refuse a DataLoader that batches the batches of its sampler since Lightning rebuilt it.

    Lightning calls the constructor again, with a DistributedSampler around the sampler. A class that disables torch's
    batching for its own sampler of batches (``batch_size=None``) may enable it for a sampler that it gets.

    Raises:
        UnsupportedCodeError: naming the class.
    """
    if not isinstance(loader, DataLoader) or type(loader).__init__ is DataLoader.__init__:
        return
    if loader.batch_sampler is not None and isinstance(wrapped_sampler(loader.sampler), BatchSampler):
        raise UnsupportedCodeError(
            f"{type(loader).__name__} puts the batches of its sampler into batches of {loader.batch_size}, since "
            "Lightning rebuilt it with a DistributedSampler around that sampler. Give the loader a DistributedSampler "
            "of its own, or pass Trainer(use_distributed_sampler=False), with which every rank trains on the same "
            "batches."
        )
