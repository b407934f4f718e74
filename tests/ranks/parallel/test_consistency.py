"""Ranks that hold the same numbers in another order are told apart. Oracle: who was changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.consistency import check_batch, check_gradients
from lightning_shardckpt.parallel.sharding.mesh import build_meshes, resolve_topology
from lightning_shardckpt.strategy.mesh_strategy import compare_ranks
from tests.support.pool import run_ranks


def raised(check: Callable[..., None], *arguments: object) -> str:
    try:
        check(*arguments, dist.group.WORLD)
    except UnsupportedCodeError as error:
        return str(error)
    return ""


def with_gradient(gradient: Tensor) -> nn.Module:
    module = nn.ParameterDict({"weight": nn.Parameter(torch.zeros_like(gradient)), "bias": nn.Parameter(torch.ones(2))})
    for parameter in module.values():
        parameter.grad = torch.ones_like(parameter)
    module["weight"].grad = gradient
    return module


def compare_gradients() -> dict[str, str]:
    torch.manual_seed(0)
    gradient, pieces, other = torch.randn(300_000), torch.randn(2, 1 << 18), dist.get_rank() == 1
    of_all = {
        "the same": gradient,
        "rounded": (gradient * (1 + 1e-3 * other)).bfloat16(),
        "nothing": torch.zeros(0),
        "an overflow": torch.full((5,), torch.inf),
        "another order": gradient.flip(0) if other else gradient,
        "pieces that changed places": pieces.flip(0) if other else pieces,
        "of other heads": torch.randn(300_000, generator=torch.Generator().manual_seed(dist.get_rank())),
    }
    return {name: raised(check_gradients, with_gradient(value)) for name, value in of_all.items()}


def test_gradients_that_differ_by_more_than_rounding_are_told_apart() -> None:
    for said in run_ranks(2, compare_gradients):
        assert [name for name, text in said.items() if text] == [*said][4:]
        assert all(text.startswith("1 replicated parameters") and ": weight. " in text for text in [*said.values()][4:])


def compare_batches() -> dict[str, str]:
    torch.manual_seed(0)
    tokens, other = torch.randint(50_000, (4, 1 << 18)), dist.get_rank() == 1
    swapped = tokens.clone()
    swapped[-1, -2:] = swapped[-1, -2:].flip(0)  # the sums agree, also those weighted by 1 / place in float64
    x, y = torch.randn(2, 8)
    of_all = {
        "the same": (tokens, tokens.clone()),
        "two tokens that changed places": (tokens, swapped),
        "two tensors that changed places": ([x, y], [y, x]),
        "not a number": (x, torch.cat([x[1:], torch.tensor([torch.nan])])),
    }
    return {name: raised(check_batch, both[other]) for name, both in of_all.items()}


def test_batches_in_another_order_are_told_apart() -> None:
    for said in run_ranks(2, compare_batches):
        assert [name for name, text in said.items() if text] == [*said][1:]


def compare_values() -> None:
    is_changed = dist.get_rank() == 1
    meshes = build_meshes(resolve_topology(2, shard=1, replicate=2, tensor=1, pipeline=1), "cpu")
    for how in ("", "table", "weight"):
        module, table = nn.Linear(2, 2), torch.arange(64.0)
        module.register_buffer("table", table.roll(2) if is_changed and how == "table" else table)
        module.register_buffer("passing", torch.full((2,), float(dist.get_rank())), persistent=False)
        with torch.no_grad():
            module.weight.fill_(is_changed and how == "weight").mul_(1.5)
            module.bias.zero_()
        with pytest.raises(UnsupportedCodeError, match=f"^{how} differs between the") if how else nullcontext():
            compare_ranks([module], Ranks.of_group(), meshes, parameters=True)


def test_values_that_differ_between_data_parallel_ranks_are_named() -> None:
    run_ranks(2, compare_values)


def compare_draws() -> None:
    meshes = build_meshes(resolve_topology(2, shard=1, replicate=1, tensor=2, pipeline=1), "cpu")
    ranks = Ranks.of_group()
    compare_ranks([], ranks, meshes, parameters=True, draws=7)
    with pytest.raises(UnsupportedCodeError, match="drew different random numbers"):
        compare_ranks([], ranks, meshes, parameters=True, draws=dist.get_rank())


def test_random_numbers_that_differ_in_a_tensor_parallel_group_are_refused() -> None:
    run_ranks(2, compare_draws)
