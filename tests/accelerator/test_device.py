"""The pretend device computes as the CPU does, and breaks where a GPU would."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.ranks import require_device
from tests.support.pool import run_ranks


def _installed(fn: Callable[[], Any]) -> Any:
    device.install()
    return fn()


def _late_copies() -> None:
    """A copy to pinned memory arrives when somebody waits."""
    host, x = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    host.copy_(x, non_blocking=True)
    assert host.tolist() != [1.0] * 4
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [1.0] * 4
    with torch.cuda.stream(other := torch.cuda.Stream()):
        host.copy_(x * 2, non_blocking=True)
        event = other.record_event()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() != [2.0] * 4, "another stream's copy has not arrived"
    event.synchronize()
    assert host.tolist() == [2.0] * 4


def _refusals() -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(TypeError):
        x.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:7")


def _counts() -> None:
    x, pinned = torch.ones(2048, device="cuda"), torch.zeros(2048, pin_memory=True)
    actions: list[tuple[Callable[[], Any], int]] = [
        (x.sum, 0), (x.cpu, 1), (lambda: x[0].item(), 1), (lambda: pinned.copy_(x, non_blocking=True), 0),
        (torch.cuda.synchronize, 1),
    ]  # fmt: skip
    for action, waits in actions:
        before = device.counts()["host_waits"]
        action()
        assert device.counts()["host_waits"] - before == waits
    allocated = device.counts()["allocated"]
    x.untyped_storage().resize_(0)
    assert device.counts()["allocated"] == allocated - 2048 * 4


@pytest.mark.parametrize("check", [_late_copies, _refusals, _counts])
def test_the_device_is_as_a_gpu(check: Callable[[], None]) -> None:
    require_device()
    run_ranks(1, _installed, check, init_process_group=False)


def _reads_by_the_host() -> None:
    x = torch.ones(4, device="cuda")
    (ctypes.c_char * 4).from_address(x.data_ptr()).raw  # noqa: B018  # that is the read


def test_a_read_of_device_memory_by_the_host_ends_the_process() -> None:
    require_device()
    (outcome,) = run_ranks(1, _installed, _reads_by_the_host, init_process_group=False, expect_errors=True)
    assert "SIGSEGV" in outcome.error.message
