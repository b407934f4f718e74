"""Join device meshes into one."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh with the axes of all ``meshes``, slices of one root mesh, in that order, and their process groups.

    Checked with torch 2.12 to 2.15. The public way, slicing the root, is not possible for meshes of different roots
    (torch 2.13).
    """
    return DeviceMesh._concatenate(list(meshes))
