"""The pretend NCCL reduces as gloo does, and has NCCL's rules about order, waiting and death."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

from tests.accelerator import device
from tests.accelerator.ranks import run_on_gpus
from tests.support.collectives import gathered_and_reduced
from tests.support.pool import run_ranks

DEADLOCK = 86


def _collectives() -> None:
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    own = torch.arange(6.0) + rank
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x, host = own.to("cuda", dtype), own.to(dtype, copy=True)
        dist.all_reduce(x), dist.all_reduce(host, group=gloo)
        assert torch.equal(x.cpu(), host)
        dist.broadcast(x, 1), dist.broadcast(host, 1, group=gloo)
        assert torch.equal(x.cpu(), host)
    x = own.cuda()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.equal(x.cpu(), torch.arange(6.0) + 0.5)
    all_ranks = [torch.empty(6, device="cuda") for _ in range(2)]
    dist.all_gather(all_ranks, own.cuda())
    assert [each.tolist() for each in all_ranks] == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    part = torch.empty(3, device="cuda")
    dist.reduce_scatter(part, list(own.cuda().split(3)))
    assert torch.equal(part.cpu(), (torch.arange(6.0) * 2 + 1)[3 * rank : 3 * rank + 3])
    swapped = torch.empty(6, device="cuda")
    dist.all_to_all_single(swapped, own.cuda())
    assert torch.equal(swapped[:3].cpu(), torch.arange(6.0)[3 * rank : 3 * rank + 3])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def test_collectives_of_the_package_have_dtypes_that_nccl_lacks() -> None:
    assert run_on_gpus(2, gathered_and_reduced, "cuda") == run_ranks(2, gathered_and_reduced, "cpu")


def _late_rank() -> None:
    """The stream waits for a collective, and the host does not."""
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(2, device="cuda")
    if dist.get_rank() == 1:
        store.get("rank 0 went on")
    dist.all_reduce(x, async_op=True).wait()
    store.set(f"rank {dist.get_rank()} went on", "")
    assert x.tolist() == [2, 2]


def _other_collective() -> None:
    x = torch.ones(2, device="cuda")
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
    torch.cuda.synchronize()


def test_ranks_that_meet_with_other_collectives_are_an_error() -> None:
    outcomes = run_on_gpus(2, _other_collective, expect_errors=True)
    assert all("rank 0 allreduce(2 x Float); rank 1 broadcast(2 x Float)" in o.error.message for o in outcomes)


def _exchange(grouped: bool) -> list[float]:
    peer = 1 - dist.get_rank()
    mine, theirs = torch.full((2,), float(dist.get_rank()), device="cuda"), torch.empty(2, device="cuda")
    if grouped:
        works = batch_isend_irecv([P2POp(dist.isend, mine, peer), P2POp(dist.irecv, theirs, peer)])
    else:
        works = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return theirs.tolist()


@pytest.mark.slow
def test_two_sends_that_wait_for_each_other_are_a_deadlock() -> None:
    outcomes = run_on_gpus(2, _exchange, False, pretend={"deadlock_s": 1.0}, expect_errors=True)
    assert all(f"status {DEADLOCK}" in o.error.message and "running send" in o.output for o in outcomes)


@pytest.mark.parametrize("eager", [True, False])
def test_a_send_and_a_receive_of_one_group_are_none(eager: bool) -> None:
    assert run_on_gpus(2, _exchange, True, pretend={"eager": eager}) == [[1, 1], [0, 0]]


def _waits_with_a_timeout() -> None:
    """A wait that times out aborts the communicator."""
    x, store = torch.ones(2, device="cuda"), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="Watchdog"):
            dist.all_reduce(x, async_op=True).wait(timedelta(milliseconds=50))
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(x)
        store.set("done", "")
    else:
        store.get("done")


@pytest.mark.parametrize("check", [_collectives, _late_rank, _waits_with_a_timeout])
def test_collectives_are_those_of_nccl(check: Callable[[], None]) -> None:
    run_on_gpus(2, check)


def _peer_dies() -> str:
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os._exit(3)
    work = dist.all_reduce(x, async_op=True)
    for _ in range(20):
        assert not work.is_completed()
        time.sleep(0.05)  # long enough for gloo to notice, as gloo does
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        work.wait()
    return device.queues()


def test_a_dead_peer_is_not_noticed_until_the_communicator_is_aborted() -> None:
    survivor, dead = run_on_gpus(2, _peer_dies, expect_errors=True)
    assert survivor.error is None and survivor.value == "" and "status 3" in dead.error.message
