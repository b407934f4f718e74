"""The boxes of a live DTensor. Oracle: tensors that hold their own indices, sharded by torch itself."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.layout import REPLICATED, Layout, find_unheld_shards, parts_of_rank, replicas
from lightning_shardckpt.state.dtensor_layout import layout_of, local_tensor, local_views, parts_of, this_rank
from tests.support.pool import run_each

Found = dict[str, tuple[Layout, torch.Size, list[int]]]


def indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def boxed(tensor: torch.Tensor) -> list[int]:
    """The indices that lie in this rank's boxes, put where the parts say."""
    whole, found = indices(tuple(tensor.shape)), torch.full(local_tensor(tensor).shape, -1)
    for part in parts_of(tensor, this_rank()):
        source = tuple(slice(a, b) for a, b in zip(part.box.start, part.box.stop, strict=True))
        found[tuple(slice(a, b) for a, b in zip(part.local.start, part.local.stop, strict=True))] = whole[source]
    return found.flatten().tolist()


def check(tensors: dict[str, torch.Tensor]) -> Found:
    """The boxes of tensors that were filled with their own indices must hold just these."""
    found: Found = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        assert boxed(tensor) == local.flatten().tolist(), (name, tensor)
        for box, view in local_views(tensor):
            assert view.shape == box.shape
            assert not view.numel() or view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        found[name] = layout_of(tensor), tensor.shape, local.flatten().tolist()
    return found


def agree(results: list[Found]) -> None:
    """All ranks found the same layouts, and by these know of each other's elements; together they have everything."""
    for name, (layout, shape, _) in results[0].items():
        assert all(result[name][0] == layout for result in results), name
        for rank, result in enumerate(results):
            whole = indices(tuple(shape))
            said = [
                whole[tuple(map(slice, p.box.start, p.box.stop))] for p in parts_of_rank(layout, tuple(shape), rank)
            ]
            assert sorted(i for part in said for i in part.flatten().tolist()) == sorted(result[name][2])
            assert rank in replicas(layout, ((0, len(results)),), layout.shard(rank))
        assert list(find_unheld_shards(layout, ((0, len(results)),))) == []
        assert {i for result in results for i in result[name][2]} == set(range(shape.numel())), name


# ── parameters as parallelism makes them ──────────────────────────────────────────────────────────────────────────


def net(width: int, hidden: int) -> nn.Sequential:
    """Parameters that hold their own indices."""
    module = nn.Sequential()
    for name, part in {
        "up": nn.Linear(width, hidden),
        "down": nn.Linear(hidden, width),
        "norm": nn.LayerNorm(width),
    }.items():
        module.add_module(name, part)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(indices(tuple(parameter.shape)))
    return module


def fsdp(sizes: tuple[int, int], names: tuple[str, ...], shape: tuple[int, ...]) -> Found:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module = net(*sizes)
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)
    data = tuple(name for name in names if name != "tp")
    if data:
        fully_shard(module, mesh=mesh[data])
    return check({name: tensor.detach() for name, tensor in module.state_dict().items()})


Case = tuple[tuple[int, int], tuple[str, ...], tuple[int, ...]]
MODELS: list[Case] = [
    ((7, 5), ("shard",), (4,)),
    ((2, 3), ("shard",), (4,)),
    ((8, 8), ("shard", "tp"), (2, 2)),
    ((7, 14), ("shard", "tp"), (2, 2)),
    ((3, 1), ("shard", "tp"), (2, 2)),
    ((7, 5), ("replicate", "shard"), (2, 2)),
    ((7, 10), ("tp",), (4,)),
    ((7, 7), ("shard", "tp"), (3, 2)),
    ((5, 13), ("shard", "tp"), (2, 3)),
    ((9, 10), ("replicate", "shard", "tp"), (2, 2, 2)),
]
STRIDED = [((3, 2), 7), ((2, 3), 7), ((2, 2), 5), ((3, 2), 1)]
"""The shape of a mesh, and a number of rows."""
Every = dict[Any, list[Any]]


@pytest.fixture(scope="module")
def every() -> Every:
    """What each rank found, by what it was asked; all that is asked of a world of one size is in the same processes."""
    functions = {by_hand: 6, permuted: 4, apart: 8, stages: 3, refusals: 2, ambiguous: 4}
    calls = {case: (prod(case[2]), fsdp, *case) for case in MODELS}
    calls |= {case: (prod(case[0]), right_to_left, *case) for case in STRIDED}
    return run_each(calls | {function: (world, function) for function, world in functions.items()})


@pytest.mark.parametrize("case", MODELS)
def test_the_boxes_of_a_parallel_model_are_where_its_elements_are(case: Case, every: Every) -> None:
    agree(every[case])
    layout, _, _ = every[case][0]["up.weight"]
    assert len(layout.cuts) == len({*case[1]} - {"replicate"})


# ── tensors distributed by hand ───────────────────────────────────────────────────────────────────────────────────


def distributed(shape: tuple[int, ...], mesh: DeviceMesh, *placements: Any) -> torch.Tensor:
    return distribute_tensor(indices(shape), mesh, list(placements), src_data_rank=None)


def by_hand() -> Found:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (6,), mesh_dim_names=("line",))
    cube = init_device_mesh("cpu", (3, 2), mesh_dim_names=("c", "d"))
    flat = mesh._flatten("flat")
    return check(
        {
            "plain": indices((3, 2)),
            "scalar": indices(()),
            "rows": distributed((7, 2), mesh["a"], Shard(0)),
            "columns": distributed((2, 7), mesh["b"], Shard(1)),
            "negative dim": distributed((2, 7), mesh["b"], Shard(-1)),
            "last": distributed((3, 2, 5), mesh, Replicate(), Shard(2)),
            "replicated": distributed((3, 2), mesh, Replicate(), Replicate()),
            "replicated scalar": distributed((), mesh, Replicate(), Replicate()),
            "both dims": distributed((7, 5), mesh, Shard(0), Shard(1)),
            "crossed": distributed((7, 5), mesh, Shard(1), Shard(0)),
            "left to right": distributed((14, 2), mesh, Shard(0), Shard(0)),
            "left to right, uneven": distributed((7, 2), mesh, Shard(0), Shard(0)),
            "fewer than ranks": distributed((2, 2), line, Shard(0)),
            "empty": distributed((0, 2), line, Shard(0)),
            "no columns": distributed((4, 0), line, Shard(0)),
            "flattened": distributed((9, 2), flat, Shard(0)),
            "packed": distributed((12, 2), line, _StridedShard(0, split_factor=2)),
            "packed, uneven": distributed((9, 2), mesh["a"], _StridedShard(0, split_factor=3)),
            "packed, short": distributed((2, 2), mesh["b"], _StridedShard(0, split_factor=3)),
            "packed columns": distributed((2, 12), mesh["b"], _StridedShard(1, split_factor=2)),
            "7 rows on 3x2": distributed((7, 2), cube, Shard(0), Shard(0)),
        }
    )


def test_the_boxes_of_any_dtensor_are_where_its_elements_are(every: Every) -> None:
    agree(every[by_hand])


def right_to_left(shape: tuple[int, ...], rows: int) -> tuple[list[int], list[int]]:
    """FSDP's cut of a tensor-parallel slice, by hand: first along the last axis of the mesh, then along the first."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    fsdp, tp = (int(c) for c in mesh.get_coordinate() or ())

    def chunk(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        found = tensor.chunk(parts)
        return found[index] if index < len(found) else tensor[:0]

    local = chunk(chunk(indices((rows, 2)), shape[1], tp), shape[0], fsdp)
    placements = (_StridedShard(0, split_factor=shape[1]), Shard(0))
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1))
    return boxed(tensor), local.flatten().tolist()


@pytest.mark.parametrize("case", STRIDED, ids=str)
def test_a_strided_shard_is_cut_right_to_left_for_uneven_dims_too(case: Any, every: Every) -> None:
    assert all(found == local for found, local in every[case])
    assert sorted(i for _, local in every[case] for i in local) == list(range(2 * case[1]))


# ── meshes that do not number the ranks one after the other ──────────────────────────────────────────────────────────


def permuted() -> Found:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    return check(
        {
            "rows": distributed((7, 2), mesh["b"], Shard(0)),
            "other rows": distributed((7, 2), mesh["a"], Shard(0)),
            "both": distributed((7, 5), mesh, Shard(0), Shard(1)),
            "hsdp": distributed((7, 5), mesh, Replicate(), Shard(0)),
        }
    )


def test_a_permuted_mesh_has_one_layout_on_all_ranks(every: Every) -> None:
    results = every[permuted]
    agree(results)
    assert results[0]["both"][0].order == (3, 1, 0, 2)


def apart() -> Found:
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = cube["a", "c"]._flatten("ac")  # the ranks 0, 1, 4, 5 and 2, 3, 6, 7
    return check(
        {"flat": distributed((9, 2), flat, Shard(0)), "ac": distributed((9, 5), cube["a", "c"], Shard(0), Shard(1))}
    )


def test_flattening_axes_that_lie_apart_has_one_layout_on_all_ranks(every: Every) -> None:
    results = every[apart]
    agree(results)
    assert results[0]["flat"][0].order == (0, 1, 4, 5, 2, 3, 6, 7)
    assert results[0]["ac"][0].order is None


def stages() -> tuple[int, ...]:
    rank = torch.distributed.get_rank()
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1, 2])]
    tensor = distributed((3, 2), meshes[min(rank, 1)], Shard(0))
    check({"w": tensor})
    return tuple(part.box.start[0] for part in parts_of(tensor, this_rank()))


def test_a_mesh_of_some_ranks_needs_no_alignment(every: Every) -> None:
    assert every[stages] == [(0,), (0,), (2,)]


# ── what has no boxes ─────────────────────────────────────────────────────────────────────────────────────────────


def refusals() -> list[str]:
    line = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1))
    some = DeviceMesh("cpu", [0])
    rank = torch.distributed.get_rank()
    wrong = DTensor.from_local(
        torch.zeros(3, 2), line, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )
    turned = DTensor.from_local(
        torch.zeros(2, 2), line, [Shard(0)], run_check=False, shape=torch.Size((2, 4)), stride=(4, 1)
    )
    partial = DTensor.from_local(torch.zeros(3, 2), line, [Partial()], run_check=False)
    said = []
    calls: list[Callable[[], object]] = [
        lambda: parts_of(partial, this_rank()),
        lambda: parts_of(wrong, this_rank()),
        lambda: parts_of(turned, this_rank()),
        lambda: rank == 0 or parts_of(DTensor.from_local(torch.zeros(1), some, [Shard(0)], run_check=False), rank),
    ]
    for call in calls:
        try:
            call()
            said.append("")
        except StateError as error:
            said.append(str(error))
    assert layout_of(distributed((4, 2), square, Shard(0), Shard(0))).shards == (2,)
    return said


def test_what_no_box_describes_is_refused(every: Every) -> None:
    first, second = every[refusals]
    assert ["partial sums" in first[0], "local tensor of shape (3, 2)" in first[1], "shape (2, 2)" in first[2]] == [
        True
    ] * 3
    assert first[3] == ""
    assert "rank 1 has a DTensor" in second[3]


def ambiguous() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = DTensor.from_local(
        torch.zeros(2, 2),
        mesh,
        [_StridedShard(0, split_factor=4), Shard(0)],
        run_check=False,
        shape=torch.Size((8, 2)),
        stride=(2, 1),
    )
    with pytest.raises(StateError, match="no layout describes"):
        layout_of(tensor)
    return "refused"


def test_a_split_factor_that_fits_no_later_axis_is_refused(every: Every) -> None:
    assert every[ambiguous] == ["refused"] * 4


def test_a_plain_tensor_is_replicated() -> None:
    tensor = torch.zeros(3, 2)
    assert layout_of(tensor) is REPLICATED
    assert [p.box.shape for p in parts_of(tensor, this_rank())] == [(3, 2)]
