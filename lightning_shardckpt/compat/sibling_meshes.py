"""Find the meshes that are slices of one root mesh along the same axes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def sibling_ranks(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh and of all its siblings, the same on every rank: of shape ``(how many, *mesh.shape)``.

    Relies on ``DeviceMesh._layout`` and ``_rank_map`` of torch 2.13: which ranks the root has, and how this mesh's axes
    run through them. ``mesh.mesh`` has the ranks of this one alone.
    """
    return mesh._layout.remap_to_tensor(mesh._rank_map)
