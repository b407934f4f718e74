"""Drop elements by a function of (seed, epoch, sample, module, element), so that no topology changes what is dropped.

Each decision is a hash of where the element is: no state, no order of draws. Samples may be computed on any rank and in
any microbatch, and parts of an activation on any tensor-parallel rank.
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
"""Hashed at once: 32 MiB of temporary numbers."""

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""These drop whole channels."""

OTHER_RANDOM = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
"""Modules of torch that draw random numbers in another way."""


@dataclass(frozen=True, slots=True)
class DimPart:
    """A part of a dim of an activation: ``size`` of the whole's, and where the part begins."""

    dim: int
    start: int
    size: int


def keep_mask(keys: Tensor, row: Sequence[int], p: float, part: DimPart | None = None) -> Tensor:
    """Return which elements are kept, each with probability ``1 - p``.

    Args:
        keys: a 64-bit number for each row, ``[rows]``; rows with the same key have the same mask.
        row: the shape of what is here of a row.
        part: of which dim of the row (0 is the row's first) that is a part; None if it is whole.

    Returns:
        A bool tensor of shape ``[rows, *row]``, on the device of ``keys``.
    """
    words = _mixed(_places(row, part, keys.device)).flatten()
    threshold = min(int((p - 0.5) * 2.0**64), 2**63 - 1)
    kept = torch.empty((len(keys), words.numel()), dtype=torch.bool, device=keys.device)
    step = max(1, _MOST_ELEMENTS // max(1, words.numel()))
    for first in range(0, len(keys), step):
        some = words ^ keys[first : first + step, None]
        some *= _MIX[0]
        some ^= (some >> 32) & 0xFFFFFFFF
        some *= _MIX[1]
        torch.ge(some, threshold, out=kept[first : first + step])
    return kept.view(len(keys), *row)


def row_keys(seed: int, samples: SampleNumbers, fqn: str, call: int, device: torch.device) -> Tensor:
    """Return a key for each sample, ``[samples]`` of int64: of these samples, in this call of the module."""
    text = f"{seed} {samples.epoch} {call} {fqn}".encode()
    stream = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return _mixed(samples.numbers * _GOLDEN + stream).to(device)


def _mixed(x: Tensor) -> Tensor:
    """The last steps of splitmix64; shifts of torch copy the sign, so that it is masked away."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _places(row: Sequence[int], part: DimPart | None, device: torch.device) -> Tensor:
    """The places of the elements in the whole row, times an odd constant, in the shape of what is here."""
    if part is None:
        return torch.arange(1, prod(row) + 1, device=device).view(tuple(row)) * _GOLDEN
    inner = prod(row[part.dim + 1 :])
    outer = torch.arange(prod(row[: part.dim]), device=device) * (part.size * inner)
    here = torch.arange(part.start * inner, (part.start + row[part.dim]) * inner, device=device)
    return ((outer[:, None] + here + 1) * _GOLDEN).view(tuple(row))


@dataclass(slots=True)
class DropoutSettings:
    """What a dropout has to know besides its input.

    Attributes:
        fqn: its name in the model, which keys its stream.
        seed: of all streams.
        samples_dim: the dim of its input that has the samples.
        tensor_group: ranks whose replicated activations must be equal; None to look at none.
    """

    fqn: str
    seed: int
    samples_dim: int = 0
    tensor_group: dist.ProcessGroup | None = None
    call: int = 0
    looked: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> DropoutSettings:
        """The same: a copy of a module, as StochasticWeightAveraging makes it, is of the same processes."""
        return self


class KeyedDropout(nn.Module):
    """Mixed into the class of a dropout: drops by samples while it is known which ones; else as torch does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        samples, settings = running_samples(), _settings(self)
        if samples is not None and self.training:
            settings.call = _call_number(samples, settings.fqn)
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        samples = running_samples()
        if samples is None or not self.training:
            return super().forward(x)  # type: ignore[no-any-return]  # that of the dropout
        if isinstance(x, DTensor):
            local, part = _local_part(x, _settings(self).fqn)
            kept = _dropped(self, local, part, samples)
            return DTensor.from_local(
                kept, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
            )
        return _dropped(self, x, part_of_shard(self, x), samples)


def key_dropout(module: nn.Module, settings: DropoutSettings) -> None:
    """Let a dropout drop by samples from now on, until ``unkey_dropout``."""
    module.__dict__["_shardckpt_dropout"] = settings
    mix_in(module, KeyedDropout)


def unkey_dropout(module: nn.Module) -> None:
    """Undo ``key_dropout``."""
    if isinstance(module, KeyedDropout):
        mix_out(module, KeyedDropout)
        del module.__dict__["_shardckpt_dropout"]


def can_key_dropout(module: nn.Module) -> bool:
    """Return whether a module is a dropout of torch that can drop by samples."""
    return isinstance(module, (nn.Dropout, *_CHANNELS))


def _settings(module: nn.Module) -> DropoutSettings:
    found: DropoutSettings = module.__dict__["_shardckpt_dropout"]
    return found


def _call_number(samples: SampleNumbers, fqn: str) -> int:
    """Count the calls for these samples. One in a backward pass is by activation checkpointing: it repeats the first.

    Raises:
        UnsupportedCodeError: if it may repeat another one.
    """
    if not in_backward():
        samples.calls[fqn] += 1
        return samples.calls[fqn]
    if samples.calls[fqn] > 1:
        raise UnsupportedCodeError(
            f"dropout {fqn} was called {samples.calls[fqn]} times for a sample, and activation checkpointing calls it "
            "again in the backward pass: it can't be known which call that repeats. Use a module of its own for each "
            "call, or no activation checkpointing."
        )
    return 1


def _dropped(module: Any, x: Tensor, part: DimPart | None, samples: SampleNumbers) -> Tensor:
    settings = _settings(module)
    dim = settings.samples_dim
    if x.ndim <= dim or x.shape[dim] != len(samples.numbers):
        raise UnsupportedCodeError(
            f"dropout {settings.fqn} got a tensor of shape {tuple(x.shape)}, and dim {dim} was to have the "
            f"{len(samples.numbers)} samples of the batch. Say which dim has them: DropoutBySample(samples_dim="
            f"{{{settings.fqn!r}: …}}); a dim that joins samples with something else can't be used."
        )
    if not settings.looked:
        settings.looked = True
        if part is None and settings.tensor_group is not None:
            _check_replicated(x, settings)
    if module.p == 0.0:
        return x
    rows = x.movedim(dim, 0)
    channels = isinstance(module, _CHANNELS)
    row = [rows.shape[1], *[1] * (rows.ndim - 2)] if channels else rows.shape[1:]
    inside = None if part is None else DimPart(_dim_of_row(part.dim % x.ndim, dim, settings), part.start, part.size)
    keys = row_keys(settings.seed, samples, settings.fqn, settings.call, x.device)
    dropped = ~keep_mask(keys, row, module.p, inside).movedim(0, dim)
    scale = 1.0 / (1.0 - module.p) if module.p < 1.0 else 1.0
    return x.masked_fill_(dropped, 0).mul_(scale) if module.inplace else x.masked_fill(dropped, 0) * scale


def _dim_of_row(dim: int, samples_dim: int, settings: DropoutSettings) -> int:
    if dim == samples_dim:
        raise UnsupportedCodeError(f"dropout {settings.fqn}: samples can't be sharded over the tensor axis")
    return dim if dim < samples_dim else dim - 1


def _check_replicated(x: Tensor, settings: DropoutSettings) -> None:
    """Compare an activation between tensor-parallel ranks. Collective: all of them must call it.

    Raises:
        UnsupportedCodeError: on all of them, if they have different ones.
    """
    mine = torch.tensor([int(bit_digest(x)), x.numel()])
    if bool((gather_numbers(mine, settings.tensor_group) != mine).any()):
        raise UnsupportedCodeError(
            f"dropout {settings.fqn} gets another tensor on each tensor-parallel rank: a part of an activation. Say "
            f"of which dim in tensor_parallel_plan: {{{settings.fqn!r}: ShardedDropout(dim=-1)}}"
        )


# --- parts of activations ---


class ShardedDropout(ParallelStyle):
    """A style of tensor_parallel_plan: a dropout whose input is this rank's part of a dim, as after "colwise".

    It drops what dropout of the whole would. Without it, ranks drop the same places of their parts.

    Args:
        dim: of the input, of which each tensor-parallel rank has an equal part. -1 for columns; 1 for the heads of
            attention weights ``[samples, heads, queries, keys]``.
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
    """Drops a part as dropout of the whole does, given the same random state."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        part = part_of_shard(self, x)
        assert part is not None
        whole = list(x.shape)
        whole[part.dim] = part.size
        noise = nn.functional.dropout(x.new_ones(whole), module.p, module.training)
        return x * torch.narrow(noise, part.dim, part.start, x.shape[part.dim])


def part_of_shard(module: nn.Module, x: Tensor) -> DimPart | None:
    """Return which part of its dim a dropout's input is; None of one that is no ``ShardedDropout``."""
    found: tuple[int, int, int] | None = module.__dict__.get("_shardckpt_shard")
    if found is None:
        return None
    dim, size, rank = found
    width = x.shape[dim]
    return DimPart(dim % x.ndim, rank * width, size * width)


def _local_part(x: DTensor, fqn: str) -> tuple[Tensor, DimPart | None]:
    """What this rank has of a tensor of which the ranks know that it is sharded, as with SequenceParallel."""
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
