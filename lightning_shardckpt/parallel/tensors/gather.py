"""Gather the shards of several tensors at once, in a way that autograd knows: gradients are reduced on their way back.

On every rank, the gradient of a whole tensor is that of this rank's loss; the gradient of a shard is that of the mean
of all losses. So whole gradients are averaged over the data axes, and every rank keeps its rows. Gathering and this
reduction are each other's derivative, and may be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import DTensorSpec, local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import is_batched
from lightning_shardckpt.compat.torch_distributed import all_gather_single, reduce_scatter_single
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.peers import MARK_BYTES, Peers
from lightning_shardckpt.parallel.tensors.placement import Placements, model_shape, placements_of
from lightning_shardckpt.parallel.tensors.unreduced_gradients import UnreducedGradients

PARTIAL = "_shardckpt_partial"
"""Attribute of a parameter: the group over whose ranks its gradients are partial sums, besides the data axes."""
_ABSENT = "_shardckpt_absent"
_EXACT = (torch.float32, torch.float64)  # hold the numbers of purposes, and their squares, exactly


@dataclass(frozen=True, slots=True)
class GatherItem:
    """One tensor of a plan.

    Attributes:
        whole_spec: of the tensor as a tensor-parallel plan expects it; None where the plan does not shard it.
        shape: of what the tensor-parallel axes leave to this rank.
        local: the shape of this rank's rows of that.
        slots: how many elements of a flat buffer one rank has.
        home: the device of the shard.
        partial: see `PARTIAL`.
    """

    spec: DTensorSpec
    whole_spec: DTensorSpec | None
    where: Placements
    shape: torch.Size
    local: torch.Size
    slots: int
    home: torch.device
    partial: dist.ProcessGroup | None

    @classmethod
    def of(cls, shard: DTensor) -> GatherItem:
        spec = spec_of(shard)
        where = placements_of(spec.mesh, tuple(spec.placements))
        shape, local = model_shape(spec, where), local_tensor(shard).shape
        slots = shape.numel() if where.shard is None else -(-shape[0] // where.shard.size) * shape[1:].numel()
        home, partial, whole = local_tensor(shard).device, shard.__dict__.get(PARTIAL), None
        if where.model_mesh is not None:
            whole = DTensorSpec(where.model_mesh, where.model, tensor_meta=spec.tensor_meta)
        return cls(spec, whole, where, shape, local, slots, home, partial)

    def whole(self, memory: Tensor) -> Tensor:
        """The tensor over the beginning of flat memory; a view of nothing, so that it may be changed in place."""
        found = memory.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), self.shape)  # type: ignore[call-overload]  # typed since 2.13
        return self.wrapped(found)

    def wrapped(self, found: Tensor) -> Tensor:
        """Return a tensor as the DTensor that a tensor-parallel plan expects, where the plan sharded it."""
        return found if self.whole_spec is None else new_dtensor(found, self.whole_spec)

    def shard(self, local: Tensor) -> DTensor:
        """The DTensor with these rows."""
        return new_dtensor(local, self.spec)

    def laid_out(self, gradient: Tensor | None) -> Tensor | None:
        """A whole gradient in the layout of the tensor on the tensor-parallel axes. Differentiable."""
        if isinstance(gradient, DTensor) and tuple(gradient.placements) != self.where.model:
            return gradient.redistribute(placements=self.where.model)
        return gradient


class GatherPlan:
    """A plan for gathering some tensors together; for all tensors of the same specs.

    Args:
        shards: DTensors of one dtype and the same data axes.
        device: where they are gathered.
        purpose: what for, in messages.
        number: of the purpose, from `Peers.register`; None for what user code asks for.
    """

    def __init__(self, shards: Sequence[DTensor], device: torch.device, purpose: str, number: int | None) -> None:
        self.items = tuple(GatherItem.of(shard) for shard in shards)
        self.device, self.purpose, self._number = device, purpose, number
        self.dtype = shards[0].dtype
        where = self.items[0].where
        self._shard, self._replicate, self._batches = where.shard, where.replicate, where.batches
        self._per_rank = sum(item.slots for item in self.items)
        self._parts: dict[tuple[int, ...], GatherPlan] = {}

    def part(self, places: tuple[int, ...]) -> GatherPlan:
        """The plan of some of its tensors."""
        if len(places) == len(self.items):
            return self
        found = self._parts.get(places)
        if found is None:
            found = object.__new__(GatherPlan)
            found.__dict__.update(self.__dict__, items=tuple(self.items[n] for n in places), _parts={})
            found._per_rank = sum(item.slots for item in found.items)
            self._parts[places] = found
        return found

    # --- gather ---

    @torch.no_grad()
    def gather(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors, in memory of their own where they are sharded. Collective: every rank that has a shard.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks gather for different purposes.
        """
        if self._shard is None:
            pairs = zip(self.items, locals_, strict=True)
            return [item.wrapped(local.detach().to(self.device)) for item, local in pairs]
        rows = self._all_gathered(locals_, self._shard)
        if len(self.items) == 1 and rows.is_contiguous():
            return [self.items[0].whole(rows)]
        wholes, begin = [], 0
        for item in self.items:
            memory = rows.new_empty(self._shard.size, item.slots)
            memory.copy_(rows[:, begin : begin + item.slots])
            wholes.append(item.whole(memory))
            begin += item.slots
        return wholes

    def _all_gathered(self, locals_: Sequence[Tensor], peers: Peers) -> Tensor:
        """The flat shards of every rank, one row for each."""
        marked = self._number is not None and self.device.type == "cpu"
        extra = -(-MARK_BYTES // self.dtype.itemsize) if marked else 0
        flat = torch.empty(self._per_rank + extra, dtype=self.dtype, device=self.device)
        begin = 0
        for item, local in zip(self.items, locals_, strict=True):
            flat[begin : begin + local.numel()].copy_(local.reshape(-1))
            begin += item.slots
        if self._number is None:
            return peers.gather_read(flat, self.purpose).view(peers.size, -1)
        if not marked:
            peers.meet(self.purpose)
        else:
            mark = peers.mark(self._number, "gather")
            flat[begin:].view(torch.uint8)[:MARK_BYTES].copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        found = flat.new_empty(peers.size * flat.numel())
        work = all_gather_single(found, flat, group=peers.group, async_op=True)
        peers.wait(work, self.purpose, self.device)
        rows = found.view(peers.size, -1)
        if marked:
            tails = rows[:, self._per_rank :].contiguous().view(torch.uint8)[:, :MARK_BYTES]
            peers.check_marks([bytes(tail) for tail in tails.tolist()])
        return rows[:, : self._per_rank]

    # --- reduce ---

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return this rank's rows of the mean of whole gradients over the data axes; None where no rank has one.

        Collective: every rank that has a shard must call it.
        """
        if self._shard is None and self._replicate is None:
            return [None if g is None else self._summed(item, g) for item, g in zip(self.items, gradients, strict=True)]
        sizes, flags = [item.slots for item in self.items], len(self.items)
        rows = 1 if self._shard is None else self._shard.size
        width = sum(sizes)
        source = torch.zeros(rows, width + flags + 2, dtype=self.dtype, device=self.device)
        begin = 0
        for item, gradient in zip(self.items, gradients, strict=True):
            if gradient is not None:
                self._put(source[:, begin : begin + item.slots], item, local_tensor(gradient))
            begin += item.slots
        source.div_(self._batches)
        for n, gradient in enumerate(gradients):
            source[:, width + n] = float(gradient is not None)
        reduced = source[0] if self._shard is None else self._scattered(source, width + flags, self._shard)
        if self._replicate is not None:
            dist.all_reduce(reduced, group=self._replicate.group)
        if any(gradient is None for gradient in gradients):
            exist = (reduced[width : width + flags] != 0).tolist()  # waits for the device
        else:
            exist = [True] * flags
        return self._taken(reduced, exist)

    @staticmethod
    def _put(place: Tensor, item: GatherItem, gradient: Tensor) -> None:
        if gradient.numel() == place.numel():
            place.copy_(gradient.reshape(place.shape))
            return
        flat, begin = gradient.reshape(-1), 0
        for row in place:  # the last ones may have fewer rows, or none
            some = flat[begin : begin + item.slots]
            row[: some.numel()].copy_(some)
            begin += item.slots

    def _scattered(self, source: Tensor, checked: int, peers: Peers) -> Tensor:
        """The sum, over the shard axis, of the row that is this rank's."""
        number = -1 if self._number is None else self._number
        marked = self.dtype in _EXACT and self.device.type == "cpu"
        if marked:
            source[:, checked], source[:, checked + 1] = float(number + 2), float((number + 2) ** 2)
        if number >= 0:
            peers.mark(number, "reduce")
        if self.device.type == "cpu":  # gloo would do the same, and copy
            work = dist.all_reduce(source, group=peers.group, async_op=True)
            peers.wait(work, f"the gradients of {self.purpose}", self.device)
            reduced = source[peers.rank].clone()
        else:
            reduced = source.new_empty(source.shape[1])
            work = reduce_scatter_single(reduced, source.view(-1), group=peers.group, async_op=True)
            peers.wait(work, f"the gradients of {self.purpose}", self.device)
        total = [peers.size * (number + 2), peers.size * (number + 2) ** 2]
        if marked and reduced[checked : checked + 2].tolist() != total:
            peers.refuse_gradients(self.purpose)
        return reduced

    def _taken(self, reduced: Tensor, exist: Sequence[bool]) -> list[Tensor | None]:
        taken: list[Tensor | None] = []
        begin = 0
        for item, exists in zip(self.items, exist, strict=True):
            part = reduced[begin : begin + item.local.numel()].view(item.local)
            taken.append(self._summed(item, part) if exists else None)
            begin += item.slots
        return taken

    @staticmethod
    def _summed(item: GatherItem, gradient: Tensor) -> Tensor:
        local = local_tensor(gradient)  # what tensor parallelism leaves to this rank
        if item.partial is not None:
            local = local.clone()
            dist.all_reduce(local, group=item.partial)
        return local.to(item.home)


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
    """Shards → whole tensors."""

    @staticmethod
    def forward(
        ctx: Any, plan: GatherPlan, unreduced: UnreducedGradients | None, *shards: DTensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.unreduced, ctx.shards = plan, unreduced, shards if unreduced is not None else ()
        ctx.set_materialize_grads(False)
        wholes = plan.gather([local_tensor(shard) for shard in shards])
        ctx.mark_non_differentiable(
            *(whole for whole, shard in zip(wholes, shards, strict=True) if not shard.requires_grad)
        )
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        plan: GatherPlan = ctx.plan
        for gradient in gradients:
            refuse_sparse(gradient)
            if gradient is not None:
                refuse_batched(gradient)
        needed = [n for n, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        found: list[Tensor | None] = [None] * len(plan.items)
        given = [gradient_or_none(g) for g in gradients]
        laid_out = [plan.items[n].laid_out(given[n]) for n in needed]
        part = plan.part(tuple(needed))
        if ctx.unreduced is not None and ctx.unreduced.takes(part, [ctx.shards[n] for n in needed], laid_out):
            return (None, None, *found)
        reduced = ReduceGradients.apply(part, *laid_out)  # type: ignore[no-untyped-call]  # torch's
        for n, gradient in zip(needed, reduced, strict=True):
            found[n] = gradient
        return (None, None, *found)


class ReduceGradients(torch.autograd.Function):
    """The reduction of whole gradients to shards of their mean."""

    @staticmethod
    def forward(ctx: Any, plan: GatherPlan, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        reduced = plan.reduce(gradients)
        return tuple(None if part is None else item.shard(part) for item, part in zip(plan.items, reduced, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        plan: GatherPlan = ctx.plan
        shards = [
            item.shard(torch.zeros(item.local, dtype=plan.dtype, device=item.home)) if gradient is None else gradient
            for item, gradient in zip(plan.items, gradients, strict=True)
        ]
        return (None, *Gather.apply(plan, None, *shards))  # type: ignore[no-untyped-call]  # torch's
