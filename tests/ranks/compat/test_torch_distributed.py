"""Collectives, groups and the store of torch.distributed on several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shardckpt.compat.torch_distributed import (
    abort_accelerators,
    all_gather_single,
    backend_name,
    clone_store,
    default_store,
    distribute_locally,
    get_if_set,
    group_of_name,
    put_bytes,
)
from tests.support.collectives import gathered
from tests.support.pool import run_ranks


def collectives() -> None:
    own = torch.arange(3.0) + 10 * dist.get_rank()
    listed = [torch.empty(3) for _ in range(2)]
    dist.all_gather(listed, own)
    gathered = torch.empty(6)
    assert all_gather_single(gathered, own, group=None) is None
    assert torch.equal(gathered, torch.cat(listed))
    all_gather_single(again := torch.empty(6), own, group=dist.group.WORLD, async_op=True).wait()
    assert torch.equal(again, gathered)


def distributed_locally() -> None:
    """Tensors are distributed without communication, inside only."""
    mesh, own = init_device_mesh("cpu", (2,)), torch.arange(4.0) + 10 * dist.get_rank()
    with distribute_locally():
        cut, whole = (distribute_tensor(own.clone(), mesh, [placement]) for placement in (Shard(0), Replicate()))
    sent = distribute_tensor(own.clone(), mesh, [Replicate()])
    assert torch.equal(cut.to_local(), own.chunk(2)[dist.get_rank()]) and torch.equal(whole.to_local(), own)
    assert torch.equal(sent.to_local(), torch.arange(4.0))


def groups() -> None:
    """A group is found by its name until it is destroyed, has a backend for devices, and outlives an abort of GPUs'."""
    group = dist.new_group([0, 1], backend="gloo")
    name = group.group_name
    assert group_of_name(name) is group
    dist.destroy_process_group(group)
    with pytest.raises((RuntimeError, ValueError)):
        group_of_name(name)
    devices = [torch.device("cpu"), torch.device("cuda"), torch.device("meta")]
    assert [backend_name(dist.group.WORLD, device) for device in devices] == ["gloo", "gloo", None]
    on_gpus, both = dist.new_group(backend="cuda:gloo"), dist.new_group(backend="cpu:gloo,cuda:gloo")
    assert [backend_name(on_gpus, device) for device in devices] == [None, "gloo", None]
    abort_accelerators()
    total = torch.ones(1) + dist.get_rank()
    for group in (dist.group.WORLD, both):
        dist.all_reduce(total, group=group)
    assert total.item() == 6


def told() -> None:
    if dist.get_rank() == 0:
        put_bytes(default_store(), "told by rank 0", b"\xff\x00")
    dist.barrier()
    assert bytes(default_store().get("told by rank 0")) == b"\xff\x00"


@pytest.mark.parametrize("check", [collectives, distributed_locally, groups, told])
def test_collectives_groups_and_the_store_are_those_of_torch(check: Callable[[], None]) -> None:
    run_ranks(2, check)


def test_dtypes_that_backends_lack_travel_too() -> None:
    own = [torch.arange(6).view(2, 3) + rank for rank in range(2)]
    for found in run_ranks(2, gathered, "cpu"):
        for dtype, every in zip((torch.int16, torch.bool, torch.complex64, torch.bfloat16), found, strict=True):
            assert every == [each.to(dtype).tolist() for each in own]


def test_a_view_has_keys_of_its_own() -> None:
    store = dist.HashStore()
    first, second = clone_store(store, "first"), clone_store(store, "second")
    put_bytes(first, "key", b"1")
    assert first.get("key") == b"1" and not second.check(["key"]) and not store.check(["key"])
    assert clone_store(store, "first").get("key") == b"1"


def test_a_view_has_a_connection_of_its_own() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, 1, is_master=False)
    waits = clone_store(client, "view")
    found = list[bytes]()
    thread = threading.Thread(target=lambda: found.append(waits.get("late")))  # waits inside the client
    thread.start()
    put_bytes(client, "meanwhile", b"1")  # with the same client this would wait for the other thread
    put_bytes(clone_store(client, "view"), "late", b"2")
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
    store = clone_store(kept, "tests")
    assert [get_if_set(store, "key") for _ in range(2)] == [None, None] and not store.check(["key"])
    for value in (b"{}", b"\xff\x00", b'"?"', b"x" * 100_000):
        put_bytes(store, "key", value)
        assert [get_if_set(store, "key") for _ in range(2)] == [value] * 2 == [store.get("key")] * 2
