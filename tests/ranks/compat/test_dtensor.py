"""DTensors, their meshes, and state dicts of modules that have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shardckpt.compat.dtensor import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    has_own_state_dict,
    live_state_dict,
    local_tensor,
    new_dtensor,
    replace_local,
    shape_of,
    sibling_ranks,
    spec_of,
)
from tests.support.pool import run_each


def check_parts() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    whole = torch.arange(10.0).view(5, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    mine = whole[:3] if dist.get_rank() == 0 else whole[3:]
    assert torch.equal(local_tensor(tensor), mine) and not isinstance(local_tensor(tensor), DTensor)
    assert local_tensor(tensor).data_ptr() == tensor.to_local().data_ptr()
    assert local_tensor(whole) is whole
    assert shape_of(tensor) == shape_of(whole) == whole.shape
    spec = spec_of(tensor)
    assert spec == DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    assert hash(spec) == hash(spec_of(distribute_tensor(whole, mesh, [Shard(0)])))
    made = new_dtensor(local := local_tensor(tensor).clone(), spec)
    assert vars(made) == vars(DTensor(local, spec, requires_grad=False)) and torch.equal(made.full_tensor(), whole)
    assert local_tensor(made).data_ptr() == local.data_ptr() and not made.requires_grad
    replace_local(made, distribute_tensor(whole + 1, mesh, [Replicate()]))
    assert made.placements == (Replicate(),) and torch.equal(local_tensor(made), whole + 1)


def check_strided() -> None:
    """FSDP over tensor parallelism: the tensor axis, though inner, splits first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.arange(8.0)
    column, row = mesh.get_local_rank("tensor"), mesh.get_local_rank("shard")
    placements = (StridedShard(0, split_factor=2), Shard(0))
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    made = new_dtensor(whole.chunk(2)[column].chunk(2)[row].clone(), spec)
    assert torch.equal(made.full_tensor(), whole)


def check_siblings() -> None:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = [sibling_ranks(mesh).tolist() for mesh in (whole, whole["a"], whole["b"])]
    assert found == [[[[0, 1], [2, 3]]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]


class Whole(DTensor):
    """A DTensor of another class, as strategies make them."""


class Counting(nn.Module):
    """Has a buffer that is not stored, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": 7}


class Own(nn.Module):
    """Has a state dict of its own, which takes no options."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.w.detach() * 2}


def sharded_module() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(nn.Linear(3, 5), Counting(), nn.Linear(5, 3, bias=False))
    for part in (module[0], module[2]):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [Shard(0)]))
    module[2].weight.__class__ = Whole
    module.register_parameter("tied", module[0].weight)
    module[0].weight.requires_grad_(False)
    return module


def check_state_dicts() -> None:
    module, seen = sharded_module(), list[bool]()
    expected, found = module.state_dict(), live_state_dict(module)
    assert list(found) == list(expected) and found._metadata == expected._metadata
    assert found["1._extra_state"] == {"calls": 7}
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            live = found[name]
            assert type(live) is (Whole if name == "2.weight" else type(value)) and not live.requires_grad
            assert local_tensor(live).data_ptr() == local_tensor(value).data_ptr()
            assert isinstance(value, DTensor) is False or spec_of(live) == spec_of(value)

    def hook(part: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        seen.append(state["2.weight"].requires_grad)
        state["added"] = torch.ones(1)

    assert not has_own_state_dict(module)
    module.register_state_dict_post_hook(hook)
    assert has_own_state_dict(module)
    assert "added" in live_state_dict(module) and seen == [False]
    assert torch.equal(live_state_dict(Own())["mine"], torch.full((2,), 2.0))
    assert has_own_state_dict(nn.Sequential(nn.Linear(1, 1), Own()))


CHECKS = {check_parts: 2, check_state_dicts: 2}
CHECKS |= {check_strided: 4, check_siblings: 4}


def test_dtensors_their_meshes_and_state_dicts_are_those_of_torch() -> None:
    run_each({check: (world, check) for check, world in CHECKS.items()})
