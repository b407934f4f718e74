"""Joined device meshes, as `compat.device_mesh` makes them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_shardckpt.compat.device_mesh import joined_mesh
from tests.support.pool import run_ranks


def check_joined() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    groups = dist.distributed_c10d._world.group_count
    joined = joined_mesh([root["b"], root["a"]])
    assert dist.distributed_c10d._world.group_count == groups  # none was made
    assert joined.mesh_dim_names == ("b", "a")
    assert joined.mesh.tolist() == root.mesh.T.tolist()
    assert dist.get_process_group_ranks(joined.get_group("a")) == dist.get_process_group_ranks(root.get_group("a"))


def test_a_joined_mesh_has_all_axes_and_their_groups() -> None:
    run_ranks(4, check_joined)
