"""Gradients of replicas. Oracle: the mean of what each rank's batch gives by itself, computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def _make(rank: int) -> Net:
    return Net()


def _make_with_skips(rank: int) -> Net:
    return Net(((1, 4), (4, 5))[rank])


def _train(make: Make) -> tuple[bool, int, set[type]]:
    expected, net = _mean(make), make(dist.get_rank())
    _watch(net)
    with _counted() as buffers:
        net(_batch(dist.get_rank())).backward()
    return _alike(net.gradients(), expected), len(buffers), {type(p.grad) for p in net.parameters() if p.requires_grad}


def _plain() -> Any:
    return _train(_make)


def _skipping() -> Any:
    return _train(_make_with_skips)


def test_gradients_are_averaged_in_one_buffer() -> None:
    assert run_ranks(2, _plain) == [(True, 1, {Tensor})] * 2


def test_a_gradient_that_some_ranks_lack_counts_as_zero() -> None:
    for is_mean, count, _ in run_ranks(2, _skipping):
        assert is_mean and count == 1


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


def _use(how: str) -> str:
    def use(net: Net, number: int) -> None:
        if number == 1:
            USES[how](net.layers[-1].weight)

    net = Net()
    net.at_layer = use
    _watch(net)
    with pytest.raises(UnsupportedCodeError) as caught:
        net(_batch(dist.get_rank())).backward()
    return str(caught.value)


def test_user_code_may_not_use_a_gradient_in_the_backward_before_it_is_averaged() -> None:
    for case, ranks in run_each({how: (2, _use, how) for how in USES}).items():
        for message in ranks:
            assert "which has the batches of this rank alone, in a backward" in message, case


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


def _accumulate() -> tuple[bool, int]:
    rank = dist.get_rank()
    expected, net = _mean(_make, backwards=3), Net()
    gradients = _watch(net)
    with _counted() as buffers:
        for step in range(3):
            with gradients.no_sync(step < 2):
                net(_batch(rank, step)).backward()
    return _alike(net.gradients(), expected), len(buffers)


def test_gradients_that_accumulate_are_sent_once() -> None:
    assert run_ranks(2, _accumulate) == [(True, 1)] * 2


def _hook() -> bool:
    """A hook of the user's gets the mean, and what it returns counts."""
    expected, net, seen = _mean(_make), Net(), list[Tensor]()
    _watch(net)
    hooked: Any = net.layers[3].weight
    place = [p is hooked for p in net.parameters()].index(True)
    hooked.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    net(_batch(dist.get_rank())).backward()
    mean = expected[place]
    assert mean is not None and torch.equal(seen[0], mean)
    expected[place] = mean * 2
    return _alike(net.gradients(), expected)


def test_a_hook_on_a_gradient_gets_the_mean() -> None:
    assert run_ranks(2, _hook) == [True, True]


def _fail() -> bool:
    net = Net()
    _watch(net)
    net.at_layer = lambda net, number: 1 / number
    with pytest.raises(ZeroDivisionError):
        net(_batch(0)).backward()
    net.zero_grad()
    net.at_layer = lambda net, number: None
    net(_batch(dist.get_rank())).backward()
    return _alike(net.gradients(), _mean(_make))


def test_a_backward_after_one_that_failed_is_averaged() -> None:
    assert run_ranks(2, _fail) == [True, True]
