"""Every rank knows the ranks of all slices of a mesh along the same axes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_shardckpt.compat.sibling_meshes import sibling_ranks
from tests.support.pool import run_ranks


def found() -> list[list[object]]:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for mesh in (whole, whole["a"], whole["b"]):
        assert any(torch.equal(one, mesh.mesh) for one in sibling_ranks(mesh)), "its own ranks are among them"
    return [sibling_ranks(mesh).tolist() for mesh in (whole, whole["a"], whole["b"])]


def test_the_ranks_of_all_slices_are_known_everywhere() -> None:
    assert run_ranks(4, found) == [[[[[0, 1], [2, 3]]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]] * 4
