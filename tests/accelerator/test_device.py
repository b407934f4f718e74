"""The pretend device computes as the CPU does, and breaks where a GPU would."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import device
from tests.accelerator.ranks import require_device
from tests.support.pool import Outcome, run_ranks


def run_on_one(fn: Callable[[], Any], **options: Any) -> Any:
    """Return what a function returns in a process with two pretend GPUs and no process group."""
    require_device()
    return run_ranks(1, _installed, fn, options.pop("pretend", {}), init_process_group=False, **options)[0]


def _installed(fn: Callable[[], Any], pretend: dict[str, Any]) -> Any:
    device.install(**pretend)
    return fn()


def _operations() -> None:
    host = torch.arange(6.0).view(2, 3)
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert x.is_cuda and str(x.device) == "cuda:0" and torch.cuda.is_available()
    assert torch.equal((x.t() @ x + 1).cpu(), host.t() @ host + 1)
    x[0, 1], host[0, 1] = 7, 7
    x[:, 2].zero_(), host[:, 2].zero_()
    assert torch.equal(x.cpu(), host)
    assert torch.equal(torch.cat([x, x], out=torch.empty(0, device="cuda")).cpu(), torch.cat([host, host]))
    assert torch.equal(x.nonzero().cpu(), host.nonzero())
    assert torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (3, 2)).data_ptr() == x.data_ptr()
    assert torch.empty(3, device="cuda").isnan().all(), "what is not initialized shows"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype == torch.bfloat16


def test_operations_are_those_of_the_cpu() -> None:
    run_on_one(_operations)


def _trained(device_type: str, make: Callable[..., torch.optim.Optimizer], **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device_type)
    x, y = torch.randn(5, 8, generator=generator), torch.randint(4, (5,), generator=generator)
    threads: list[int] = []
    net[0].weight.register_hook(lambda _: threads.append(threading.get_ident()))
    optimizer = make(net.parameters(), lr=1e-2, **options)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.to(device_type)), y.to(device_type)).backward()
        optimizer.step()
    if device_type == "cuda":
        assert threads[0] != threading.get_ident(), "autograd has a thread for each GPU"
    return [p.detach().cpu() for p in net.parameters()]


def _optimizers() -> None:
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    cases = [(adamw, {"foreach": True}), (adamw, {"fused": True}), (sgd, {"momentum": 0.9})]
    for make, options in cases:
        pairs = zip(_trained("cpu", make, **options), _trained("cuda", make, **options), strict=True)
        # torch composes some layers of other operations there, which round otherwise
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs), (make, options)


def test_a_training_is_that_of_the_cpu() -> None:
    run_on_one(_optimizers)


def _random_numbers() -> None:
    of_host = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    first, second = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(before)
    assert torch.equal(torch.rand(4, device="cuda"), first) and not torch.equal(first, second)
    assert before.numel() == 16 and torch.equal(torch.get_rng_state(), of_host)
    with torch.cuda.device(1):
        assert not torch.equal(torch.rand(4, device="cuda").cpu(), first.cpu())
    generator = torch.Generator("cuda").manual_seed(3)
    assert torch.rand(2, device="cuda", generator=generator).is_cuda


def test_each_device_has_random_numbers_of_its_own() -> None:
    run_on_one(_random_numbers)


def _late_copies() -> None:
    host, x = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    host.copy_(x, non_blocking=True)
    assert host.tolist() != [1.0] * 4
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [1.0] * 4
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        host.copy_(x * 2, non_blocking=True)
        event = other.record_event()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() != [2.0] * 4, "another stream's copy has not arrived"
    event.synchronize()
    assert host.tolist() == [2.0] * 4


def test_a_copy_to_pinned_memory_arrives_when_somebody_waits() -> None:
    run_on_one(_late_copies)


def _freed_storage() -> None:
    x = torch.arange(2048.0, device="cuda")
    before = device.counts()["allocated"]
    x.untyped_storage().resize_(0)
    assert device.counts()["allocated"] == before - 2048 * 4
    x.untyped_storage().resize_(2048 * 4)
    assert x.fill_(3).sum().item() == 3 * 2048


def test_a_storage_of_the_device_can_be_freed_and_made_again() -> None:
    run_on_one(_freed_storage)


def _refusals() -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(TypeError):
        x.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:7")
    with pytest.raises(RuntimeError, match="pinned"):
        torch.ones(1, device="cuda").pin_memory()


def test_what_a_gpu_refuses_is_refused() -> None:
    run_on_one(_refusals)


def _reads_by_the_host() -> None:
    x = torch.ones(4, device="cuda")
    (ctypes.c_char * 4).from_address(x.data_ptr()).raw  # noqa: B018  # that is the read


def test_a_read_of_device_memory_by_the_host_ends_the_process() -> None:
    require_device()
    (outcome,) = run_ranks(1, _installed, _reads_by_the_host, {}, init_process_group=False, expect_errors=True)
    assert isinstance(outcome, Outcome) and outcome.error and "SIGSEGV" in outcome.error.message


def _waits_counted() -> list[int]:
    found = []
    x, pinned = torch.ones(4, device="cuda"), torch.zeros(4, pin_memory=True)
    actions: list[Callable[[], Any]] = [
        x.sum, x.cpu, lambda: x[0].item(), lambda: pinned.copy_(x, non_blocking=True), torch.cuda.synchronize,
    ]  # fmt: skip
    for action in actions:
        before = device.counts()["host_waits"]
        action()
        found.append(device.counts()["host_waits"] - before)
    return found


def test_waits_of_the_host_are_counted() -> None:
    assert run_on_one(_waits_counted) == [0, 1, 1, 0, 1]


