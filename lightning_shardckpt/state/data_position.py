"""Continue an epoch of a DataLoader with the batches that it would have drawn.

The order of an epoch is drawn from the random state when its sampler begins, dropout and the like from the state at
the save. A resumed epoch therefore draws its order from the first, skips the batches that were used (without loading
them, for datasets with indices), and continues with the second. What else drew random numbers between loading and the
first batch has no effect. What worker processes drew for themselves is not restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_shardckpt.compat.dataloader import IndexedLoader, IndexSource
from lightning_shardckpt.state.rng_state import get_rng_state, set_rng_state

_END = object()


class Resumption:
    """The beginning of a loader's next epoch: draw the order from ``start``, skip, continue from ``then``.

    Without ``start``, it is a new epoch that begins from ``then``; the loaders that begin it together draw one after
    the other, so those after the first one have it as ``leader``. States are what ``ResumableLoader.random`` gave.
    """

    def __init__(
        self, start: dict[str, Any] | None, batches: int, then: dict[str, Any], leader: Resumption | None = None
    ) -> None:
        self.start, self.batches, self.then = start, batches, then
        self.leader = leader or self
        self.iterated: dict[str, Any] | None = None  # the process's state when all loaders of a new epoch had begun


class ResumableLoader(IndexedLoader):
    """The addition of ``make_resumable`` to a DataLoader's class."""

    _epoch_start: dict[str, Any] | None = None
    _resumption: Resumption | None = None
    _waits = False

    def __iter__(self) -> Any:
        self._epoch_start = None
        if self._waits:
            self._waits = False
            return iter(())
        resumption, iterable = self._resumption, isinstance(self.dataset, IterableDataset)
        if resumption is not None:
            self._begin(resumption, resumption.then["process"])
        if iterable:
            self._epoch_start = self.random()
        iterator = super().__iter__()
        if resumption is not None and resumption.start is None:
            resumption.leader.iterated = get_rng_state()
        elif resumption is not None and iterable:
            for _ in islice(iterator, resumption.batches):
                pass
            self.set_random(resumption.then)
        if iterable:
            self._resumption = None
        return iterator

    def index_source(self, sampler: Any) -> IndexSource:
        """The sampler, observed where it has an order that can be continued."""
        if isinstance(self.dataset, IterableDataset):
            return super().index_source(sampler)
        return _Watched(self, sampler)

    def begin(self, indices: Iterator[Any]) -> Iterator[Any]:
        """The indices of an epoch that begins now, or those that an interrupted one has left."""
        resumption, self._resumption = self._resumption, None
        if resumption is not None:
            self._begin(resumption, resumption.iterated)  # whatever was drawn since
        self._epoch_start = self.random()
        if resumption is None or resumption.start is None:
            yield from indices
            return
        following = next(islice(indices, resumption.batches, None), _END)
        self.set_random(resumption.then)
        if following is not _END:
            yield following
            yield from indices

    def _begin(self, resumption: Resumption, process: dict[str, Any] | None) -> None:
        """Set the random states with which the epoch begins; ``process`` is that of a new one."""
        if resumption.start is not None:
            self.set_random(resumption.start)
            return
        if process is not None and resumption.leader is resumption:
            set_rng_state(process)
        if process is resumption.then["process"]:
            self.set_own(resumption.then["own"])

    def random(self) -> dict[str, Any]:
        """Random states of this process and of the loader's own generators."""
        return {"process": get_rng_state(), "own": [generator.get_state() for generator in self._generators()]}

    def set_random(self, state: dict[str, Any]) -> None:
        """Continue from what ``random`` gave."""
        set_rng_state(state["process"])
        self.set_own(state["own"])

    def set_own(self, states: list[torch.Tensor]) -> None:
        """Continue the loader's own generators."""
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

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
        own = [generator.get_state() for generator in self._generators()]
        return {"epoch_start": self._epoch_start, "own": own, "seed": getattr(self._seeded_sampler(), "seed", None)}

    def set_sampler_seed(self, seed: int | None) -> None:
        """Let a DistributedSampler shuffle as in the interrupted run, whatever this one was seeded with."""
        if seed is not None and hasattr(self._seeded_sampler(), "seed"):
            self._seeded_sampler().seed = seed

    def _generators(self) -> list[torch.Generator]:
        found = [self.generator, getattr(self._seeded_sampler(), "generator", None)]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _seeded_sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", self.sampler)


class _Watched:
    """A sampler that tells its loader when it begins; an iterator of persistent workers keeps it over epochs."""

    def __init__(self, loader: ResumableLoader, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader.begin(iter(self._sampler))  # runs when the first index is asked for

    def __len__(self) -> int:
        return len(self._sampler)


@lru_cache(maxsize=64)
def _resumable_class(kind: Any) -> Any:
    return type(kind.__name__, (ResumableLoader, kind), {"__module__": kind.__module__})


def make_resumable(loader: object) -> bool:
    """Let a DataLoader resume, in place; False for loaders with a state of their own, and other iterables."""
    if isinstance(loader, DataLoader) and not isinstance(loader, ResumableLoader) and not hasattr(loader, "state_dict"):
        kind: Any = type(loader)
        loader.__class__ = _resumable_class(kind)
    return isinstance(loader, ResumableLoader)


def batches_done(loops: dict[str, Any]) -> int | None:
    """Batches of the present epoch that are finished, from Lightning's loop state; None where the epoch is over.

    A save in ``on_train_batch_end`` happens before Lightning counts the batch as completed.
    """
    progress, epoch = loops["fit_loop"]["epoch_loop.batch_progress"], loops["fit_loop"]["epoch_progress"]["current"]
    current = progress["current"]
    if progress["is_last_batch"] or epoch["processed"] >= epoch["started"]:
        return None
    in_batch_end = current["processed"] == current["started"] == current["ready"] == current["completed"] + 1
    return int(current["completed"] + in_batch_end)


def batches_of_loader(loader: object, batches: int, *, cycles: bool) -> int:
    """Return how many of an epoch's ``batches`` this loader gave since it last began; ``cycles``: it begins anew."""
    try:
        length = len(loader)  # type: ignore[arg-type]  # if it has one
    except TypeError:
        return batches
    if not cycles or batches <= length:
        return min(batches, length)
    return (batches - 1) % length + 1
