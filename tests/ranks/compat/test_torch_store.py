"""The store of torch's process groups is shared by all ranks, and a view of it can be used beside it."""

from __future__ import annotations

import threading

import torch.distributed as dist

from lightning_shardckpt.compat.torch_store import default_store, own_view, put_bytes
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
