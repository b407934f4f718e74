"""The pretend NCCL reduces as gloo does, and has NCCL's rules about order, waiting and death."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

from tests.accelerator import device
from tests.accelerator.ranks import run_on_gpus
from tests.support.collectives import gathered
from tests.support.pool import run_ranks

DEADLOCK = 86


def test_collectives_of_the_package_have_dtypes_that_nccl_lacks() -> None:
    assert run_on_gpus(2, gathered, "cuda") == run_ranks(2, gathered, "cpu")


def _late_rank() -> None:
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


def test_the_stream_waits_for_a_collective_and_the_host_does_not() -> None:
    run_on_gpus(2, _late_rank)


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
