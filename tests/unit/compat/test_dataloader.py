"""A DataLoader draws from what index_source gives: single indices or batches, with and without workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_shardckpt.compat.dataloader import IndexedLoader, IndexSource


class Reversed:
    def __init__(self, sampler: Any, began: list[int]) -> None:
        self._sampler, self._began = sampler, began

    def __iter__(self) -> Any:
        self._began.append(len(self._began))
        yield from [*self._sampler][::-1]

    def __len__(self) -> int:
        return len(self._sampler)


class Backwards(IndexedLoader):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.began: list[int] = []
        super().__init__(*args, **kwargs)

    def index_source(self, sampler: Any) -> IndexSource:
        return Reversed(sampler, self.began)


DATA = torch.arange(6)


@pytest.mark.parametrize(("batch_size", "expected"), [(None, [5, 4, 3, 2, 1, 0]), (2, [[4, 5], [2, 3], [0, 1]])])
def test_indices_are_drawn_from_the_source(batch_size: int | None, expected: list[Any]) -> None:
    loader = Backwards(DATA, batch_size=batch_size)
    assert [batch.tolist() for batch in loader] == expected and len(loader) == len(expected)
    assert [batch.tolist() for batch in IndexedLoader(DATA, batch_size=batch_size)] == expected[::-1]


def test_an_iterator_of_persistent_workers_begins_the_source_for_every_epoch() -> None:
    loader = Backwards(DATA, batch_size=3, num_workers=1, persistent_workers=True)
    began, found = loader.began, [[batch.tolist() for batch in loader] for _ in range(2)]
    del loader  # and its worker
    assert found == [[[3, 4, 5], [0, 1, 2]]] * 2 and began == [0, 1]
