"""Checks that ranks have equal batches, losses, draws and gradients, and that they run as many steps.

Else training would silently be wrong. If a check of any group fails, every rank of the world raises an
UnsupportedCodeError, unless the check says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
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
from lightning_shardckpt.system.tensor_digest import bit_digest
from lightning_shardckpt.system.text import list_some

_LOSS_SPREAD = 1e-4  # relative, of losses in float32
_SHORT_SPREAD = 0.02  # of losses in a shorter dtype: replicas agree to the precision of bfloat16
_GRADIENT_SPREAD = 0.05  # relative to the norm, which the difference of two unrelated gradients exceeds
_FACTOR = 0x1E3779B97F4A7C15  # odd
SAME_SAMPLES = (
    "Every rank of the group must load the same samples: call seed_everything before the script draws random data, use "
    "strategy.distributed_sampler_kwargs (Lightning does for samplers that it adds), and seed random augmentations by "
    "the data-parallel rank."
)


@torch.no_grad()
def check_batch(batch: Any, group: dist.ProcessGroup, *, of_all_groups: bool = True) -> None:
    """Check that the ranks of ``group`` have equal batches, by shapes and checksums of tensors.

    Collective: every rank of the world must call it; without ``of_all_groups``, every rank of ``group``; these raise.
    """
    digest, on_gpu = fingerprint([item for item in _contents(batch) if isinstance(item, Tensor)])
    every = gather_numbers(torch.tensor([digest, 0 if on_gpu is None else int(on_gpu.read())]), group)
    differ = bool((every != every[0]).any())  # the same on each of them
    if any_rank(differ) if of_all_groups else differ:
        raise UnsupportedCodeError(
            f"the ranks of a tensor-parallel group got different batches; rank {dist.get_rank()} compared ranks "
            f"{dist.get_process_group_ranks(group)}. {SAME_SAMPLES}"
        )


@torch.no_grad()
def check_loss(loss: Tensor, group: dist.ProcessGroup) -> None:
    """Check that the losses of the ranks of ``group`` differ by no more than rounding.

    Collective: every rank of the world must call it.
    """
    if isinstance(loss, DTensor):
        raise UnsupportedCodeError(
            f"the loss is a DTensor ({loss.placements}), since it depends on what the forward of a module that "
            "tensor_parallel_plan shards computes from its own weight. Compute that outside of the forward, or leave "
            "the module out of the plan."
        )
    every = gather_numbers(loss.detach().double().sum(), group)
    spread = _SHORT_SPREAD if loss.dtype in (torch.float16, torch.bfloat16) else _LOSS_SPREAD
    if any_rank(bool(every.amax() - every.amin() > spread * every.abs().amax())):
        raise UnsupportedCodeError(
            f"the ranks of a tensor-parallel group have different losses, here {every.tolist()}: the step "
            "uses an activation of which each rank has a part, between a column-wise and a row-wise layer. Give the "
            'column-wise one the style "colwise_gather_output", or use the output of the row-wise one.'
        )


_SAME_STEPS = (
    "all ranks that share parameters must run as many steps, and all ranks in a validation during fit. Give every rank "
    "as many batches, or limit them (limit_val_batches, limit_test_batches, limit_predict_batches)"
)


def check_lengths(batches: Sequence[float], group: dist.ProcessGroup) -> None:
    """Compare over ``group``, whose ranks step together, how many batches each loader of an evaluation has.

    Collective: every rank of the world must call it.
    """
    every = gather_numbers(torch.tensor(batches, dtype=torch.float64), group)
    if any_rank(bool((every != every[0]).any())):
        raise UnsupportedCodeError(
            f"data-parallel ranks have different numbers of batches, here {every.tolist()}: {_SAME_STEPS}. Predict "
            "needs a DistributedSampler(dataset, shuffle=False, **trainer.distributed_sampler_kwargs)."
        )


def check_ends(is_last: bool, group: dist.ProcessGroup) -> None:
    """Compare over ``group``, whose ranks step together, whether the batch of an evaluation is the last one.

    Collective: every rank of `group` must call it, and only these raise.
    """
    if bool((gather_numbers(torch.tensor([is_last]), group) != is_last).any()):
        here, there = ("ends", "does not end") if is_last else ("does not end", "ends")
        raise UnsupportedCodeError(
            f"the loader of an evaluation, which has no length, {here} with this batch, but {there} on other "
            f"data-parallel ranks: {_SAME_STEPS}."
        )


@torch.no_grad()
def fingerprint(batch: Any) -> tuple[int, HostCopy | None]:
    """Return a hash of a batch, and a copy in flight of the hash of its tensors on a GPU."""
    marks, on_gpu = list[Any](), list[Tensor]()
    for item in _contents(batch):
        if isinstance(item, Tensor):
            digest = bit_digest(item)
            marks.append((tuple(item.shape), digest.item() if digest.is_cpu else "on a GPU"))
            on_gpu += [] if digest.is_cpu else [digest]
        else:
            marks.append(item)
    total = None if not on_gpu else reduce(lambda sum, digest: sum * _FACTOR + digest.to(sum.device), on_gpu)
    return xxhash.xxh3_64_intdigest(repr(marks).encode()) >> 3, None if total is None else HostCopy(total)


@torch.no_grad()
def check_gradients(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that gradients of replicated parameters of ``root`` differ over ``group`` by no more than rounding.

    Collective: every rank of the world must call it.
    """
    names, differ = list[str](), list[Tensor]()
    for name, parameter in own_parameters(root):
        if parameter.requires_grad and not _is_sharded(parameter, group):
            own = local_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            if own.numel():
                first = own.clone(memory_format=torch.contiguous_format)
                dist.broadcast(first, group=group, group_src=0)
                wide = torch.promote_types(own.dtype, torch.float32)
                off, largest = (torch.linalg.vector_norm(t, dtype=wide) for t in (own - first, first))
                names.append(name)
                differ.append(off > _GRADIENT_SPREAD * largest)
    every = gather_numbers(torch.stack(differ), group).any(0).tolist() if differ else []
    differing = [name for name, flag in zip(names, every, strict=True) if flag]
    if any_rank(bool(differing)):
        raise UnsupportedCodeError(
            f"{len(differing)} replicated parameters have different gradients on the ranks of a tensor-parallel group: "
            f"{list_some(differing, 5)}. Their modules see only a part of the heads or columns: give them the style "
            '"replicated_with_grad_allreduce" in tensor_parallel_plan.'
        )


def _contents(tree: Any) -> Iterator[Any]:
    """Yield the tensors of a batch, made dense, and its strings and numbers."""
    if isinstance(tree, Tensor):
        yield from tree.unbind() if tree.is_nested else [tree if tree.layout == torch.strided else tree.to_dense()]
    elif isinstance(tree, str | bytes | int | float | complex):
        yield tree
    elif isinstance(tree, np.ndarray):
        yield tree.tobytes()
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _contents(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _contents(getattr(tree, field.name))


def _is_sharded(parameter: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether ``parameter`` is sharded over the ranks of ``group``."""
    if not isinstance(parameter, DTensor):
        return False
    groups = zip(parameter.device_mesh.get_all_groups(), parameter.placements, strict=True)
    ranks = [dist.get_process_group_ranks(one) for one, placement in groups if not placement.is_replicate()]
    return dist.get_process_group_ranks(group) in ranks
