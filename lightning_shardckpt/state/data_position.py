"""The position of a loader in an epoch, and resuming there: torch's DataLoaders, and loaders with their own state.

With a DistributedSampler, seed and epoch determine the order of all ranks together (`draw_orders_by_epoch` for a
sampler within it). A position in it is a number of samples, from which another number of ranks with the same global
batch can continue: ``GlobalBatches``.

Another sampler draws the order from the random state at the start of the epoch; dropout draws from the state at the
save. A resumed epoch therefore draws its order from the first state, skips the used batches (without loading them, for
map-style datasets), and leaves the process in the state that it had before. The random state of worker processes is not
restored.

The state of a loader with ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader, counts drawn
batches, which may be more than training has used: Lightning draws one batch ahead of a loader without a length, and an
exception may interrupt a batch. So it is recorded before each draw, and a resumed run loads the state before the first
unused batch. Random numbers that the loader drew from the process for unused batches are not drawn again.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, count, islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_shardckpt.compat.data_loading import (
    IndexedLoader,
    is_strided,
    last_order,
    makes_plain_batches,
    order_of_all_ranks,
    own_generator,
    sampler_of,
    wrapped_sampler,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.system.random_generators import get_rng_state, preserve_rng, rng_checksum, set_rng_state

_OTHER_ORDER = (
    "{sampler} drew another order for this epoch than in the interrupted run: the rest of this epoch repeats or omits "
    "samples. Only the states of torch's, numpy's and python's generators, and of the sampler's own `generator`, are "
    "restored. Resume from the end of an epoch, or draw from one of these."
)
_REPEATED = (
    "{left} samples are left of this epoch, and its last step has fewer samples than ranks: {repeated} of {ranks} "
    "data-parallel ranks repeat a sample of another rank, since each needs a batch. Pass drop_last=True to the "
    "DataLoader to leave them out."
)
LoaderPosition = Mapping[str, Any]
"""The position of one loader, as a checkpoint stores it."""


# ── random state of loaders ───────────────────────────────────────────────────────────────────────────────────────────


def _checksum(order: list[Any]) -> int | None:
    """Return a checksum of an order; None if its items are not integers."""
    try:
        return zlib.crc32(array("q", order))
    except TypeError:
        return None


def _warn_of_order(sampler: Any, order: list[Any], expected: int | None) -> None:
    """Warn if an order is not the expected one; None if that is not known."""
    if expected is not None and _checksum(order) != expected:
        kind = type(wrapped_sampler(sampler) or sampler).__name__
        warnings.warn(_OTHER_ORDER.format(sampler=kind), stacklevel=3)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the loader's own generators."""
    sampler = sampler_of(loader)
    generators = [getattr(loader, "generator", None), getattr(sampler, "generator", None), own_generator(sampler)]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def _own_states(loader: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(loader)]


def _set_own_states(loader: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def _random_state(loader: Any) -> dict[str, Any]:
    """Return the random states of this process and of the loader's own generators."""
    return {"process": get_rng_state(), "own": _own_states(loader)}


def _set_random_state(loader: Any, state: LoaderPosition) -> None:
    set_rng_state(state["process"])
    _set_own_states(loader, state["own"])


@contextmanager
def _preserve_random_state(loader: Any) -> Iterator[None]:
    state = _random_state(loader)
    try:
        yield
    finally:
        _set_random_state(loader, state)


def _sampling(loader: Any) -> dict[str, Any]:
    """Return the part of a position that every loader has: the states of its own generators, and its sampler's seed."""
    return {"own": _own_states(loader), "seed": getattr(sampler_of(loader), "seed", None)}


def _set_seed(loader: Any, seed: int | None) -> None:
    """Set the ``seed`` of the loader's sampler, if it has one, to the interrupted run's."""
    sampler = sampler_of(loader)
    if seed is not None and hasattr(sampler, "seed"):
        sampler.seed = seed


# ── batches of all ranks ──────────────────────────────────────────────────────────────────────────────────────────────
# An epoch's order of samples, divided among data-parallel ranks. Each step takes the next samples of the order of all
# ranks together, whatever the number of ranks.


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
        start = 0
        for size in chain(repeat(self.ranks * self.batch_size, full), rest):
            batch = order[start : start + size]
            yield list(batch[rank :: self.ranks]) or [batch[rank % len(batch)]]
            start += size

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


# ── torch's DataLoaders ───────────────────────────────────────────────────────────────────────────────────────────────

_END = object()


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where an iteration begins.

    Attributes:
        batches: the number of earlier batches of its epoch.
        samples: the number of samples that all ranks have used in them, of an order of all ranks.
        checksum: of the order of all ranks; None if it is not known.
        start: the random state when the order of this rank was drawn; None if it was not drawn yet.
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
            return self._iterate_over_stream() if self.is_stream else super().__iter__()

    @property
    def is_stream(self) -> bool:
        """True if the dataset has no indices."""
        return isinstance(self.dataset, IterableDataset)

    def _begin(self, *, keeps_order: bool) -> Beginning:
        """Return where this iteration begins, and restore the random state from which it draws its order."""
        begins, self._upcoming = self._upcoming or Beginning(), None
        if not keeps_order:
            if begins.start is not None:
                _set_random_state(self, begins.start)
            self._current = Beginning(start=_random_state(self))
        return begins

    def _iterate_over_stream(self) -> Iterator[Any]:
        begins, self._draws_random_numbers = self._begin(keeps_order=False), False
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
        return sampler if self.is_stream else _ResumableIndices(self, sampler)

    def draw_indices(self, sampler: Any) -> Iterator[Any]:
        """Yield the indices of a new epoch, or the rest of an interrupted one, which leaves random states unchanged."""
        if (division := self.global_batches()) is not None:
            yield from self._divide(division, self._begin(keeps_order=True))
            return
        resumes = self._upcoming is not None and self._upcoming.start is not None
        with _preserve_random_state(self) if resumes else nullcontext():
            begins, indices = self._begin(keeps_order=False), iter(sampler)
            first = next(islice(indices, begins.batches, None), _END)
        if first is not _END:
            yield first
            yield from indices

    # --- an order of all ranks together ---

    def global_batches(self) -> GlobalBatches | None:
        """Return the division of the order of all ranks into steps; None if the order is unknown."""
        sampler, batches = sampler_of(self), self.batch_sampler
        if not (is_strided(sampler) and makes_plain_batches(batches)) or self.is_stream:
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

    def _divide(self, division: GlobalBatches, begins: Beginning) -> Iterator[Any]:
        """Yield this rank's indices of a new or a resumed epoch, without repeating samples."""
        sampler = sampler_of(self)
        order = order_of_all_ranks(sampler)
        self._current = replace(begins, checksum=_checksum(order))
        left = order[begins.samples :]
        if sampler.rank == 0:
            _warn_of_order(sampler, order, begins.checksum)
            if begins.batches and (repeated := division.repeats(len(left))):
                warnings.warn(_REPEATED.format(left=len(left), repeated=repeated, ranks=division.ranks), stacklevel=2)
        batches = division.deal(left, sampler.rank)
        yield from batches if self.batch_sampler is not None else (index for (index,) in batches)

    # --- the position ---

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: Lightning looks for this method to learn whether a loader can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see ``resume``."""

    def position(self, batches: int) -> dict[str, Any]:
        """Return the state to resume from, after ``batches`` that it has yielded for training since it last began."""
        begun, division = self._upcoming or self._current, self.global_batches()
        position = {**_sampling(self), "batches": batches, "samples": self.samples, "batch_size": self.samples_of_batch}
        if self.is_stream:
            position["draws_random_numbers"] = self._draws_random_numbers
        if division is None or self.samples is None:
            return position | {"epoch_start": begun.start}
        used = begun.samples + division.used(self.samples - begun.samples, batches - begun.batches)
        return position | {"order": {"used": used, "checksum": begun.checksum}}

    def resume(self, position: LoaderPosition | None, *, is_over: bool, same_ranks: bool) -> None:
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
        _set_seed(self, position["seed"])
        _set_own_states(self, position["own"] if same_ranks else [])
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


# ── loaders with their own state ──────────────────────────────────────────────────────────────────────────────────────

_KEPT = 3  # Lightning draws one batch ahead, and one is in use


@dataclass(slots=True)
class Watch:
    """The progress of a loader.

    Attributes:
        kind: the loader's own class.
        count: returns the number of the epoch, and of its drawn batches.
        begun: random states when the current iteration began; None before the first one.
        draws: the last draws: the number of the epoch and of its batch, and the position before it.
        upcoming: the position at which the next iteration begins; None to begin anew.
        waits: whether iterations are empty, until the position to resume from is known.
    """

    kind: Any
    count: Callable[[], tuple[int, int]]
    begun: dict[str, Any] | None = None
    draws: deque[tuple[tuple[int, int], dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    upcoming: LoaderPosition | None = None
    waits: bool = False


class StatefulLoader:
    """A loader whose ``__iter__`` is replaced by ``watch_state``.

    It is a base after the loader's own class, since Python refuses the assignment to ``__class__`` otherwise.
    """

    __slots__ = ()
    shardckpt_watch: Watch


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


def watch_state(loader: Any, count: Callable[[], tuple[int, int]]) -> bool:
    """Make a loader with its own state resumable, in place; return False if its class can't be changed.

    Args:
        loader: of training.
        count: returns the number of the current epoch, and of its drawn batches.
    """
    if isinstance(loader, StatefulLoader):
        type(loader).shardckpt_watch = Watch(loader.shardckpt_watch.kind, count)
        return True
    kind = type(loader)
    added = {"__module__": kind.__module__, "__iter__": _iterate, "shardckpt_watch": Watch(kind, count)}
    try:
        loader.__class__ = type(kind.__name__, (kind, StatefulLoader), added)
    except TypeError:  # a class with __slots__, or an extension type
        return False
    return True


def state_position(loader: StatefulLoader, used: int | None) -> LoaderPosition | None:
    """Return the position of a watched loader after ``used`` batches of the epoch, None if it is over; None if unknown.
    """
    watch = loader.shardckpt_watch
    if watch.upcoming is not None:
        return watch.upcoming
    first = None if used is None else (watch.count()[0], used)
    unused = [] if first is None else [(number, position) for number, position in watch.draws if number >= first]
    if watch.waits or (unused and unused[0][0] != first):
        return None
    order = {"order": _checksum(last_order(sampler_of(loader)) or [])}
    if not unused:
        return _current_position(loader) | order
    draws_random = any(position.get("draws_random_numbers", False) for _, position in unused)
    return unused[0][1] | order | {"draws_random_numbers": draws_random}


def resume_state(loader: StatefulLoader, position: LoaderPosition | None, *, is_over: bool) -> None:
    """Begin the next iteration of a watched loader at ``position``, or anew; as `ResumableLoader.resume`."""
    watch = loader.shardckpt_watch
    watch.waits, watch.upcoming = False, None if is_over else position
    if is_over and position is not None:
        with preserve_rng():
            _continue(loader, position)  # the iteration that is over
        _set_own_states(loader, position["own"])


def _iterate(loader: StatefulLoader) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    if watch.waits:
        return iter(())
    position, watch.upcoming = watch.upcoming, None
    if position is None:
        watch.begun = _random_state(loader)
        return _draw_all(loader, watch.kind.__iter__(loader))
    with preserve_rng(every_device=True):
        iterator = _continue(loader, position)
    _set_own_states(loader, position["own"])
    return _draw_all(loader, iterator, position["order"])


def _continue(loader: StatefulLoader, position: LoaderPosition) -> Iterator[Any]:
    watch = loader.shardckpt_watch
    _set_seed(loader, position["seed"])
    watch.begun = position["epoch_start"] or _random_state(loader)
    _set_random_state(loader, watch.begun)
    watch.kind.load_state_dict(loader, position["state"])
    iterator: Iterator[Any] = watch.kind.__iter__(loader)
    return iterator


def _draw_all(loader: StatefulLoader, iterator: Iterator[Any], order: int | None = None) -> Iterator[Any]:
    """Yield all batches, and compare the order of the interrupted iteration, by its checksum.

    A draw that raises is kept, since the loader's state is unusable after it.
    """
    watch = loader.shardckpt_watch
    while True:
        position, before = _current_position(loader), rng_checksum()
        watch.draws.append((watch.count(), position))
        try:
            batch = next(iterator)
        except StopIteration:
            watch.draws.pop()
            return
        position["draws_random_numbers"] = before != rng_checksum()
        sampler, expected, order = sampler_of(loader), order, None
        _warn_of_order(sampler, last_order(sampler) or [], expected)
        yield batch


def _current_position(loader: StatefulLoader) -> dict[str, Any]:
    watch = loader.shardckpt_watch
    return {"epoch_start": watch.begun, **_sampling(loader), "state": deepcopy(watch.kind.state_dict(loader))}
