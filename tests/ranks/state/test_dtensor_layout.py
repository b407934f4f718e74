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
from lightning_shardckpt.state.local_tensors import layout_of, local_tensor, parts_of, this_rank, view_at
from tests.support.pool import run_each, run_ranks

Found = dict[str, tuple[Layout, torch.Size, list[int]]]


def indices(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def check(tensors: dict[str, torch.Tensor]) -> Found:
    """The boxes of tensors that were filled with their own indices must hold just these, where the parts say."""
    found: Found = {}
    for name, tensor in tensors.items():
        whole, local = indices(tuple(tensor.shape)), local_tensor(tensor)
        boxed = torch.full(local.shape, -1)
        for part in parts_of(tensor, this_rank()):
            source = tuple(map(slice, part.box.start, part.box.stop))
            boxed[tuple(map(slice, part.local.start, part.local.stop))] = whole[source]
        assert torch.equal(boxed, local.to(boxed.dtype)), (name, tensor)
        for part in parts_of(tensor, this_rank()):
            view = view_at(local, part.local)
            assert view.shape == part.box.shape
            assert not view.numel() or view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        found[name] = layout_of(tensor), tensor.shape, local.flatten().tolist()
    return found


def agree(results: list[Found]) -> None:
    """All ranks found the same layouts, and by these know of each other's elements; together they have everything."""
    for name, (layout, shape, _) in results[0].items():
        assert all(result[name][0] == layout for result in results), name
        whole = indices(tuple(shape))
        for rank, result in enumerate(results):
            parts = parts_of_rank(layout, tuple(shape), rank)
            said = [whole[tuple(map(slice, part.box.start, part.box.stop))] for part in parts]
            assert sorted(i for part in said for i in part.flatten().tolist()) == sorted(result[name][2]), name
            assert rank in replicas(layout, ((0, len(results)),), layout.shard(rank))
        assert list(find_unheld_shards(layout, ((0, len(results)),))) == []
        assert {i for result in results for i in result[name][2]} == set(range(shape.numel())), name


def fsdp(sizes: tuple[int, int], axes: dict[str, int]) -> Found:
    """Parameters as parallelism makes them, which hold their own indices."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    width, hidden = sizes
    module = nn.Sequential()
    module.up, module.down, module.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)
    for parameter in module.parameters():
        parameter.data.copy_(indices(tuple(parameter.shape)))
    if "tp" in axes:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data := tuple(name for name in axes if name != "tp"):
        fully_shard(module, mesh=mesh[data])
    found = check({name: tensor.detach() for name, tensor in module.state_dict().items()})
    assert len(found["up.weight"][0].cuts) == len(axes.keys() - {"replicate"})
    return found


def distributed(shape: tuple[int, ...], mesh: DeviceMesh, *placements: Any) -> torch.Tensor:
    return distribute_tensor(indices(shape), mesh, list(placements), src_data_rank=None)


def by_hand() -> Found:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (6,), mesh_dim_names=("line",))
    cube = init_device_mesh("cpu", (3, 2), mesh_dim_names=("c", "d"))
    return check(
        {
            "plain": indices((3, 2)),
            "scalar": indices(()),
            "rows": distributed((7, 2), mesh["a"], Shard(0)),
            "columns": distributed((2, 7), mesh["b"], Shard(-1)),
            "last": distributed((3, 2, 5), mesh, Replicate(), Shard(2)),
            "replicated scalar": distributed((), mesh, Replicate(), Replicate()),
            "both dims": distributed((7, 5), mesh, Shard(0), Shard(1)),
            "crossed": distributed((7, 5), mesh, Shard(1), Shard(0)),
            "left to right, uneven": distributed((7, 2), mesh, Shard(0), Shard(0)),
            "left to right on another mesh": distributed((7, 2), cube, Shard(0), Shard(0)),
            "fewer than ranks": distributed((2, 2), line, Shard(0)),
            "empty": distributed((0, 2), line, Shard(0)),
            "no columns": distributed((4, 0), line, Shard(0)),
            "flattened": distributed((9, 2), mesh._flatten("flat"), Shard(0)),
            "packed": distributed((12, 2), line, _StridedShard(0, split_factor=2)),
            "packed, uneven": distributed((9, 2), mesh["a"], _StridedShard(0, split_factor=3)),
            "packed, short": distributed((2, 2), mesh["b"], _StridedShard(0, split_factor=3)),
            "packed columns": distributed((2, 12), mesh["b"], _StridedShard(1, split_factor=2)),
        }
    )


def right_to_left(shape: tuple[int, ...], rows: int) -> Found:
    """FSDP's cut of a tensor-parallel slice, by hand: first along the last axis of the mesh, then along the first."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    local = indices((rows, 2))
    for parts, index in zip(reversed(shape), reversed(mesh.get_coordinate() or ()), strict=True):
        local = dict(enumerate(local.chunk(parts))).get(int(index), local[:0])
    placements = (_StridedShard(0, split_factor=shape[1]), Shard(0))
    about: dict[str, Any] = {"shape": torch.Size((rows, 2)), "stride": (2, 1)}
    return check({"w": DTensor.from_local(local, mesh, placements, run_check=False, **about)})


def permuted() -> Found:
    """A mesh that does not number the ranks one after the other."""
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    both = distributed((7, 5), mesh, Shard(0), Shard(1))
    assert layout_of(both).order == (3, 1, 0, 2)
    hsdp = distributed((7, 5), mesh, Replicate(), Shard(0))
    rows = {axis: distributed((7, 2), mesh[axis], Shard(0)) for axis in ("a", "b")}
    return check({**rows, "both": both, "hsdp": hsdp})


def apart() -> Found:
    """Axes that lie apart, flattened to the ranks 0, 1, 4, 5 and 2, 3, 6, 7."""
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = distributed((9, 2), cube["a", "c"]._flatten("ac"), Shard(0))
    assert layout_of(flat).order == (0, 1, 4, 5, 2, 3, 6, 7)
    return check({"flat": flat, "ac": distributed((9, 5), cube["a", "c"], Shard(0), Shard(1))})


CASES: dict[str, tuple[Any, ...]] = {
    "fsdp": (4, fsdp, (7, 5), {"shard": 4}),
    "fsdp of few rows": (4, fsdp, (2, 3), {"shard": 4}),
    "tp": (4, fsdp, (7, 10), {"tp": 4}),
    "hsdp": (4, fsdp, (7, 5), {"replicate": 2, "shard": 2}),
    "fsdp x tp": (4, fsdp, (3, 1), {"shard": 2, "tp": 2}),
    "uneven fsdp x tp": (6, fsdp, (5, 13), {"shard": 2, "tp": 3}),
    "hsdp x tp": (8, fsdp, (9, 10), {"replicate": 2, "shard": 2, "tp": 2}),
    "by hand": (6, by_hand),
    "permuted": (4, permuted),
    "apart": (8, apart),
    **{f"{rows} rows on {shape}": (prod(shape), right_to_left, shape, rows) for shape, rows in
       [((3, 2), 7), ((2, 3), 7), ((2, 2), 5), ((3, 2), 1)]},
}  # fmt: skip


def test_the_boxes_of_any_dtensor_are_where_its_elements_are() -> None:
    for results in run_each(CASES).values():
        agree(results)


def refusals() -> None:
    line, square, pair = (init_device_mesh("cpu", shape) for shape in ((4,), (4, 1), (2, 2)))
    some, rank = DeviceMesh("cpu", [0, 1, 2]), torch.distributed.get_rank()

    def tensor(local: tuple[int, ...], shape: tuple[int, ...], placements: Any, mesh: DeviceMesh = line) -> DTensor:
        about: dict[str, Any] = {"shape": torch.Size(shape), "stride": (shape[1], 1)}
        return DTensor.from_local(torch.zeros(local), mesh, placements, run_check=False, **about)

    calls: dict[str, Callable[[], object]] = {
        "partial sums": lambda: parts_of(tensor((3, 2), (3, 2), [Partial()]), rank),
        r"local tensor of shape \(3, 2\)": lambda: parts_of(tensor((3, 2), (4, 2), [Shard(0)]), rank),
        "no layout describes": lambda: layout_of(
            tensor((2, 2), (8, 2), [_StridedShard(0, split_factor=4), Shard(0)], pair)
        ),
    }
    for said, call in calls.items():
        with pytest.raises(StateError, match=said):
            call()
    assert layout_of(distributed((4, 2), square, Shard(0), Shard(0))).shards == (4,)
    own = tensor((2, 2) if rank < 2 else (1, 2), (5, 2), [Shard(0)], some)  # a mesh of some ranks needs no alignment
    if rank == 3:
        with pytest.raises(StateError, match="rank 3 has a DTensor"):
            parts_of(own, rank)
    else:
        assert [part.box.start[0] for part in parts_of(own, rank)] == [2 * rank]


def test_what_no_box_describes_is_refused() -> None:
    run_ranks(4, refusals)
    assert layout_of(torch.zeros(3, 2)) is REPLICATED
