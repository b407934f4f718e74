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
from lightning_shardckpt.parallel.sharding.replicated_gradients import Accumulation, ReplicatedGradients
from tests.support.pool import run_each, run_ranks

WIDTH, LAYERS = 8, 6
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


class Net(nn.Module):
    """Its rank leaves out some layers, and notes when it comes back to each."""

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.skipped = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), skipped
        self.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)  # as of quantized weights
        self.events = list[str]()
        self.at_layer: Callable[[Net, int], Any] = lambda net, number: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = torch.tanh(layer(x))
                x.register_hook(lambda _, number=number: self._come_back(number))  # type: ignore[no-untyped-call]  # torch's
        return x.square().mean()

    def _come_back(self, number: int) -> None:
        self.events.append(f"layer {number}")
        self.at_layer(self, number)

    def gradients(self) -> list[Tensor | None]:
        """A copy of each."""
        return [None if p.grad is None else p.grad.detach().clone() for p in self.parameters()]


@contextmanager
def _noted(events: list[str]) -> Iterator[None]:
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() * tensor.itemsize >= LAYER_BYTES:
            events.append("sent")
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = noted
    try:
        yield
    finally:
        dist.all_reduce = all_reduce


def _watch(net: Net, accumulation: Accumulation | None = None, bucket_bytes: int = LAYER_BYTES) -> None:
    group = dist.group.WORLD
    assert group is not None
    ReplicatedGradients(
        list(net.parameters()), group, 1 / dist.get_world_size(), accumulation or Accumulation(),
        overlapping=dist.new_group(), bucket_bytes=bucket_bytes,
    )  # fmt: skip


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


def _scale(net: Net, number: int, change: Callable[[nn.Parameter], Any]) -> None:
    """Change the gradient of the last layer when the backward comes to the second."""
    if number == 1:
        change(net.layers[-1].weight)  # type: ignore[arg-type]  # a parameter


def _replace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 3


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.grad.mul_(3),  # type: ignore[union-attr]  # there is one
    "by data": lambda p: p.grad.data.mul_(3),  # type: ignore[union-attr]
    "by numpy": lambda p: p.grad.numpy().__imul__(3),  # type: ignore[union-attr]
    "by detach": lambda p: p.grad.detach().mul_(3),  # type: ignore[union-attr]
    "another tensor": _replace,
    "taken away": lambda p: setattr(p, "grad", None),
}


def _make(rank: int) -> Net:
    return Net()


def _make_with_skips(rank: int) -> Net:
    return Net(((1, 4), (4, 5))[rank])


def _changing(how: str, only_rank: int | None) -> Make:
    def make(rank: int) -> Net:
        net = Net()
        if only_rank in (None, rank):
            net.at_layer = lambda net, number: _scale(net, number, CHANGES[how])
        return net

    return make


def _train(make: Make) -> tuple[bool, list[str], set[type]]:
    expected, net = _mean(make), make(dist.get_rank())
    _watch(net)
    with _noted(net.events):
        net(_batch(dist.get_rank())).backward()
    return _alike(net.gradients(), expected), net.events, {type(p.grad) for p in net.parameters() if p.requires_grad}


def _plain() -> Any:
    return _train(_make)


def _skipping() -> Any:
    return _train(_make_with_skips)


def _change(how: str, only_rank: int | None) -> Any:
    return _train(_changing(how, only_rank))


def test_gradients_are_on_their_way_before_the_last_is_computed() -> None:
    for is_mean, events, kinds in run_ranks(2, _plain):
        assert is_mean and kinds == {Tensor}
        assert events.count("sent") == LAYERS
        assert events.index("sent") < events.index("layer 2")


def test_ranks_may_use_different_parameters() -> None:
    for is_mean, events, _ in run_ranks(2, _skipping):
        assert is_mean and events.count("sent") == LAYERS


def test_a_gradient_that_user_code_changes_in_the_backward_is_averaged_as_changed() -> None:
    """On all ranks, and on one alone."""
    calls = {(how, only_rank): (2, _change, how, only_rank) for how in CHANGES for only_rank in (None, 1)}
    for case, ranks in run_each(calls).items():
        for is_mean, _, kinds in ranks:
            assert is_mean and kinds <= {Tensor, type(None)}, case


def _accumulate() -> tuple[bool, list[str]]:
    accumulation, rank = Accumulation(), dist.get_rank()
    expected, net = _mean(_make, backwards=3), Net()
    _watch(net, accumulation)
    with _noted(net.events):
        for step in range(3):
            with accumulation.no_sync(step < 2):
                net(_batch(rank, step)).backward()
    return _alike(net.gradients(), expected), net.events


def test_gradients_that_accumulate_are_sent_once() -> None:
    for is_mean, events in run_ranks(2, _accumulate):
        assert is_mean and events.count("sent") == LAYERS
        assert events.index("sent") > len(events) // 2


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


def _fail(is_told: bool) -> str:
    net, group = Net(), dist.group.WORLD
    assert group is not None
    gradients = ReplicatedGradients(
        list(net.parameters()), group, 0.5, Accumulation(), overlapping=dist.new_group(), bucket_bytes=LAYER_BYTES
    )
    net.at_layer = lambda net, number: 1 / number
    with pytest.raises(ZeroDivisionError):
        net(_batch(0)).backward()
    if is_told:
        gradients.reset()
    net.at_layer = lambda net, number: None
    with pytest.raises(UnsupportedCodeError) as caught:
        net(_batch(0)).backward()
    return str(caught.value)


# The backward of a strategy tells of an error, a plain one does not.
told = pytest.mark.parametrize("is_told", [True, False])


@told
def test_a_backward_after_one_that_failed_is_refused(is_told: bool) -> None:
    assert all("an earlier backward failed" in message for message in run_ranks(2, _fail, is_told))


def _fail_in_one_bucket(is_told: bool) -> bool:
    net, group = Net(), dist.group.WORLD
    assert group is not None
    gradients = ReplicatedGradients(list(net.parameters()), group, 0.5, Accumulation(), overlapping=dist.new_group())
    net.at_layer = lambda net, number: 1 / number
    with pytest.raises(ZeroDivisionError):
        net(_batch(0)).backward()
    if is_told:
        gradients.reset()
    net.zero_grad()
    net.at_layer = lambda net, number: None
    net(_batch(dist.get_rank())).backward()
    return _alike(net.gradients(), _mean(_make))


@told
def test_a_backward_after_one_that_failed_is_averaged_where_nothing_was_sent(is_told: bool) -> None:
    assert run_ranks(2, _fail_in_one_bucket, is_told) == [True, True]
