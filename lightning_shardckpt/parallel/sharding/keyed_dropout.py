"""Dropout by a hash of (seed, epoch, sample, module, element), which is the same under any topology.

There is no random state, and no order of draws. Samples may be computed on any rank and in any microbatch, and parts of
an activation on any tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shardckpt.compat.torch_autograd import in_backward
from lightning_shardckpt.compat.torch_modules import mix_in, mix_out
from lightning_shardckpt.distributed.host_numbers import gather_numbers
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.sample_numbers import SampleNumbers, running_samples
from lightning_shardckpt.system.tensor_digest import bit_digest

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64
_MOST_ELEMENTS = 1 << 22
"""The number of elements that are hashed at once, with 32 MiB of temporary numbers."""

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that drop whole channels."""

OTHER_RANDOM = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
"""Modules of torch that draw random numbers in another way than `nn.Dropout`."""


@dataclass(frozen=True, slots=True)
class DimPart:
    """A part of a dim of an activation.

    Attributes:
        dim: the dim.
        start: where the part begins.
        size: the size of the whole dim.
    """

    dim: int
    start: int
    size: int


def keep_mask(keys: Tensor, row: Sequence[int], p: float, part: DimPart | None = None) -> Tensor:
    """Return a mask of the elements to keep, each with probability ``1 - p``.

    Args:
        keys: a 64-bit number for each row, ``[rows]``; rows with the same key have the same mask.
        row: the shape of this rank's part of a row.
        p: the probability to drop an element.
        part: the dim of a row (0 is the first) of which this rank has a part; None if it has whole rows.

    Returns:
        A bool tensor of shape ``[rows, *row]``, on the device of ``keys``.
    """
    words = _mix(_positions(row, part, keys.device)).flatten()
    threshold = min(int((p - 0.5) * 2.0**64), 2**63 - 1)
    kept = torch.empty((len(keys), words.numel()), dtype=torch.bool, device=keys.device)
    step = max(1, _MOST_ELEMENTS // max(1, words.numel()))
    for first in range(0, len(keys), step):
        hashes = words ^ keys[first : first + step, None]
        hashes *= _MIX[0]
        hashes ^= (hashes >> 32) & 0xFFFFFFFF
        hashes *= _MIX[1]
        torch.ge(hashes, threshold, out=kept[first : first + step])
    return kept.view(len(keys), *row)


def row_keys(seed: int, samples: SampleNumbers, fqn: str, call: int, device: torch.device) -> Tensor:
    """Return an int64 key for each sample in one call of a module, ``[samples]``."""
    text = f"{seed} {samples.epoch} {call} {fqn}".encode()
    stream = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return _mix(samples.numbers * _GOLDEN + stream).to(device)


def _mix(x: Tensor) -> Tensor:
    """Apply the last steps of splitmix64. The masks remove the sign bits that torch's shifts copy."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _positions(row: Sequence[int], part: DimPart | None, device: torch.device) -> Tensor:
    """Return the positions of this rank's elements in the whole row, times an odd constant, in the shape of ``row``."""
    if part is None:
        return torch.arange(1, prod(row) + 1, device=device).view(tuple(row)) * _GOLDEN
    inner = prod(row[part.dim + 1 :])
    outer = torch.arange(prod(row[: part.dim]), device=device) * (part.size * inner)
    here = torch.arange(part.start * inner, (part.start + row[part.dim]) * inner, device=device)
    return ((outer[:, None] + here + 1) * _GOLDEN).view(tuple(row))


@dataclass(slots=True)
class DropoutSettings:
    """The settings of a dropout module.

    Attributes:
        fqn: the name of the module in the model, which is part of the hash.
        seed: the seed of all dropouts.
        samples_dim: the dim of the input with the samples.
        tensor_group: the ranks whose replicated activations must be equal; None to check none.
        call: the number of the running call for its samples.
        is_checked: whether an activation has been checked.
    """

    fqn: str
    seed: int
    samples_dim: int = 0
    tensor_group: dist.ProcessGroup | None = None
    call: int = 0
    is_checked: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> DropoutSettings:
        """Return itself, so that a module can be copied: a process group can't."""
        return self


class KeyedDropout(nn.Module):
    """A mixin for dropout modules: drops by samples if running samples are set, else as torch does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        samples, settings = running_samples(), _settings(self)
        if samples is not None and self.training:
            settings.call = _call_number(samples, settings.fqn)
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        samples = running_samples()
        if samples is None or not self.training:
            return super().forward(x)  # type: ignore[no-any-return]  # the dropout's
        if isinstance(x, DTensor):
            local, part = _local_part(x, _settings(self).fqn)
            output = _drop(self, local, part, samples)
            return DTensor.from_local(
                output, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
            )
        return _drop(self, x, _part_of_shard(self, x), samples)


def key_dropout(module: nn.Module, settings: DropoutSettings) -> None:
    """Make a dropout drop by samples, until ``unkey_dropout``."""
    module.__dict__["_shardckpt_dropout"] = settings
    mix_in(module, KeyedDropout)


def unkey_dropout(module: nn.Module) -> None:
    """Undo ``key_dropout``."""
    if isinstance(module, KeyedDropout):
        mix_out(module, KeyedDropout)
        del module.__dict__["_shardckpt_dropout"]


def can_key_dropout(module: nn.Module) -> bool:
    """Return whether a module is a dropout of torch that `key_dropout` supports."""
    return isinstance(module, (nn.Dropout, *_CHANNELS))


def _settings(module: nn.Module) -> DropoutSettings:
    settings: DropoutSettings = module.__dict__["_shardckpt_dropout"]
    return settings


def _call_number(samples: SampleNumbers, fqn: str) -> int:
    """Count the calls for these samples. In a backward, activation checkpointing repeats a call.

    Raises:
        UnsupportedCodeError: in a backward, if there were several calls: any of them may be the repeated one.
    """
    if not in_backward():
        samples.calls[fqn] += 1
        return samples.calls[fqn]
    if samples.calls[fqn] > 1:
        raise UnsupportedCodeError(
            f"dropout {fqn} was called {samples.calls[fqn]} times for a sample, and activation checkpointing calls it "
            "again in the backward pass: which call that repeats is unknown. Use a separate module for each call, or "
            "no activation checkpointing."
        )
    return 1


def _drop(module: Any, x: Tensor, part: DimPart | None, samples: SampleNumbers) -> Tensor:
    settings = _settings(module)
    dim = settings.samples_dim
    if x.ndim <= dim or x.shape[dim] != len(samples.numbers):
        raise UnsupportedCodeError(
            f"dropout {settings.fqn} got a tensor of shape {tuple(x.shape)}, but dim {dim} should have the "
            f"{len(samples.numbers)} samples of the batch. Say which dim has them: DropoutBySample(samples_dim="
            f"{{{settings.fqn!r}: …}}); a dim that joins samples with other dims can't be used."
        )
    if not settings.is_checked:
        settings.is_checked = True
        if part is None and settings.tensor_group is not None:
            _check_replicated(x, settings)
    if module.p == 0.0:
        return x
    rows = x.movedim(dim, 0)
    channels = isinstance(module, _CHANNELS)
    row = [rows.shape[1], *[1] * (rows.ndim - 2)] if channels else rows.shape[1:]
    row_part = None
    if part is not None:
        part_dim = part.dim % x.ndim
        if part_dim == dim:
            raise UnsupportedCodeError(f"dropout {settings.fqn}: samples can't be sharded over the tensor axis")
        row_part = DimPart(part_dim if part_dim < dim else part_dim - 1, part.start, part.size)
    keys = row_keys(settings.seed, samples, settings.fqn, settings.call, x.device)
    dropped = ~keep_mask(keys, row, module.p, row_part).movedim(0, dim)
    scale = 1.0 / (1.0 - module.p) if module.p < 1.0 else 1.0
    return x.masked_fill_(dropped, 0).mul_(scale) if module.inplace else x.masked_fill(dropped, 0) * scale


def _check_replicated(x: Tensor, settings: DropoutSettings) -> None:
    """Check that an activation is equal on all tensor-parallel ranks. Collective: each of them must call it.

    Raises:
        UnsupportedCodeError: on all of them, if it is not.
    """
    own = torch.tensor([int(bit_digest(x)), x.numel()])
    if bool((gather_numbers(own, settings.tensor_group) != own).any()):
        raise UnsupportedCodeError(
            f"dropout {settings.fqn} gets another tensor on each tensor-parallel rank: a part of an activation. Say "
            f"of which dim in tensor_parallel_plan: {{{settings.fqn!r}: ShardedDropout(dim=-1)}}"
        )


# --- parts of activations ---


class ShardedDropout(ParallelStyle):
    """A style of tensor_parallel_plan for a dropout whose input is this rank's part of a dim, as after "colwise".

    It drops the elements that a dropout of the whole activation would drop. Without it, all ranks drop the elements at
    the same positions of their parts.

    Args:
        dim: the dim of the input of which each tensor-parallel rank has an equal part. -1 for columns; 1 for the heads
            of attention weights ``[samples, heads, queries, keys]``.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            raise NotImplementedError("ShardedDropout is for nn.Dropout")
        module.__dict__["_shardckpt_shard"] = (self.dim, device_mesh.size(), device_mesh.get_local_rank())
        mix_in(module, _PartOfDropout)
        return module


class _PartOfDropout(nn.Module):
    """A mixin for dropout modules: drops the elements of a part that a dropout of the whole would drop."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        part = _part_of_shard(self, x)
        assert part is not None
        whole = list(x.shape)
        whole[part.dim] = part.size
        noise = nn.functional.dropout(x.new_ones(whole), module.p, module.training)
        return x * torch.narrow(noise, part.dim, part.start, x.shape[part.dim])


def _part_of_shard(module: nn.Module, x: Tensor) -> DimPart | None:
    """Return the part that the input of a ``ShardedDropout`` is; None for other dropouts."""
    shard: tuple[int, int, int] | None = module.__dict__.get("_shardckpt_shard")
    if shard is None:
        return None
    dim, size, rank = shard
    width = x.shape[dim]
    return DimPart(dim % x.ndim, rank * width, size * width)


def _local_part(x: DTensor, fqn: str) -> tuple[Tensor, DimPart | None]:
    """Return this rank's part of a DTensor, such as an activation of SequenceParallel."""
    shards = [(axis, p.dim % x.ndim) for axis, p in enumerate(x.placements) if isinstance(p, Shard)]
    if len(shards) > 1 or any(p.is_partial() for p in x.placements):
        raise UnsupportedCodeError(f"dropout {fqn} got a DTensor with {x.placements}; at most one dim may be sharded")
    local = x.to_local()
    if not shards:
        return local, None
    axis, dim = shards[0]
    size = x.shape[dim]
    most = -(-size // x.device_mesh.size(axis))  # as torch.chunk
    return local, DimPart(dim, min(size, most * x.device_mesh.get_local_rank(axis)), size)
