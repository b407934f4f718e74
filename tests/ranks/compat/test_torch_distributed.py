"""Collectives, groups and the store of torch.distributed on several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import (
    abort_accelerators,
    all_gather_single,
    backend_name,
    clone_store,
    default_store,
    distribute_locally,
    get_if_set,
    group_of_name,
    prefix_store,
    put_bytes,
    reduce_scatter_single,
)
from tests.support.collectives import gathered_and_reduced
from tests.support.pool import run_ranks


def both() -> list[bool]:
    own = torch.arange(3.0) + 10 * dist.get_rank()
    listed = [torch.empty(3) for _ in range(2)]
    dist.all_gather(listed, own)
    gathered, part, parts = torch.empty(6), torch.empty(3), torch.arange(6.0) * (1 + dist.get_rank())
    at_once = all_gather_single(gathered, own, group=None)
    reduce_scatter_single(part, parts, group=dist.group.WORLD, async_op=True).wait()
    dist.all_reduce(parts)
    expected = parts.view(2, 3)[dist.get_rank()]
    return [at_once is None, torch.equal(gathered, torch.cat(listed)), torch.equal(part, expected)]


def test_each_rank_has_what_the_simpler_collectives_give() -> None:
    assert run_ranks(2, both) == [[True] * 3] * 2


def distributed_locally() -> list[list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, own = init_device_mesh("cpu", (2,)), torch.arange(4.0) + 10 * dist.get_rank()
    with distribute_locally():
        cut, whole = (distribute_tensor(own.clone(), mesh, [placement]) for placement in (Shard(0), Replicate()))
    sent = distribute_tensor(own, mesh, [Replicate()])
    return [tensor.to_local().tolist() for tensor in (cut, whole, sent)]


def test_tensors_are_distributed_without_communication_inside_only() -> None:
    first, second = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
    assert run_ranks(2, distributed_locally) == [[first[:2], first, first], [second[2:], second, first]]


def test_dtypes_that_backends_lack_travel_too() -> None:
    own = [torch.arange(6).view(2, 3) + rank for rank in range(2)]
    for rank, found in enumerate(run_ranks(2, gathered_and_reduced, "cpu")):
        for dtype, every in zip((torch.int16, torch.bool, torch.complex64, torch.bfloat16), found[:4], strict=True):
            assert every == [each.to(dtype).tolist() for each in own]
        total = (own[0] + own[1]).view(-1)[3 * rank : 3 * rank + 3]
        assert found[4:] == [total.to(torch.complex64).tolist(), total.float().tolist()]


def found_by_name() -> tuple[bool, list[float], bool]:
    group = dist.new_group([0, 1], backend="gloo")
    found = group_of_name(group.group_name)
    total = torch.ones(1) + dist.get_rank()
    dist.all_reduce(total, group=found)
    name = group.group_name
    dist.destroy_process_group(group)
    try:
        group_of_name(name)
    except (RuntimeError, ValueError):
        return found is group, total.tolist(), True
    return found is group, total.tolist(), False


def test_a_group_is_found_by_its_name_until_it_is_destroyed() -> None:
    assert run_ranks(2, found_by_name) == [(True, [3.0], True)] * 2


def backends() -> list[str | None]:
    devices = [torch.device("cpu"), torch.device("cuda"), torch.device("meta")]
    found = [backend_name(dist.group.WORLD, device) for device in devices]  # type: ignore[arg-type]  # there is one
    other = dist.new_group(backend="cuda:gloo")
    return [*found, *(backend_name(other, device) for device in devices)]


def test_a_group_has_a_backend_for_the_devices_that_it_serves() -> None:
    assert run_ranks(2, backends) == [["gloo", "gloo", None, None, "gloo", None]] * 2


def reduced_after_abort() -> list[float]:
    other = dist.new_group(backend="cpu:gloo,cuda:gloo")
    abort_accelerators()
    total = torch.ones(1) + dist.get_rank()
    for group in (dist.group.WORLD, other):
        dist.all_reduce(total, group=group)
    return total.tolist()


def test_groups_for_tensors_of_the_cpu_go_on_after_an_abort() -> None:
    """What it does to a GPU's is in tests/accelerator/test_lost_ranks.py."""
    assert run_ranks(2, reduced_after_abort) == [[6.0], [6.0]]


def told() -> bytes:
    if dist.get_rank() == 0:
        put_bytes(default_store(), "told by rank 0", b"\xff\x00")
    dist.barrier()
    return bytes(default_store().get("told by rank 0"))


def test_what_one_rank_puts_into_the_default_store_the_others_get() -> None:
    assert run_ranks(2, told) == [b"\xff\x00"] * 2


@pytest.mark.parametrize("view", [clone_store, prefix_store])
def test_a_view_has_keys_of_its_own(view: Callable[[Any, str], Any]) -> None:
    store = dist.HashStore()
    first, second = view(store, "first"), view(store, "second")
    put_bytes(first, "key", b"1")
    assert first.get("key") == b"1" and not second.check(["key"]) and not store.check(["key"])
    assert view(store, "first").get("key") == b"1"


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
