"""Gradients of replicas. Oracle: the mean of what each rank's batch gives by itself, computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.gradient_sync import GradientSync
from lightning_shardckpt.parallel.sharding.mesh import build_meshes, resolve_topology
from tests.support.pool import run_each, run_ranks

WIDTH, LAYERS = 8, 6


class Net(nn.Module):
    """Its rank leaves out some layers, and calls ``at_layer`` when a backward comes back to one."""

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.skipped = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), skipped
        self.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)  # as of quantized weights
        self.at_layer: Callable[[Net, int], Any] = lambda net, number: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = torch.tanh(layer(x))
                x.register_hook(lambda _, number=number: self._come_back(number))
        return x.square().mean()

    def _come_back(self, number: int) -> None:
        self.at_layer(self, number)

    def gradients(self) -> list[Tensor | None]:
        """A copy of each."""
        return [None if p.grad is None else p.grad.detach().clone() for p in self.parameters()]


@contextmanager
def _counted() -> Iterator[list[tuple[torch.dtype, int]]]:
    """The dtype and the number of elements of each reduction."""
    all_reduce, buffers = dist.all_reduce, list[tuple[torch.dtype, int]]()

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        buffers.append((tensor.dtype, tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield buffers
    finally:
        dist.all_reduce = all_reduce


def _watch(net: nn.Module, dtype: torch.dtype | None = None) -> GradientSync:
    world = dist.get_world_size()
    meshes = build_meshes(resolve_topology(world, replicate=world), "cpu")
    return GradientSync(net, meshes, torch.device("cpu"), reduce_dtype=dtype)


def _batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


Make = Callable[[int], Net]


def _mean(make: Make, *, backwards: int = 1) -> list[Tensor | None]:
    """The mean over all ranks, by hand; None where no rank has a gradient."""
    every = []
    for rank in range(dist.get_world_size()):
        net = make(rank)
        for step in range(backwards):
            net(_batch(rank, step)).backward()
        every.append(net.gradients())
    found = list[Tensor | None]()
    for of_ranks, parameter in zip(zip(*every, strict=True), make(0).parameters(), strict=True):
        total = sum(torch.zeros_like(parameter) if g is None else g for g in of_ranks).detach()
        found.append(None if all(g is None for g in of_ranks) else total / len(every))
    return found


def _alike(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        a is None if b is None else a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def _train(skipped: tuple[tuple[int, ...], ...]) -> None:
    make = lambda rank: Net(skipped[rank])  # noqa: E731
    expected, net = _mean(make), make(dist.get_rank())
    _watch(net)
    with _counted() as buffers:
        net(_batch(dist.get_rank())).backward()
    assert _alike(net.gradients(), expected) and len(buffers) == 1
    assert {type(p.grad) for p in net.parameters() if p.grad is not None} == {Tensor}


def test_gradients_are_averaged_in_one_buffer_and_one_that_some_ranks_lack_counts_as_zero() -> None:
    run_each({skipped: (2, _train, skipped) for skipped in (((), ()), ((1, 4), (4, 5)))})


def _replace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 3


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.grad.mul_(3),
    "by data": lambda p: p.grad.data.mul_(3),
    "by numpy": lambda p: p.grad.numpy().__imul__(3),
    "by detach": lambda p: p.grad.detach().mul_(3),
    "another tensor": _replace,
    "reads": lambda p: p.grad.norm(),
}


def _use() -> None:
    for how, call in USES.items():
        net = Net()
        net.at_layer = lambda net, number, call=call: call(net.layers[-1].weight) if number == 1 else None
        _watch(net)
        with pytest.raises(UnsupportedCodeError, match="has the batches of this rank alone, in a backward"):
            net(_batch(dist.get_rank())).backward()
            raise AssertionError(how)


def test_user_code_may_not_use_a_gradient_in_the_backward_before_it_is_averaged() -> None:
    run_ranks(2, _use)


def _reduce_in(dtype: torch.dtype | None) -> tuple[list[torch.dtype], list[float]]:
    layer = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    _watch(layer, dtype)
    with _counted() as buffers:
        layer(torch.tensor([(256.0, 1.0, 1.0)[dist.get_rank()]], dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16
    return [dtype for dtype, _ in buffers], layer.weight.grad.flatten().tolist()


def test_sums_are_in_float32_unless_another_dtype_is_given() -> None:
    assert run_ranks(3, _reduce_in, None) == [([torch.float32], [86.0, 86.0])] * 3
    assert [dtypes for dtypes, _ in run_ranks(3, _reduce_in, torch.bfloat16)] == [[torch.bfloat16]] * 3


def _accumulate_hook_and_fail() -> None:
    rank = dist.get_rank()
    make = lambda rank: Net()  # noqa: E731
    expected, gradients = _mean(make, backwards=3), _watch(net := Net())
    with _counted() as buffers:
        for step in range(3):
            with gradients.no_sync() if step < 2 else nullcontext():
                net(_batch(rank, step)).backward()
    assert _alike(net.gradients(), expected) and len(buffers) == 1

    expected, seen = _mean(make), list[Tensor]()
    _watch(net := Net())
    hooked = net.layers[3].weight
    place = [p is hooked for p in net.parameters()].index(True)
    handle = hooked.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    net(_batch(rank)).backward()
    assert torch.equal(seen[0], expected[place]), "a hook of the user's gets the mean"
    doubled = [gradient * 2 if n == place else gradient for n, gradient in enumerate(expected)]
    assert _alike(net.gradients(), doubled), "and what it returns counts"

    handle.remove()
    net.at_layer = lambda net, number: 1 / number
    with pytest.raises(ZeroDivisionError):
        net(_batch(0)).backward()
    net.zero_grad()
    net.at_layer = lambda net, number: None
    net(_batch(rank)).backward()
    assert _alike(net.gradients(), expected), "a backward after one that failed"


def test_gradients_that_accumulate_are_sent_once_hooks_get_the_mean_and_a_failure_leaves_nothing_behind() -> None:
    run_ranks(2, _accumulate_hook_and_fail)
