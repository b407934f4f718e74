"""Topologies, plans, units, clipping and random numbers, apart from any Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.clip_grad import clip_by_norm, clip_by_value
from lightning_shardckpt.parallel.sharding.fqn import parameter_names
from lightning_shardckpt.parallel.sharding.fsdp import choose_units, trunk_layers
from lightning_shardckpt.parallel.sharding.mesh import resolve_topology
from lightning_shardckpt.parallel.sharding.tensor_parallel import PARTIAL, resolve_plan
from lightning_shardckpt.parallel.tensors.values import broadcast_rng, share_rng
from tests.support.nets import Net, llama
from tests.support.pool import run_ranks
from tests.support.tiny import whole


class Root(nn.Module):
    """What a LightningModule is to these functions: it holds the net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


# ── topology ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (6, {"tensor": 4}, "6 processes cannot form a mesh .* shard auto x tensor 4: 6 is not a multiple of 4"),
        (8, {"shard": 3, "replicate": 2}, "8 processes .* replicate 2 x shard 3 x tensor 1: that takes 6"),
        (2, {"tensor": 0}, "at least 1, found {'tensor': 0}"),
        (2, {"shard": "all"}, "found {'shard': 'all'}"),
    ],
)
def test_sizes_that_do_not_fit_the_world_are_named(world: int, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        resolve_topology(world, **sizes)


# ── FSDP units ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_units_are_the_layers_of_the_trunks() -> None:
    assert choose_units(Root(llama()), None) == ["net.model.layers.0", "net.model.layers.1"]
    assert choose_units(Root(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))), None) == []
    transformer = nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, batch_first=True)
    root = Root(nn.ModuleDict({"core": transformer, "heads": nn.ModuleList(nn.Linear(8, 2) for _ in range(2))}))
    assert trunk_layers(root) == [f"net.core.{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(2)]
    layers = [nn.Linear(2, 2), nn.Bilinear(1, 2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    root = Root(nn.ModuleDict({"last": layers[3], "layers": nn.ModuleList(layers)}))
    assert choose_units(root, None) == ["net.last", *(f"net.layers.{i}" for i in range(3))]


# ── tensor-parallel plans ───────────────────────────────────────────────────────────────────────────────────────────


def resolve(net: nn.Module, plan: Any, size: int = 2) -> Any:
    root = Root(net)
    return resolve_plan(root, plan, [names for names in parameter_names(root) if len(names) > 1], size)


def test_the_last_pattern_decides_a_style_may_be_an_object_and_tied_modules_are_sharded_alike() -> None:
    style = ColwiseParallel(output_layouts=Replicate())
    plan = resolve(Net(), {"net.blocks.*.up": "colwise", "net.blocks.1.up": style, "net.norm": PARTIAL})
    assert plan.styles["net.blocks.1.up"] is style is not plan.styles["net.blocks.0.up"]
    assert plan.partial == {"net.norm"}
    plan = resolve(Net(tied=True), {"net.head": "colwise_gather_output"})
    assert isinstance(plan.styles["net.embed"], RowwiseParallel)
    plan = resolve(Net(tied=True), {"net.embed": "embedding_rowwise"})
    assert isinstance(plan.styles["net.head"], ColwiseParallel)
    assert resolve(Net(), "tests.ranks.parallel.test_parallel:choose_units").apply is choose_units


@pytest.mark.parametrize(
    ("net", "plan", "size", "message"),
    [
        (Net, {"net.norm": "colwise"}, 2, r"ColwiseParallel cannot shard net.norm \(LayerNorm\).*Use it on Linear"),
        (Net, {"net.blocks.*.up": "colwise"}, 4, "net.blocks.0.up: out_features is 26"),
        (Net, {"net.blocks.*.down": "rowwise"}, 4, "net.blocks.2.down: in_features is 26"),
        (Net, "auto", 2, "no module of Root has a plan"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error_before_anything_is_sharded(
    net: Any, plan: Any, size: int, message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        resolve(net(), plan, size)


# ── clipping ────────────────────────────────────────────────────────────────────────────────────────────────────────


def mixed_gradients() -> tuple[list[Tensor], list[Tensor]]:
    """Parameters sharded in every way over 2 x 2 ranks, one smaller than the mesh, and the same ones whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=torch.float64) for shape in [(5, 3), (4,), (), (1, 2), (7, 2), (6, 5)]]
    sharded = [
        distribute_tensor(whole[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(whole[1], mesh["b"], [Shard(0)]),
        whole[2].clone(),
        distribute_tensor(whole[3], mesh["a"], [Shard(0)]),
        distribute_tensor(whole[4], mesh, [Replicate(), Shard(0)]),
        distribute_tensor(whole[5], mesh, [Shard(0), Shard(0)]),
    ]
    return [with_gradient(t) for t in sharded], [with_gradient(t) for t in whole]


def with_gradient(tensor: Tensor) -> Tensor:
    parameter = nn.Parameter(torch.zeros_like(tensor))
    parameter.grad = tensor
    return parameter


def check_clipping() -> None:
    cpu = torch.device("cpu")
    for norm_type in (1.0, 2.0, float("inf")):
        sharded, full = mixed_gradients()
        expected = nn.utils.clip_grad_norm_(full, 1.5, norm_type)
        norm = clip_by_norm(sharded, 1.5, device=cpu, norm_type=norm_type)
        torch.testing.assert_close(norm, expected)
        for a, b in zip(sharded, full, strict=True):
            torch.testing.assert_close(whole(a.grad), b.grad)
    sharded, full = mixed_gradients()
    clip_by_norm(sharded, 1e6, device=cpu)  # below the limit nothing changes, to the bit
    assert all(torch.equal(whole(a.grad), b.grad) for a, b in zip(sharded, full, strict=True))
    clip_by_value(sharded, 0.3)
    nn.utils.clip_grad_value_(full, 0.3)
    assert all(torch.equal(whole(a.grad), b.grad) for a, b in zip(sharded, full, strict=True))
    assert clip_by_norm([], 1.0, device=cpu) == 0


def test_clipping_counts_each_element_once_however_it_is_sharded() -> None:
    run_ranks(4, check_clipping)


# ── random numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


def check_rng() -> list[float]:
    torch.manual_seed(dist.get_rank())
    with share_rng():
        inside = torch.rand(()).item()
    after = torch.rand(()).item()
    broadcast_rng(dist.group.WORLD)
    return [inside, after, torch.rand(()).item()]


def test_ranks_draw_alike_where_they_must_and_apart_elsewhere() -> None:
    (inside, after, shared), (inside1, after1, shared1) = run_ranks(2, check_rng)
    torch.manual_seed(0)
    assert [inside, after] == [torch.rand(()).item(), torch.rand(()).item()]
    torch.manual_seed(1)
    assert after1 == torch.rand(()).item()
    assert inside1 == inside
    assert shared1 == shared
