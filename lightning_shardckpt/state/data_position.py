"""The position of a DataLoader in an epoch, and resuming there.

A sampler draws the order of an epoch from the random state at the start of the epoch; dropout draws from the state at
the save. A resumed epoch therefore draws its order from the first state, skips the used batches (without loading them,
for map-style datasets), and continues with the second state. Random numbers drawn between the load and the first batch
have no effect. The random state of worker processes is not restored.

With a DistributedSampler, the order of all ranks together is known, and a position in it is a number of samples, from
which another number of ranks or another batch size can continue: ``GlobalBatches``.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_shardckpt.compat.data_loading import (
    IndexedLoader,
    IndexSource,
    is_strided,
    makes_plain_batches,
    order_of_all_ranks,
    own_generator,
    sampler_of,
    seed_by_epoch,
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
# Each step takes the next samples of the order of all ranks together, whatever the number of ranks and the batch size.
# So a number of samples is a position in the epoch, and another number of ranks can continue there.


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """A position in an epoch: the number of used samples of all ranks, and of used batches of each rank."""

    samples: int = 0
    batches: int = 0


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


class SavedState:
    """The process's random state at a save, for the loaders that continue from there.

    The loader that continues first restores it. Those after it keep what has been drawn since, such as the random
    augmentation of the first loader's batch.

    Args:
        process: the result of ``get_rng_state`` at the save.
    """

    def __init__(self, process: dict[str, Any]) -> None:
        self._process: dict[str, Any] | None = process

    def restore(self, current: dict[str, Any]) -> None:
        """Restore the state at the save, or ``current`` if it was restored before."""
        set_rng_state(self._process or current)
        self._process = None


class Resumption:
    """The start of a loader's next epoch: draw the order from ``start``, skip used batches, continue from ``then``.

    Args:
        start: the result of ``random_state`` when the interrupted epoch began; None to begin a new epoch from ``then``.
        batches: the number of batches to skip.
        then: the result of ``random_state`` at the save.
        saved: the process's state at the save, the same object for all loaders.
        leader: the resumption of the first loader of several that begin a new epoch together, and draw in turn.
        epoch_position: skip its number of samples of all ranks, rather than batches of this rank.
        checksum: of the order of all ranks, for comparison.
    """

    def __init__(
        self,
        start: dict[str, Any] | None,
        batches: int,
        then: dict[str, Any],
        saved: SavedState,
        leader: Resumption | None = None,
        epoch_position: EpochPosition | None = None,
        checksum: int | None = None,
    ) -> None:
        self.start, self.batches, self.then, self.saved = start, batches, then, saved
        self.leader = leader or self
        self.epoch_position, self.checksum = epoch_position, checksum
        self.iterated: dict[str, Any] | None = None  # the process's state after all loaders of a new epoch have begun


class ResumableLoader(IndexedLoader):
    """The class that ``make_resumable`` puts before a DataLoader's own."""

    _epoch_start: dict[str, Any] | None = None
    _resumption: Resumption | None = None
    _is_next_empty = False
    _draws_random_numbers = False
    _deals = False
    _begun = EpochPosition()
    _checksum: int | None = None

    def __iter__(self) -> Any:
        self._epoch_start, self._begun, self._checksum = None, EpochPosition(), None
        if self._is_next_empty:
            self._is_next_empty = False
            return iter(())
        resumption, iterable = self._resumption, isinstance(self.dataset, IterableDataset)
        current = get_rng_state()
        if resumption is not None:
            self._begin(resumption, resumption.then["process"])
        if iterable:
            self._epoch_start, self._draws_random_numbers = random_state(self), False
        iterator: Iterator[Any] = super().__iter__()
        if iterable and not self.num_workers:
            iterator = self._note_draws(iterator)
        if resumption is not None and resumption.start is None:
            resumption.leader.iterated = get_rng_state()
        elif resumption is not None and iterable:
            for _ in islice(iterator, resumption.batches):
                pass
            self._continue(resumption, current)
        elif self._resumption is not None:  # begin comes later: until then, loaders before this one may draw
            set_rng_state(current)
        if iterable:
            self._resumption = None
        return iterator

    def index_source(self, sampler: Any) -> IndexSource:
        """Return a source that resumes, for a map-style dataset; else the sampler."""
        if isinstance(self.dataset, IterableDataset):
            return super().index_source(sampler)
        return _ResumableIndices(self, sampler)

    def begin(self, sampler: Any) -> Iterator[Any]:
        """Yield the indices of a new epoch, or the rest of an interrupted one."""
        resumption, self._resumption = self._resumption, None
        current = get_rng_state()
        if resumption is not None:
            self._begin(resumption, resumption.iterated)  # undoes draws since then
        self._epoch_start = random_state(self)
        if (division := self.global_batches()) is not None:
            is_new = resumption is None or resumption.start is None
            yield from self._deal(division, None if is_new else resumption, current)
            return
        indices = iter(sampler)
        if resumption is None or resumption.start is None:
            yield from indices
            return
        first = next(islice(indices, resumption.batches, None), _END)
        self._continue(resumption, current)
        if first is not _END:
            yield first
            yield from indices

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

    # --- an order of all ranks together ---

    def deal_global_order(self) -> None:
        """Deal the order of all ranks, if it is known, without repeating samples. For loaders of training."""
        self._deals = True

    def global_batches(self) -> GlobalBatches | None:
        """Return the division of the order of all ranks into steps; None if the order is unknown or not dealt."""
        sampler = sampler_of(self)
        is_known = self._deals and is_strided(sampler) and makes_plain_batches(self.batch_sampler)
        if not is_known or isinstance(self.dataset, IterableDataset):
            return None
        batches: Any = self.batch_sampler
        size, drop_last = (1, False) if batches is None else (batches.batch_size, batches.drop_last)
        return GlobalBatches(sampler.num_replicas, size, drop_last, sampler.drop_last)

    @property
    def samples(self) -> int | None:
        """The number of samples of an epoch of all ranks; None if unknown."""
        sampler = sampler_of(self)
        try:
            return len(sampler.dataset if is_strided(sampler) else self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def _deal(
        self, division: GlobalBatches, resumption: Resumption | None, current: dict[str, Any]
    ) -> Iterator[Any]:
        """Yield this rank's indices of a new or a resumed epoch; ``current`` is the process's state before it."""
        sampler = sampler_of(self)
        order = _draw_order_of_all_ranks(sampler)
        self._checksum, self._begun = checksum_of(order), EpochPosition()
        if resumption is not None:
            batches = resumption.batches
            self._begun = resumption.epoch_position or EpochPosition(division.used(len(order), batches), batches)
            if resumption.checksum not in (None, self._checksum) and sampler.rank == 0:
                kind = type(wrapped_sampler(sampler) or sampler).__name__
                warnings.warn(OTHER_ORDER.format(sampler=kind), stacklevel=2)
            self._continue(resumption, current)
        left = order[self._begun.samples :]
        if resumption is not None and (repeated := division.repeats(len(left))) and sampler.rank == 0:
            warnings.warn(_REPEATED.format(left=len(left), repeated=repeated, ranks=division.ranks), stacklevel=2)
        batches_of_rank = division.deal(left, sampler.rank)
        yield from batches_of_rank if self.batch_sampler is not None else (index for (index,) in batches_of_rank)

    def epoch_position_after(self, position: Mapping[str, Any], batches: int) -> EpochPosition | None:
        """Return the position after ``batches`` of the run that saved ``position``, for this loader; None if unknown.

        Its number of batches leaves as many steps in the epoch as the remaining samples take with this loader.
        """
        saved, division = position.get("order"), self.global_batches()
        if saved is None or division is None or saved["samples"] != self.samples:
            return None
        samples, begun = saved["samples"], EpochPosition(*saved["place"])
        used = GlobalBatches(*saved["division"]).used(samples - begun.samples, batches - begun.batches)
        left = samples - begun.samples - used
        return EpochPosition(samples - left, division.steps(samples) - division.steps(left))

    # --- random states ---

    def _begin(self, resumption: Resumption, process: dict[str, Any] | None) -> None:
        """Set the random states at the start of the epoch; ``process`` is the process's state if the epoch is new."""
        if resumption.start is not None:
            set_random_state(self, resumption.start)
            return
        if process is not None and resumption.leader is resumption:
            set_rng_state(process)
        if process is resumption.then["process"]:
            set_own_states(self, resumption.then["own"])

    def _continue(self, resumption: Resumption, current: dict[str, Any]) -> None:
        """Set the random states after the used batches were skipped; ``current`` is the process's state before that."""
        resumption.saved.restore(current)
        set_own_states(self, resumption.then["own"])

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: Lightning looks for this method to learn whether a loader can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see ``resume``."""

    def resume(self, resumption: Resumption) -> None:
        """Begin the next epoch as ``resumption`` says."""
        self._resumption = resumption

    def make_next_empty(self) -> None:
        """Make the next iteration empty, since Lightning begins it before the position to resume from is known.

        Lightning would draw a batch of a loader without a length, and lose it. Persistent workers do start then, as
        they did before the epoch in the uninterrupted run: starting them draws a random number.
        """
        self._is_next_empty = not self.persistent_workers

    def position(self) -> dict[str, Any]:
        """Return the state to resume from: random states at the start of this epoch (None before), the seed, sizes."""
        position: dict[str, Any] = {"epoch_start": self._epoch_start, "own": own_states(self), "seed": seed_of(self)}
        position |= {"samples": self.samples, "batch_size": self.batch_size}
        if isinstance(self.dataset, IterableDataset):
            position["draws_random_numbers"] = self._draws_random_numbers
        if (division := self.global_batches()) is not None:
            resumption = self._resumption
            begun, checksum = self._begun, self._checksum
            if resumption is not None and resumption.epoch_position is not None:  # saved before its first batch
                begun, checksum = resumption.epoch_position, resumption.checksum
            position["order"] = {
                "samples": self.samples,
                "place": list(astuple(begun)),
                "division": list(astuple(division)),
                "checksum": checksum,
            }
        return position


class _ResumableIndices:
    """The indices of each epoch, from the loader's ``begin``. Iterators of persistent workers keep it over epochs."""

    def __init__(self, loader: ResumableLoader, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader.begin(self._sampler)  # runs when the first index is asked for

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


def batches_done(loops: dict[str, Any]) -> int | None:
    """Return the number of finished batches of the epoch from Lightning's loop state; None if the epoch is over.

    A save in ``on_train_batch_end`` happens before Lightning counts the batch as completed. A last batch that an
    exception interrupted is not finished.
    """
    progress, epoch = loops["fit_loop"]["epoch_loop.batch_progress"], loops["fit_loop"]["epoch_progress"]["current"]
    current = progress["current"]
    is_last = progress["is_last_batch"] and current["processed"] >= current["ready"]
    if is_last or epoch["processed"] >= epoch["started"]:
        return None
    in_batch_end = current["processed"] == current["started"] == current["ready"] == current["completed"] + 1
    return int(current["completed"] + in_batch_end)


def _draw_order_of_all_ranks(sampler: Any) -> list[Any]:
    """Return the order of all ranks, equal on all: a wrapped sampler draws from a seed made of seed and epoch.

    The process's generators would give ranks that have drawn differently different orders.
    """
    if wrapped_sampler(sampler) is None:
        return order_of_all_ranks(sampler)
    generator = own_generator(sampler)
    own = None if generator is None else generator.get_state()
    try:
        with seed_by_epoch(sampler):
            if generator is not None:
                generator.manual_seed(zlib.crc32(f"{generator.initial_seed()} {sampler.epoch}".encode()))
            return order_of_all_ranks(sampler)
    finally:
        if generator is not None and own is not None:
            generator.set_state(own)


def batches_of_loader(loader: object, batches: int, *, cycles: bool, length: int | None = None) -> int:
    """Return how many of an epoch's ``batches`` this loader yielded since it last began.

    Args:
        loader: any iterable.
        batches: of the epoch, for all loaders together.
        cycles: whether the loader begins again at its end.
        length: the number of batches until its end; by default ``len(loader)``, if it has one.
    """
    try:
        length = len(loader) if length is None else length  # type: ignore[arg-type]  # if it has one
    except TypeError:
        return batches
    if not cycles or batches <= length:
        return min(batches, length)
    return (batches - 1) % length + 1
