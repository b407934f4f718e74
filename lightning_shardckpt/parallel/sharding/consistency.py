"""Check that the ranks of a tensor-parallel group, which compute one thing together, start from the same.

Different batches, or a replicated parameter whose gradient covers only a part of the heads, make a training silently
wrong. Both show at once and cost little to look for: the first batch of an epoch, the first backward of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.distributed.host_numbers import HostCopy, any_rank, gather_numbers
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.fqn import own_parameters
from lightning_shardckpt.system.tensor_digest import bit_digest, digest_values

_SPREAD = 0.02  # relative; replicas that compute the same thing agree to the precision of bfloat16
_GRADIENT_SPREAD = 0.05  # of a gradient's norm: the difference of two that have nothing in common is larger than it
_PROJECTIONS = 4  # on so many directions
_PIECE = 1 << 18  # elements that are looked at together
_STEP = 0x1E3779B97F4A7C15  # odd
_LOSS_SPREAD = 1e-4  # of losses in float32


@torch.no_grad()
def check_batch(batch: Any, group: dist.ProcessGroup) -> None:
    """Compare the tensors of ``batch`` over ``group`` by shape and checksums.

    Collective: every rank of the world must call it.

    Raises:
        UnsupportedCodeError: on every rank, if the batches of any group differ.
    """
    tensors = [item for item in _contents(batch) if isinstance(item, Tensor)]
    own = torch.tensor([fingerprint(tensors)])
    if any_rank(bool((gather_numbers(own, group) != own).any())):
        ranks = dist.get_process_group_ranks(group)
        raise UnsupportedCodeError(
            f"the ranks of a tensor-parallel group got different batches; rank {dist.get_rank()} compared ranks "
            f"{ranks}. Every rank of a group must load the same samples: use strategy.distributed_sampler_kwargs "
            "(Lightning does for samplers that it adds), and seed random augmentations by the data-parallel rank."
        )


@torch.no_grad()
def check_loss(loss: Tensor, group: dist.ProcessGroup) -> None:
    """Compare a loss over ``group``, whose ranks compute it from the same batch.

    Collective: every rank of the world must call it.

    Raises:
        UnsupportedCodeError: on every rank, if it differs in any group by more than rounding.
    """
    if isinstance(loss, DTensor):
        raise UnsupportedCodeError(
            f"the loss is a DTensor ({loss.placements}), of which each rank of a tensor-parallel group has a part: the "
            "forward of a module that tensor_parallel_plan shards computes with its weight by itself, and the step "
            "uses the result. Compute it outside of that forward, or leave the module out of the plan."
        )
    every = gather_numbers(loss.detach().double().sum(), group)
    spread = _SPREAD if loss.dtype in (torch.float16, torch.bfloat16) else _LOSS_SPREAD
    if any_rank(bool(every.amax() - every.amin() > spread * every.abs().amax())):
        raise UnsupportedCodeError(
            f"the ranks of a tensor-parallel group have different losses, here {every.tolist()}: the step "
            "uses an activation of which each rank has a part, between a column-wise and a row-wise layer. Give the "
            'column-wise one the style "colwise_gather_output", or use what comes after the row-wise one.'
        )


@torch.no_grad()
def fingerprint(batch: Any) -> int:
    """A number that differs between different batches, but for chance: of the bits of tensors, and the rest."""
    contents = list(_contents(batch))
    tensors = [item for item in contents if isinstance(item, Tensor)]
    digests = zip([tuple(tensor.shape) for tensor in tensors], digest_values(map(bit_digest, tensors)), strict=True)
    marks = [next(digests) if isinstance(item, Tensor) else item for item in contents]
    return xxhash.xxh3_64_intdigest(repr(marks).encode()) >> 3


@torch.no_grad()
def fingerprint_without_wait(batch: Any) -> tuple[int, HostCopy | None]:
    """What `fingerprint` tells without a wait for a device, and a number of the tensors on a GPU, on its way."""
    contents = list(_contents(batch))
    far = [item for item in contents if _is_far(item)]
    known = fingerprint([tuple(item.shape) if _is_far(item) else item for item in contents])
    digest = torch.zeros((), dtype=torch.int64, device=far[0].device) if far else None
    for item in far:
        assert digest is not None
        digest = digest * _STEP + bit_digest(item).to(digest.device)
    return known, None if digest is None else HostCopy(digest)


@torch.no_grad()
def check_gradients(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare the gradients of the parameters of ``root`` that ``group`` replicates.

    Collective: every rank of the world must call it.

    Raises:
        UnsupportedCodeError: on every rank, if those of any group differ by more than rounding.
    """
    trained = [(name, p, p.grad) for name, p in own_parameters(root) if p.grad is not None]
    kept = [(name, local_tensor(gradient)) for name, p, gradient in trained if not _is_sharded(p, group)]
    wrong: list[str] = []
    if kept:
        projections = [_projections(gradient).to(kept[0][1].device) for _, gradient in kept]
        every = gather_numbers(torch.stack(projections), group)
        spread = (every.amax(0) - every.amin(0))[:, 1:].amax(-1)
        differs = spread > _GRADIENT_SPREAD * every[..., 0].amax(0)
        wrong = [name for (name, _), bad in zip(kept, differs.tolist(), strict=True) if bad]
    if any_rank(bool(wrong)):
        raise UnsupportedCodeError(
            f"{len(wrong)} replicated parameters have different gradients on the ranks of a tensor-parallel group: "
            f"{', '.join(wrong[:5])}{', …' if len(wrong) > 5 else ''}. The modules that own them see only a part of "
            'the heads or columns: give them the style "replicated_with_grad_allreduce" in tensor_parallel_plan.'
        )


def _projections(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient and its products with some random directions, the same on all ranks.

    A sum of it would not do: it is the same for another order, and nearly so for the parts of a large gradient.
    """
    generator, values, device = torch.Generator().manual_seed(0), gradient.flatten(), gradient.device
    length = min(len(values), _PIECE)
    directions = torch.randn(_PROJECTIONS, length, generator=generator, dtype=torch.float64, device="cpu").to(device)
    found = torch.zeros(1 + _PROJECTIONS, dtype=torch.float64, device=device)
    for at in range(0, len(values), _PIECE):
        piece = values[at : at + _PIECE].double()
        scale = float(torch.rand((), generator=generator, device="cpu")) + 0.5  # since pieces may change places
        found += torch.cat([piece.square().sum()[None], scale * (directions[:, : len(piece)] @ piece)])
    return torch.cat([found[:1].sqrt(), found[1:]])


def _is_far(item: Any) -> bool:
    return isinstance(item, Tensor) and not item.is_cpu


def _contents(tree: Any) -> Iterator[Any]:
    """Dense tensors, strings and numbers of a batch."""
    if isinstance(tree, Tensor):
        yield from _dense(tree)
    elif isinstance(tree, str | bytes | int | float | complex):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _contents(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _contents(value)
    elif isinstance(tree, np.ndarray):
        yield tree.tobytes()
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _contents(getattr(tree, field.name))


def _dense(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or what a sparse or nested one is made of."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor.coalesce().indices(), tensor.coalesce().values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def _is_sharded(parameter: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether ``parameter`` is sharded over the ranks of ``group``."""
    if not isinstance(parameter, DTensor):
        return False
    ranks = dist.get_process_group_ranks(group)
    return any(
        not placement.is_replicate() and dist.get_process_group_ranks(parameter.device_mesh.get_group(axis)) == ranks
        for axis, placement in enumerate(parameter.placements)
    )
