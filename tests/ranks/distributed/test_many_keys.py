"""Many keys of a store in few requests, of each kind that torch has: the same answers as one request for each key."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import clone_store
from lightning_shardckpt.distributed.host_ranks import Arrivals, absent_keys, get_present

COUNT = 1100  # more than two requests ask for


@pytest.fixture(params=["file", "hash", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    stores = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
    }
    kept = stores[request.param]()
    yield clone_store(kept, "tests")


def keys_of(numbers: Sequence[int]) -> list[str]:
    return [f"key/{number}" for number in numbers]


@pytest.mark.parametrize("absent", [[], [0], [COUNT - 1], [3, 4, 511, 512, 700], list(range(0, COUNT, 7))], ids=len)
def test_keys_that_a_store_lacks_are_found(absent: list[int], store: Any) -> None:
    keys = keys_of(range(COUNT))
    gone = {*keys_of(absent)}
    for key in keys:
        if key not in gone:
            store.set(key, f"of {key}")
    assert absent_keys(store, keys) == [key for key in keys if not store.check([key])] == keys_of(absent)
    assert get_present(store, keys) == {key: f"of {key}".encode() for key in keys if key not in gone}


def test_no_keys_are_nothing_to_ask_for(store: Any) -> None:
    assert (absent_keys(store, []), get_present(store, []), Arrivals(store, []).get_if_complete()) == ([], {}, [])


def test_values_are_there_when_the_last_has_come_in_whatever_order(store: Any) -> None:
    keys = keys_of(range(COUNT))
    arrivals, coming = Arrivals(store, keys), random.Random(0).sample(keys, COUNT)
    for number, key in enumerate(coming):
        if number % 100 == 0:
            assert arrivals.get_if_complete() is None
        store.set(key, f"of {key}")
    assert arrivals.get_if_complete() == [f"of {key}".encode() for key in keys]


def test_a_value_that_changed_while_others_were_waited_for_counts(store: Any) -> None:
    keys = keys_of(range(COUNT))
    for key in keys[:-1]:
        store.set(key, "before")
    arrivals = Arrivals(store, keys)
    assert arrivals.get_if_complete() is None
    store.set(keys[0], "after")
    store.set(keys[-1], "last")
    assert arrivals.get_if_complete() == [b"after", *[b"before"] * (COUNT - 2), b"last"]
