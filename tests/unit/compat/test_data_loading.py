"""Loaders draw from another source of indices, and samplers tell the order of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_shardckpt.compat import data_loading as compat
from lightning_shardckpt.errors import UnsupportedCodeError


class Reversed:
    def __init__(self, sampler: Any, began: list[int]) -> None:
        self._sampler, self._began = sampler, began

    def __iter__(self) -> Any:
        self._began.append(len(self._began))
        yield from [*self._sampler][::-1]

    def __len__(self) -> int:
        return len(self._sampler)


class Backwards(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.began: list[int] = []
        super().__init__(*args, **kwargs)


for name, value in compat.replace_indices(DataLoader, lambda loader, sampler: Reversed(sampler, loader.began)).items():
    setattr(Backwards, name, value)
DATA = torch.arange(6)


@pytest.mark.parametrize(("batch_size", "expected"), [(None, [5, 4, 3, 2, 1, 0]), (2, [[4, 5], [2, 3], [0, 1]])])
def test_indices_are_drawn_from_the_source(batch_size: int | None, expected: list[Any]) -> None:
    loader = Backwards(DATA, batch_size=batch_size)
    assert [batch.tolist() for batch in loader] == expected and len(loader) == len(expected)


def test_an_iterator_of_persistent_workers_begins_the_source_for_every_epoch() -> None:
    loader = Backwards(DATA, batch_size=3, num_workers=1, persistent_workers=True)
    began, found = loader.began, [[batch.tolist() for batch in loader] for _ in range(2)]
    del loader  # and its worker
    assert found == [[[3, 4, 5], [0, 1, 2]]] * 2 and began == [0, 1]


GENERATOR = torch.Generator()
SUBSET = SubsetRandomSampler(range(0, 22, 2), generator=GENERATOR)
KINDS: dict[str, Any] = {
    "shuffled": lambda **place: DistributedSampler(range(11), seed=3, **place),  # type: ignore[arg-type]
    "in order": lambda **place: DistributedSampler(range(11), shuffle=False, **place),  # type: ignore[arg-type]
    "wrapped": lambda **place: DistributedSamplerWrapper(SUBSET, **place),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
def test_order_is_what_the_ranks_give_in_turns(kind: str, ranks: int) -> None:
    parts, orders = [], []
    for rank in range(ranks):
        sampler = KINDS[kind](num_replicas=ranks, rank=rank)
        sampler.set_epoch(2)
        GENERATOR.manual_seed(0)
        parts.append(list(sampler))
        GENERATOR.manual_seed(0)
        orders.append(compat.order_of_all_ranks(sampler))
        assert (sampler.num_replicas, sampler.rank) == (ranks, rank)
    in_turns = [index for step in zip(*parts, strict=True) for index in step][:11]
    assert sorted(set(orders[0])) == sorted(orders[0]) and len(orders[0]) == 11
    assert orders == [orders[0]] * ranks and orders[0][: len(in_turns)] == in_turns


def loader(sampler: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(4), sampler=sampler, **options)  # type: ignore[arg-type]  # a Sequence does


class Other(DistributedSampler[Any]):
    pass


class Batches(BatchSampler):
    pass


class Random(RandomSampler):
    pass


PLACE: Any = {"dataset": range(4), "num_replicas": 2, "rank": 0}


def test_samplers_that_may_do_otherwise_are_not_known() -> None:
    dealt = DistributedSampler(**PLACE)
    assert compat.deals_samples(loader(dealt)) and compat.deals_samples(loader(dealt, batch_size=2))
    assert compat.deals_samples(loader(batch_sampler=BatchSampler(dealt, 2, False)))
    for other in (
        loader(),
        loader(Other(**PLACE)),
        loader(DistributedSampler(**PLACE, drop_last=True)),
        loader(dealt, batch_size=None),
        loader(batch_sampler=Batches(dealt, 2, False)),
    ):
        assert not compat.deals_samples(other)


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        (loader(batch_sampler=BatchSampler(range(4), 2, False)), "batches of the BatchSampler that it was given"),
        (loader(batch_sampler=Batches(range(4), 2, False)), "batches of the Batches that"),
        (loader(Batches(range(4), 2, False), batch_size=None), "batches of the Batches that"),
        (loader(RandomSampler(range(4), num_samples=2)), "samples of a RandomSampler that may not"),
        (loader(RandomSampler(range(4), replacement=True)), "samples of a RandomSampler"),
        (loader(Random(range(4))), "samples of a Random that"),
        (loader(SequentialSampler(range(2))), "samples of a SequentialSampler"),
    ],
)
def test_a_loader_of_which_lightning_would_make_another_stays_on_one_rank_alone(kept: Any, what: str) -> None:
    assert compat.keeps_samplers(kept, 1)
    with pytest.raises(UnsupportedCodeError, match=rf"{what}.*cannot divide among 2 ranks"):
        compat.keeps_samplers(kept, 2)


def test_other_loaders_are_made_again_unless_a_distributed_sampler_is_inside() -> None:
    for again in (loader(), loader(shuffle=True), loader(SUBSET), loader(batch_size=None), [1, 2]):
        assert not compat.keeps_samplers(again, 2)
    assert compat.keeps_samplers(loader(batch_sampler=Batches(DistributedSampler(**PLACE), 2, False)), 2)


@pytest.mark.parametrize("own", [None, GENERATOR], ids=["of the process", "its own generator"])
def test_a_wrapped_sampler_draws_the_order_of_its_epoch_whatever_ranks_have_drawn(own: Any) -> None:
    GENERATOR.manual_seed(4)
    epochs: list[list[int]] = [[], []]
    for rank in range(2):
        few = RandomSampler(range(99), num_samples=8, generator=own)
        sampler = DistributedSamplerWrapper(few, 2, rank, shuffle=False)
        assert compat.user_sampler(sampler) is few is compat.user_sampler(few)
        compat.draw_orders_by_epoch(DataLoader(range(99), sampler=sampler))  # type: ignore[arg-type]  # a Sequence does
        torch.manual_seed(rank)
        before = torch.get_rng_state(), GENERATOR.get_state()
        for epoch, order in enumerate(epochs):
            sampler.set_epoch(epoch)
            order += sampler
        assert all(map(torch.equal, before, (torch.get_rng_state(), GENERATOR.get_state())))
        sampler.set_epoch(0)
        assert [*sampler] == epochs[0][-4:]
    assert [len(set(order)) for order in epochs] == [8, 8] and set(epochs[0]) != set(epochs[1])
    plain = KINDS["in order"](num_replicas=1, rank=0)
    compat.draw_orders_by_epoch(DataLoader(range(11), sampler=plain))  # type: ignore[arg-type]
    assert compat.sampler_of(DataLoader(range(11), sampler=plain)) is plain  # type: ignore[arg-type]


class Unseeded(RandomSampler):
    """Draws from a generator that nobody knows of."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(99, generator=HIDDEN).tolist())


HIDDEN = torch.Generator()


def test_a_sampler_that_draws_another_order_from_the_same_states_is_refused() -> None:
    sampler = DistributedSamplerWrapper(Unseeded(range(99)), 2, 0)
    with pytest.raises(UnsupportedCodeError, match="Unseeded draws another order"):
        compat.draw_orders_by_epoch(DataLoader(range(99), sampler=sampler))  # type: ignore[arg-type]  # a Sequence does
