"""Gather one sharded tensor in a way that autograd knows: its gradient is reduced on the way back.

On every rank, the gradient of a whole tensor is that of this rank's loss; the gradient of a shard is that of the mean
of all losses. So whole gradients are averaged over the data axes, and every rank keeps its rows. Gathering and this
reduction are each other's derivative, and may be differentiated any number of times.

Both are announced on the host before they begin, so ranks that do different things hear of it, on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import DTensorSpec, local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import after_backward, backward_number, in_backward, is_batched
from lightning_shardckpt.compat.torch_distributed import reduce_scatter_single
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.peers import Peers
from lightning_shardckpt.parallel.tensors.placement import Placements, describe, model_shape, placements_of

PARTIAL = "_shardckpt_partial"
"""Attribute of a parameter: the group over whose ranks its gradients are partial sums, besides the data axes."""
_ABSENT = "_shardckpt_absent"


@dataclass(frozen=True, slots=True)
class GatherItem:
    """The layout of a sharded tensor, and of the whole one.

    Attributes:
        name: of the tensor, see `describe`.
        whole_spec: of the tensor as a tensor-parallel plan expects it; None where the plan does not shard it.
        shape: of what the tensor-parallel axes leave to this rank.
        local: the shape of this rank's rows of that.
        home: the device of the shard.
        partial: see `PARTIAL`.
    """

    name: str
    spec: DTensorSpec
    whole_spec: DTensorSpec | None
    where: Placements
    shape: torch.Size
    local: torch.Size
    home: torch.device
    partial: dist.ProcessGroup | None

    @classmethod
    def of(cls, shard: DTensor) -> GatherItem:
        spec = spec_of(shard)
        where = placements_of(spec.mesh, tuple(spec.placements))
        local, whole = local_tensor(shard), None
        if where.model_mesh is not None:
            whole = DTensorSpec(where.model_mesh, where.model, tensor_meta=spec.tensor_meta)
        assert spec.tensor_meta is not None
        shape, partial = model_shape(spec.tensor_meta.shape, where), shard.__dict__.get(PARTIAL)
        return cls(describe(shard), spec, whole, where, shape, local.shape, local.device, partial)

    def whole(self, memory: Tensor) -> Tensor:
        """The tensor over the beginning of flat memory; a view of nothing, so that it may be changed in place."""
        found = memory.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), self.shape)  # type: ignore[call-overload]  # typed since 2.13
        return self.wrapped(found)

    def wrapped(self, found: Tensor) -> Tensor:
        """Return a tensor as the DTensor that a tensor-parallel plan expects, where the plan sharded it."""
        return found if self.whole_spec is None else new_dtensor(found, self.whole_spec)

    def _slots(self, peers: Peers) -> int:
        """The number of elements of a flat buffer that each rank has."""
        return -(-self.shape[0] // peers.size) * self.shape[1:].numel()

    @torch.no_grad()
    def gather(self, local: Tensor, what: str, device: torch.device) -> Tensor:
        """Return the whole tensor, in memory of its own where it is sharded.

        Collective: every rank that has a shard must call it.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks ask for different things.
        """
        peers = self.where.shard
        if peers is None:
            return self.wrapped(local.detach().to(device))
        peers.announce(what)
        flat = torch.empty(self._slots(peers), dtype=local.dtype, device=device)
        flat[: local.numel()].copy_(local.reshape(-1))
        return self.whole(peers.gather_read(flat, what))

    @torch.no_grad()
    def reduce(self, gradient: Tensor | None, device: torch.device) -> DTensor | None:
        """Return this rank's rows of the mean of a whole gradient over the data axes; None where no rank has one.

        Collective: every rank that has a shard, and every replica of it, must call it.

        Args:
            gradient: None if this rank has none.
            device: where it is reduced.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks reduce gradients of different tensors.
        """
        shard, replicate = self.where.shard, self.where.replicate
        exists = gradient is not None
        for peers in (shard, replicate):
            if peers is not None:
                exists = any(numbers[0] for numbers in peers.compare(f"the gradient of {self.name}", float(exists)))
                _announce_end(peers)
        if not exists:
            return None
        meta = self.spec.tensor_meta
        assert meta is not None
        found = local_tensor(torch.zeros(self.shape, dtype=meta.dtype, device=device) if gradient is None else gradient)
        if shard is not None or replicate is not None:
            found = found / self.where.batches
        if shard is not None:
            found = self._scattered(found, shard)
        if replicate is not None:
            found = found.contiguous()
            dist.all_reduce(found, group=replicate.group)
        if self.partial is not None:
            found = found.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(found, group=self.partial)
        return new_dtensor(found.to(self.home), self.spec)

    def _scattered(self, gradient: Tensor, peers: Peers) -> Tensor:
        """The sum, over the shard axis, of the rows that are this rank's."""
        slots = self._slots(peers)
        rows = gradient.new_zeros(peers.size, slots)
        rows.view(-1)[: gradient.numel()].copy_(gradient.reshape(-1))
        if gradient.device.type == "cpu":  # gloo would do the same, and copy
            dist.all_reduce(rows, group=peers.group)
            reduced = rows[peers.rank].clone()
        else:
            reduced = rows.new_empty(slots)
            reduce_scatter_single(reduced, rows.view(-1), group=peers.group)
        return reduced[: self.local.numel()].view(self.local)

    def laid_out(self, gradient: Tensor | None) -> Tensor | None:
        """A whole gradient in the layout of the tensor on the tensor-parallel axes. Differentiable."""
        if isinstance(gradient, DTensor) and tuple(gradient.placements) != self.where.model:
            return gradient.redistribute(placements=self.where.model)
        return gradient


_announced: dict[str, int] = {}
"""The last backward at whose end the ranks of a group tell each other that it ends."""


def _announce_end(peers: Peers) -> None:
    """Compare at the end of the backward that runs, so that ranks which reduce more gradients are told.

    Raises:
        UnsupportedCodeError: at the end, on every rank, if others reduce the gradient of one more.
    """

    def end() -> None:
        peers.compare("the end of a backward")

    if in_backward() and _announced.get(peers.reads_name) != backward_number():
        _announced[peers.reads_name] = backward_number()
        after_backward(end)


def refuse_sparse(gradient: Tensor | None) -> None:
    """Raise for a gradient of the sparse layout, as embeddings make it, which the ranks can't add up in one buffer."""
    if gradient is not None and gradient.layout != torch.strided:
        raise UnsupportedCodeError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} is sparse. Make the module without "
            "sparse=True: gradients of parameters on several ranks must be dense."
        )


def refuse_batched(gradient: Tensor) -> None:
    """Raise for a batch of gradients in one, which the ranks can't add up."""
    if is_batched(gradient):
        raise UnsupportedCodeError(
            "a backward of a batch of gradients (is_grads_batched=True, vmap, torch.func.jacrev) goes through tensors "
            "that several ranks reduce. Call torch.autograd.grad for each of them, in a loop."
        )


def no_gradient(whole: Tensor) -> Tensor:
    """Return what a backward gets for a gathered tensor that this rank has no gradient of, but others may have."""
    found = torch.zeros_like(whole)
    found.__dict__[_ABSENT] = True
    return found


def gradient_or_none(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient of a gathered tensor that a backward got; None for what `no_gradient` made."""
    return None if gradient is None or _ABSENT in gradient.__dict__ else gradient


class Gather(torch.autograd.Function):
    """A shard → the whole tensor."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor, item: GatherItem, what: str, device: torch.device) -> Tensor:
        ctx.item, ctx.device = item, device
        ctx.set_materialize_grads(False)
        return item.gather(local_tensor(shard), what, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        refuse_sparse(gradient)
        if gradient is not None:
            refuse_batched(gradient)
        laid_out = ctx.item.laid_out(gradient_or_none(gradient))
        return ReduceGradient.apply(laid_out, ctx.item, ctx.device), None, None, None  # type: ignore[no-untyped-call]  # torch's


class ReduceGradient(torch.autograd.Function):
    """A whole gradient → the shard of the mean."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor | None, item: GatherItem, device: torch.device) -> DTensor | None:
        ctx.item, ctx.device = item, device
        ctx.set_materialize_grads(False)
        return item.reduce(gradient, device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None
        return Gather.apply(gradient, ctx.item, "a second derivative", ctx.device), None, None  # type: ignore[no-untyped-call]  # torch's
