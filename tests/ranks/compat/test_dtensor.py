"""Local tensors, specs and strided shards of DTensors, as `compat.dtensor` names them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shardckpt.compat.dtensor import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    local_tensor,
    look_for_anomalies_in_rows,
    new_dtensor,
    replace_local,
    shape_of,
    spec_of,
)
from lightning_shardckpt.compat.tensor_subclass import local_part
from tests.support.pool import run_ranks


def check_parts() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    whole = torch.arange(10.0).view(5, 2)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    mine = whole[:3] if dist.get_rank() == 0 else whole[3:]
    assert torch.equal(local_tensor(tensor), mine) and not isinstance(local_tensor(tensor), DTensor)
    assert local_tensor(tensor).data_ptr() == tensor.to_local().data_ptr()
    assert local_tensor(whole) is whole and local_part(tensor) is local_tensor(tensor)
    assert shape_of(tensor) == shape_of(whole) == whole.shape
    spec = spec_of(tensor)
    assert spec == DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    assert hash(spec) == hash(spec_of(distribute_tensor(whole, mesh, [Shard(0)])))
    local = local_tensor(tensor).clone()
    made = new_dtensor(local, spec)
    assert made.shape == whole.shape and made.placements == (Shard(0),) and made.device_mesh == mesh
    assert local_tensor(made).data_ptr() == local.data_ptr()
    assert not made.requires_grad and torch.equal(made.full_tensor(), whole)
    other = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch's
    assert vars(made) == vars(other) and made.stride() == other.stride() and made.dtype == other.dtype  # by __init__
    replace_local(made, distribute_tensor(whole + 1, mesh, [Replicate()]))
    assert made.placements == (Replicate(),) and torch.equal(local_tensor(made), whole + 1)


def check_nan_of_rows() -> None:
    """One rank has a row whose gradient is NaN: it raises, the other one has nothing to raise for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    end = look_for_anomalies_in_rows()
    values = distribute_tensor(torch.tensor([1.0, 0.0]), mesh, [Shard(0)]).requires_grad_()
    gradient = distribute_tensor(torch.tensor([1.0, 0.0]), mesh, [Shard(0)])
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        anomalies = torch.autograd.detect_anomaly()
    with anomalies:
        roots = values.sqrt()  # of which the gradient of 0 is infinite, and times 0 NaN
        with pytest.raises(RuntimeError, match="returned nan values") if dist.get_rank() == 1 else nullcontext():
            roots.backward(gradient)
    end()
    assert torch.ops.aten._is_any_true.default not in DTensor._op_dispatcher._custom_op_handlers


def check_strided() -> None:
    """FSDP over tensor parallelism: the tensor axis, though inner, splits first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.arange(8.0)
    column, row = mesh.get_local_rank("tensor"), mesh.get_local_rank("shard")
    placements = (StridedShard(0, split_factor=2), Shard(0))
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    made = new_dtensor(whole.chunk(2)[column].chunk(2)[row].clone(), spec)
    assert torch.equal(made.full_tensor(), whole)


def test_a_dtensor_is_its_local_tensor_and_its_spec() -> None:
    run_ranks(2, check_parts)


def test_anomalies_are_looked_for_in_the_rows_of_each_rank() -> None:
    run_ranks(2, check_nan_of_rows)


def test_a_strided_shard_is_of_what_the_inner_axes_leave() -> None:
    run_ranks(4, check_strided)
