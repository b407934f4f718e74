"""The store of torch's process groups is shared by all ranks, and a view of it can be used beside it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shardckpt.compat.torch_store import default_store, get_if_there, own_view, put_bytes
from tests.support.pool import run_ranks


def told() -> bytes:
    if dist.get_rank() == 0:
        put_bytes(default_store(), "told by rank 0", b"\xff\x00")
    dist.barrier()
    return bytes(default_store().get("told by rank 0"))


def test_what_one_rank_puts_into_the_default_store_the_others_get() -> None:
    assert run_ranks(2, told) == [b"\xff\x00"] * 2


def test_a_view_has_keys_of_its_own() -> None:
    store = dist.HashStore()
    first, second = own_view(store, "first"), own_view(store, "second")
    put_bytes(first, "key", b"1")
    assert first.get("key") == b"1" and not second.check(["key"]) and not store.check(["key"])
    assert own_view(store, "first").get("key") == b"1"


def test_a_view_has_a_connection_of_its_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, 1, is_master=False)
    waits = own_view(client, "view")
    found = list[bytes]()
    thread = threading.Thread(target=lambda: found.append(waits.get("late")))  # waits inside the client
    thread.start()
    put_bytes(client, "meanwhile", b"1")  # with the same client this would wait for the other thread
    put_bytes(own_view(client, "view"), "late", b"2")
    thread.join(60)
    assert found == [b"2"]


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_asking_for_a_key_neither_waits_for_it_nor_changes_it(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Any] = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
    }
    kept = stores[kind]()
    store = own_view(kept, "tests")
    assert [get_if_there(store, "key") for _ in range(2)] == [None, None] and not store.check(["key"])
    for value in (b"{}", b"\xff\x00", b'"?"', b"x" * 100_000):
        put_bytes(store, "key", value)
        assert [get_if_there(store, "key") for _ in range(2)] == [value] * 2 == [store.get("key")] * 2
