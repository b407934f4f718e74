"""Gather of one sharded tensor, for code outside of units; its backward reduces the gradient.

The gradient of a whole tensor is the gradient of this rank's loss; the gradient of a shard is the gradient of the mean
of all losses. So a whole gradient is averaged over the data axes, and every rank keeps its rows.

Ranks announce both over gloo before they begin, so that a mismatch is an error on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lightning_shardckpt.compat.dtensor import DTensorSpec, local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import is_batched
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placement import Sharding, describe, model_shape, own_rows, resolve_sharding

PARTIAL = "_shardckpt_partial"
"""Attribute of a parameter: the tensor-parallel group on whose ranks its gradients are partial sums."""
RECEIVER = "_shardckpt_receiver"
"""Attribute of a parameter that ``fully_shard`` gathers: a function that adds rows to its gradient after a backward."""
GATHERED = "_shardckpt_gathered"
"""Attribute of the autograd nodes whose outputs are gathered parameters."""
REMEDY = "Leave that module whole: ShardedStrategy(fsdp=FSDP(ignored=[…]))"
_ABSENT = "_shardckpt_absent"
_PART = "_shardckpt_part"


def takes_gradients_late(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter of ``fully_shard``; autograd must reach it only through `Gather`."""
    return RECEIVER in tensor.__dict__


@dataclass(frozen=True, slots=True)
class GatherItem:
    """The layout of a sharded tensor and of the gathered one.

    Attributes:
        name: describes the tensor, for messages.
        spec: the spec of the sharded tensor.
        whole_spec: the spec after the gather; None unless a tensor-parallel plan shards the tensor.
        shape: the shape of this rank's part over the tensor-parallel axes.
        home: the device of the shard.
        partial: the group of `PARTIAL`, if any.
    """

    name: str
    spec: DTensorSpec
    whole_spec: DTensorSpec | None
    sharding: Sharding
    shape: torch.Size
    home: torch.device
    partial: dist.ProcessGroup | None

    @classmethod
    def of(cls, shard: DTensor) -> GatherItem:
        spec = spec_of(shard)
        sharding = resolve_sharding(spec.mesh, tuple(spec.placements))
        whole = None
        if sharding.model_mesh is not None:
            whole = DTensorSpec(sharding.model_mesh, sharding.model, tensor_meta=spec.tensor_meta)
        assert spec.tensor_meta is not None
        shape, partial = model_shape(spec.tensor_meta.shape, sharding), shard.__dict__.get(PARTIAL)
        return cls(describe(shard), spec, whole, sharding, shape, local_tensor(shard).device, partial)

    def wrap(self, gathered: Tensor) -> Tensor:
        """Wrap a gathered tensor as the DTensor that the tensor-parallel plan expects, if the plan shards it."""
        return gathered if self.whole_spec is None else new_dtensor(gathered, self.whole_spec)

    @torch.no_grad()
    def gather(self, local: Tensor, what: str, device: torch.device) -> Tensor:
        """Return the whole tensor, in new memory if its rows are sharded.

        Collective: every rank that has a shard must call it.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks ask for different values.
        """
        peers = self.sharding.shard
        if peers is None:
            return self.wrap(local.detach().to(device))
        peers.share(what)
        padded = -(-self.shape[0] // peers.size) * self.shape[1:].numel()
        flat = torch.empty(padded, dtype=local.dtype, device=device)
        flat[: local.numel()].copy_(local.reshape(-1))
        memory = peers.gather_read(flat, what)  # no view of it, so that user code may change the result in place
        gathered = memory.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), self.shape)  # type: ignore[call-overload]  # typed since 2.13
        return self.wrap(gathered)

    @torch.no_grad()
    def reduce(self, gradient: Tensor | None, device: torch.device) -> DTensor | None:
        """Return this rank's rows of the mean of a whole gradient over the data axes; None if no rank has one.

        Collective: every rank that has a shard, and every replica of it, must call it.

        Args:
            gradient: this rank's whole gradient, or None.
            device: where to reduce it.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks reduce gradients of different tensors.
        """
        exists = gradient is not None
        for peers in self.sharding.data_axes:
            exists = any(numbers[0] for numbers in peers.compare(f"the gradient of {self.name}", float(exists)))
        if not exists:
            return None
        if gradient is None:
            assert self.spec.tensor_meta is not None
            gradient = torch.zeros(self.shape, dtype=self.spec.tensor_meta.dtype, device=device)
        total = local_tensor(gradient).contiguous() / self.sharding.batches
        for group in (*(peers.group for peers in self.sharding.data_axes), self.partial):
            if group is not None:
                dist.all_reduce(total, group=group)
        return new_dtensor(own_rows(total, self.sharding).to(self.home, copy=True), self.spec)


def refuse_sparse(gradient: Tensor | None) -> None:
    """Raise for a sparse gradient, as of nn.Embedding(sparse=True), which does not fit into flat buffers."""
    if gradient is not None and gradient.layout != torch.strided:
        raise UnsupportedCodeError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse. Make the module without "
            "sparse=True: gradients of parameters on several ranks must be dense."
        )


def refuse_batched(gradient: Tensor) -> None:
    """Raise for a batched gradient of vmap, which collectives can't reduce."""
    if is_batched(gradient):
        raise UnsupportedCodeError(
            "a backward of a batch of gradients (is_grads_batched=True, vmap, torch.func.jacrev) goes through tensors "
            "whose gradients several ranks reduce. Call torch.autograd.grad for each gradient, in a loop."
        )


def absent_gradient(whole: Tensor) -> Tensor:
    """Return a marked zero gradient for a gathered tensor that has no gradient on this rank, but may on others."""
    zeros = torch.zeros_like(whole)
    zeros.__dict__[_ABSENT] = True
    return zeros


def gradient_or_none(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that a backward got; None for one made by `absent_gradient`."""
    return None if gradient is None or _ABSENT in gradient.__dict__ else gradient


class Gather(torch.autograd.Function):
    """Gathers a shard. The engine adds gradients of parameters of ``fully_shard`` after the backward."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor, item: GatherItem, what: str, device: torch.device) -> Tensor:
        ctx.item, ctx.device, ctx.receive = item, device, shard.__dict__.get(RECEIVER)
        setattr(ctx, GATHERED, True)
        ctx.set_materialize_grads(False)
        return item.gather(local_tensor(shard), what, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        gradient = gradient_or_none(gradient)
        if gradient is not None:
            gradient = reduce_part(ctx.item.sharding.model, ctx.item.name, gradient)
        reduced = ctx.item.reduce(gradient, ctx.device)
        if ctx.receive is not None:
            ctx.receive(reduced)
            reduced = None
        return reduced, None, None, None


def is_part(leaf: Tensor) -> bool:
    """Return whether `reduce_part` keeps the gradients of a parameter of a tensor-parallel plan whole."""
    return _PART in leaf.__dict__


def mark_part(leaf: DTensor) -> None:
    """Let a parameter that only a tensor-parallel plan shards compute by itself: no rank has another batch."""
    leaf.__dict__[_PART] = True


def reduce_part(placements: Sequence[Placement], name: str, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter with its tensor-parallel placements.

    Raises:
        UnsupportedCodeError: for one that is sparse, batched, or to be differentiated.
    """
    if torch.is_grad_enabled():
        raise UnsupportedCodeError(
            f"the gradient of {name} is differentiated (create_graph=True), but several ranks reduce it. {REMEDY}"
        )
    refuse_sparse(gradient)
    refuse_batched(gradient)
    if isinstance(gradient, DTensor) and tuple(gradient.placements) != tuple(placements):  # such as a partial sum
        gradient = gradient.redistribute(placements=placements)
    return gradient
