"""Continue an epoch of a DataLoader with the batches that it would have drawn.

The order of an epoch is drawn from the random state when its sampler begins, dropout and the like from the state at
the save. A resumed epoch therefore draws its order from the first, skips the batches that were used (without loading
them, for datasets with indices), and continues with the second. What else drew random numbers between loading and the
first batch has no effect. What worker processes drew for themselves is not restored.

Where the order of all ranks together is known (a DistributedSampler), a position in it is a number of samples. Another
number of ranks, or another batch size, goes on from there: ``GlobalBatches``.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import islice
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
    wrapped_sampler,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.system.random_generators import get_rng_state, seed_temporarily, set_rng_state

# ── random state of loaders ───────────────────────────────────────────────────────────────────────────────────────────
# What the order of a loader is drawn from: random states of the process and of its own generators, and seeds.


OTHER_ORDER = (
    "{sampler} drew another order for this epoch than in the run that was interrupted: in the rest of this epoch "
    "samples come twice or not at all. Only what it draws from torch's, numpy's and python's generators, or from its "
    "own `generator`, is known here. Resume from the end of an epoch, or draw from one of these."
)


def checksum_of(order: list[Any]) -> int | None:
    """Return a checksum of an order; None of one that is not made of numbers."""
    try:
        return zlib.crc32(array("q", order))
    except TypeError:
        return None


def sampler_of(loader: Any) -> Any:
    """Return the sampler that draws a loader's order: that of its batch sampler, if it makes batches; or None."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def random_state(loader: Any) -> dict[str, Any]:
    """Return random states of this process and of the loader's own generators."""
    return {"process": get_rng_state(), "own": own_states(loader)}


def set_random_state(loader: Any, state: dict[str, Any]) -> None:
    """Continue from what ``random_state`` gave."""
    set_rng_state(state["process"])
    set_own_states(loader, state["own"])


def own_states(loader: Any) -> list[torch.Tensor]:
    """Return the states of the loader's own generators."""
    return [generator.get_state() for generator in _generators(loader)]


def set_own_states(loader: Any, states: list[torch.Tensor]) -> None:
    """Continue the loader's own generators."""
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def seed_of(loader: Any) -> int | None:
    """Return the seed of a DistributedSampler, or of another sampler that has one."""
    return getattr(sampler_of(loader), "seed", None)


def set_seed(loader: Any, seed: int | None) -> None:
    """Let a DistributedSampler shuffle as in the interrupted run, whatever this one was seeded with."""
    sampler = sampler_of(loader)
    if seed is not None and hasattr(sampler, "seed"):
        sampler.seed = seed


def _generators(loader: Any) -> list[torch.Generator]:
    sampler = sampler_of(loader)
    found = [getattr(loader, "generator", None), getattr(sampler, "generator", None), own_generator(sampler)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


# ── batches of all ranks ──────────────────────────────────────────────────────────────────────────────────────────────
# Deal an epoch's order of samples to data-parallel ranks, so that after every step its first samples are used.
#
# The order is that of all ranks together. Each step takes the next samples of it, whatever the number of ranks and the
# batch size are, so a number of samples says where an epoch is, and another number of ranks can go on from there. Pure:
# nothing here knows DataLoaders.


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """A position in an epoch: so many samples of the order are used, and so many batches of each rank count as used."""

    samples: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """The division of an order into steps, the same number on every rank.

    A step takes ``ranks * batch_size`` samples. What is left at the end makes a last step, in which some ranks have one
    sample less than others. If it is less than one sample for each rank, the last two steps share what they have.

    Args:
        ranks: data-parallel ranks.
        batch_size: samples of each rank in a step.
        drop_last: leave out a last step that is not full.
        drop_uneven: leave out at most ``ranks - 1`` samples, so that all ranks have as many as others in each step.
    """

    ranks: int
    batch_size: int
    drop_last: bool = False
    drop_uneven: bool = False

    def steps(self, samples: int) -> int:
        """Return how many steps it takes to use so many samples."""
        full, rest = self._split(samples)
        return full + len(rest)

    def used(self, samples: int, steps: int) -> int:
        """Return how many of ``samples`` are used after ``steps``."""
        full, rest = self._split(samples)
        return min(steps, full) * self.ranks * self.batch_size + sum(rest[: max(0, steps - full)])

    def repeats(self, samples: int) -> int:
        """Return how many samples of the last step some ranks repeat, as there are fewer of them than ranks."""
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
        """Return the number of full steps, and the sizes of those that follow."""
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
    "the {left} samples that are left of this epoch leave so few for its last step that {repeated} of {ranks} "
    "data-parallel ranks repeat one of another rank, as each needs a batch. With drop_last=True in the DataLoader they "
    "are left out."
)


class Resumption:
    """The beginning of a loader's next epoch: draw the order from ``start``, skip, continue from ``then``.

    Without ``start``, it is a new epoch that begins from ``then``; the loaders that begin it together draw one after
    the other, so those after the first one have it as ``leader``. States are what ``random_state`` gave.
    With an ``epoch_position``, so many samples of all ranks are skipped, rather than batches of this one; ``checksum``
    is that of the order that they were drawn from.
    """

    def __init__(
        self,
        start: dict[str, Any] | None,
        batches: int,
        then: dict[str, Any],
        leader: Resumption | None = None,
        epoch_position: EpochPosition | None = None,
        checksum: int | None = None,
    ) -> None:
        self.start, self.batches, self.then = start, batches, then
        self.leader = leader or self
        self.epoch_position, self.checksum = epoch_position, checksum
        self.iterated: dict[str, Any] | None = None  # the process's state when all loaders of a new epoch had begun


class ResumableLoader(IndexedLoader):
    """The addition of ``make_resumable`` to a DataLoader's class."""

    _epoch_start: dict[str, Any] | None = None
    _resumption: Resumption | None = None
    _waits = False
    _trains = False
    _begun = EpochPosition()
    _checksum: int | None = None

    def __iter__(self) -> Any:
        self._epoch_start, self._begun, self._checksum = None, EpochPosition(), None
        if self._waits:
            self._waits = False
            return iter(())
        resumption, iterable = self._resumption, isinstance(self.dataset, IterableDataset)
        if resumption is not None:
            self._begin(resumption, resumption.then["process"])
        if iterable:
            self._epoch_start = random_state(self)
        iterator = super().__iter__()
        if resumption is not None and resumption.start is None:
            resumption.leader.iterated = get_rng_state()
        elif resumption is not None and iterable:
            for _ in islice(iterator, resumption.batches):
                pass
            set_random_state(self, resumption.then)
        if iterable:
            self._resumption = None
        return iterator

    def index_source(self, sampler: Any) -> IndexSource:
        """The sampler, observed where it has an order that can be continued."""
        if isinstance(self.dataset, IterableDataset):
            return super().index_source(sampler)
        return _Watched(self, sampler)

    def begin(self, sampler: Any) -> Iterator[Any]:
        """The indices of an epoch that begins now, or those that an interrupted one has left."""
        resumption, self._resumption = self._resumption, None
        if resumption is not None:
            self._begin(resumption, resumption.iterated)  # whatever was drawn since
        self._epoch_start = random_state(self)
        if (division := self.global_batches()) is not None:
            yield from self._deal(division, None if resumption is None or resumption.start is None else resumption)
            return
        indices = iter(sampler)
        if resumption is None or resumption.start is None:
            yield from indices
            return
        following = next(islice(indices, resumption.batches, None), _END)
        set_random_state(self, resumption.then)
        if following is not _END:
            yield following
            yield from indices

    # --- an order of all ranks together ---

    def train(self) -> None:
        """Deal the order of all ranks, where it is known, so that no sample comes twice; it is a loader of training."""
        self._trains = True

    def global_batches(self) -> GlobalBatches | None:
        """Return how the order of all ranks is divided into steps; None where this loader has none that is known."""
        sampler = sampler_of(self)
        known = self._trains and is_strided(sampler) and makes_plain_batches(self.batch_sampler)
        if not known or isinstance(self.dataset, IterableDataset):
            return None
        batches: Any = self.batch_sampler
        size, drop_last = (1, False) if batches is None else (batches.batch_size, batches.drop_last)
        return GlobalBatches(sampler.num_replicas, size, drop_last, sampler.drop_last)

    @property
    def samples(self) -> int | None:
        """The number of samples of an epoch of all ranks; None if unknown."""
        known = is_strided(sampler_of(self))
        try:
            return len(sampler_of(self).dataset if known else self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    def _deal(self, division: GlobalBatches, resumption: Resumption | None) -> Iterator[Any]:
        """This rank's indices of an epoch that begins, or of one that goes on."""
        sampler = sampler_of(self)
        order = _drawn_alike(sampler)
        self._checksum, self._begun = checksum_of(order), EpochPosition()
        if resumption is not None:
            batches = resumption.batches
            self._begun = resumption.epoch_position or EpochPosition(division.used(len(order), batches), batches)
            if resumption.checksum not in (None, self._checksum) and sampler.rank == 0:
                kind = type(wrapped_sampler(sampler) or sampler).__name__
                warnings.warn(OTHER_ORDER.format(sampler=kind), stacklevel=2)
            set_random_state(self, resumption.then)
        left = order[self._begun.samples :]
        if resumption is not None and (repeated := division.repeats(len(left))) and sampler.rank == 0:
            warnings.warn(_REPEATED.format(left=len(left), repeated=repeated, ranks=division.ranks), stacklevel=2)
        batches_of_rank = division.deal(left, sampler.rank)
        yield from batches_of_rank if self.batch_sampler is not None else (index for (index,) in batches_of_rank)

    def epoch_position_after(self, position: Mapping[str, Any], batches: int) -> EpochPosition | None:
        """Return the position to which so many batches led in the run that saved ``position``; None if unknown.

        Its number of batches is that of an epoch of this loader which has as many steps left.
        """
        saved, division = position.get("order"), self.global_batches()
        if saved is None or division is None or saved["samples"] != self.samples:
            return None
        samples, begun = saved["samples"], EpochPosition(*saved["place"])
        used = GlobalBatches(*saved["division"]).used(samples - begun.samples, batches - begun.batches)
        left = samples - begun.samples - used
        return EpochPosition(samples - left, division.steps(samples) - division.steps(left))

    def first_sample(self, batch: int) -> int | None:
        """Return the position, in the order of all ranks, of the first sample of the epoch's batch of that number.

        None where the order is not known.
        """
        division, samples = self.global_batches(), self.samples
        if division is None or samples is None:
            return None
        return self._begun.samples + division.used(samples - self._begun.samples, batch - self._begun.batches)

    # --- random states ---

    def _begin(self, resumption: Resumption, process: dict[str, Any] | None) -> None:
        """Set the random states with which the epoch begins; ``process`` is that of a new one."""
        if resumption.start is not None:
            set_random_state(self, resumption.start)
            return
        if process is not None and resumption.leader is resumption:
            set_rng_state(process)
        if process is resumption.then["process"]:
            set_own_states(self, resumption.then["own"])

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning takes a loader that has this method for one that can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see ``resume``."""

    def resume(self, resumption: Resumption) -> None:
        """Begin the next epoch so."""
        self._resumption = resumption

    def wait(self) -> None:
        """Give nothing the next time: Lightning begins the loaders before it can be known where to go on.

        What has no length it would have drawn a batch of, and lost it. Persistent workers are started that early, as
        the run that did not stop had them before the epoch: starting them draws a random number.
        """
        self._waits = not self.persistent_workers

    def position(self) -> dict[str, Any]:
        """Return what a resumed run must know: random states when this epoch began (None before), sampler's seed."""
        position = {"epoch_start": self._epoch_start, "own": own_states(self), "seed": seed_of(self)}
        position |= {"samples": self.samples, "batch_size": self.batch_size}
        if (division := self.global_batches()) is not None:
            waiting = self._resumption
            begun, checksum = self._begun, self._checksum
            if waiting is not None and waiting.epoch_position is not None:  # saved before the first batch is drawn
                begun, checksum = waiting.epoch_position, waiting.checksum
            position["order"] = {
                "samples": self.samples,
                "place": list(astuple(begun)),
                "division": list(astuple(division)),
                "checksum": checksum,
            }
        return position


class _Watched:
    """A sampler that tells its loader when it begins; an iterator of persistent workers keeps it over epochs."""

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
    """Let a DataLoader resume, in place; False for loaders with a state of their own, and other iterables."""
    if isinstance(loader, DataLoader) and not isinstance(loader, ResumableLoader) and not hasattr(loader, "state_dict"):
        kind: Any = type(loader)
        loader.__class__ = _resumable_class(kind)
    return isinstance(loader, ResumableLoader)


def refuse_batches_of_batches(loader: object) -> None:
    """Raise for a DataLoader that Lightning made again with this rank's share of its batches, and that batches these.

    Lightning calls the constructor again, and passes another sampler. A class that disables torch's batching for its
    own sampler of batches (``batch_size=None``) enables it for one that it is given.

    Raises:
        UnsupportedCodeError: naming the class.
    """
    if not isinstance(loader, DataLoader) or type(loader).__init__ is DataLoader.__init__:
        return
    if loader.batch_sampler is not None and isinstance(wrapped_sampler(loader.sampler), BatchSampler):
        raise UnsupportedCodeError(
            f"{type(loader).__name__}, whose sampler gives batches, puts each of them into a batch of "
            f"{loader.batch_size} since Lightning made it again with a DistributedSampler around that sampler. Pass "
            "Trainer(use_distributed_sampler=False), by which every rank trains on the same batches, or let the loader "
            "have a DistributedSampler of its own."
        )


def batches_done(loops: dict[str, Any]) -> int | None:
    """Batches of the present epoch that are finished, from Lightning's loop state; None where the epoch is over.

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


def _drawn_alike(sampler: Any) -> list[Any]:
    """The order of all ranks: what a sampler of the user's draws at random depends on seed and epoch alone.

    The generators of the process would not do: they differ between ranks that drew differently.
    """
    if wrapped_sampler(sampler) is None:
        return order_of_all_ranks(sampler)
    generator = own_generator(sampler)
    own = None if generator is None else generator.get_state()
    try:
        with seed_temporarily(zlib.crc32(f"{sampler.seed} {sampler.epoch}".encode())):
            if generator is not None:
                generator.manual_seed(zlib.crc32(f"{generator.initial_seed()} {sampler.epoch}".encode()))
            return order_of_all_ranks(sampler)
    finally:
        if generator is not None and own is not None:
            generator.set_state(own)


def batches_of_loader(loader: object, batches: int, *, cycles: bool, length: int | None = None) -> int:
    """Return how many of an epoch's ``batches`` this loader gave since it last began.

    Args:
        loader: of torch, or any other.
        batches: of the epoch, for all loaders together.
        cycles: whether it begins anew when it has no more.
        length: how many it gives from then on; by default ``len(loader)``, if it has one.
    """
    try:
        length = len(loader) if length is None else length  # type: ignore[arg-type]  # if it has one
    except TypeError:
        return batches
    if not cycles or batches <= length:
        return min(batches, length)
    return (batches - 1) % length + 1
