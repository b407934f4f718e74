"""Values that ranks compute together: whole tensors and their gradients, random numbers, and checks for equality.

Every function that communicates is collective: every rank that has a shard must call it, with the same tensors in the
same order. Ranks announce a gather and its reduction over gloo before they begin.

The gradient of a whole tensor is the gradient of this rank's loss; the gradient of a shard is the gradient of the mean
of all losses. So a whole gradient is averaged over the data axes, and every rank keeps its rows.

Tensors are compared when they are written into sharded ones. For a number (``w.mul_(loss.item())``, a learning rate
computed from a rank's own loss) that would cost too much: all numbers are hashed into one, which ranks compare from
time to time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import DTensorSpec, local_tensor, new_dtensor, shape_of, spec_of
from lightning_shardckpt.compat.torch_autograd import is_batched
from lightning_shardckpt.compat.torch_distributed import all_gather_single, group_of_name
from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.distributed.host_numbers import broadcast_object, host_group
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placement import (
    Sharding,
    describe,
    local_part,
    model_shape,
    own_rows,
    sharding_of,
)
from lightning_shardckpt.system.random_generators import differing_generators, get_rng_state, set_rng_state
from lightning_shardckpt.system.tensor_digest import byte_view

PARTIAL = "_shardckpt_partial"
"""Attribute of a parameter: the tensor-parallel group on whose ranks its gradients are partial sums."""
RECEIVER = "_shardckpt_receiver"
"""Attribute of a parameter that ``fully_shard`` gathers: a function that adds rows to its gradient after a backward.

Autograd must reach such a parameter only through `Gather`.
"""
PART = "_shardckpt_part"
"""Attribute of a parameter that only a tensor-parallel plan shards: it computes by itself, as torch's DTensor."""
GATHERED = "_shardckpt_gathered"
"""Attribute of the autograd nodes whose outputs are gathered parameters."""
REMEDY = "Leave that module whole: ShardedStrategy(fsdp=FSDP(ignored=[…]))"
_ABSENT = "_shardckpt_absent"


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
        spec, sharding, whole = spec_of(shard), sharding_of(shard), None
        if sharding.model_mesh is not None:
            whole = DTensorSpec(sharding.model_mesh, sharding.model, tensor_meta=spec.tensor_meta)
        shape, partial = model_shape(shape_of(shard), sharding), shard.__dict__.get(PARTIAL)
        return cls(describe(shard), spec, whole, sharding, shape, local_tensor(shard).device, partial)

    def wrap(self, gathered: Tensor) -> Tensor:
        """Wrap a gathered tensor as the DTensor that the tensor-parallel plan expects, if the plan shards it."""
        return gathered if self.whole_spec is None else new_dtensor(gathered, self.whole_spec)

    @torch.no_grad()
    def gather(self, local: Tensor, what: str, device: torch.device) -> Tensor:
        """Return the whole tensor, in new memory if its rows are sharded.

        Collective: every rank that has a shard must call it, else all raise an UnsupportedCodeError.
        """
        peers = self.sharding.shard
        if peers is None:
            return self.wrap(local.detach().to(device))
        peers.share(what)
        padded = -(-self.shape[0] // peers.size) * self.shape[1:].numel()
        flat = torch.empty(padded, dtype=local.dtype, device=device)
        flat[: local.numel()].copy_(local.reshape(-1))
        memory = flat.new_empty(peers.size * padded)
        if device.type == "cpu":
            peers.wait(all_gather_single(memory, flat, group=peers.reads, async_op=True), what)
        else:
            all_gather_single(memory, flat, group=peers.group)
        # no view of it, so that user code may change the result in place
        gathered = memory.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), self.shape)  # type: ignore[call-overload]  # typed since 2.13
        return self.wrap(gathered)

    @torch.no_grad()
    def reduce(self, gradient: Tensor | None, device: torch.device) -> DTensor | None:
        """Return this rank's rows of the mean of a whole gradient over the data axes; None if no rank has one.

        Collective: every rank that has a shard, and every replica of it, must call it, else all raise an
        UnsupportedCodeError.
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


def refuse_batched(gradient: Tensor | None) -> None:
    """Raise for a batched gradient of vmap, which collectives can't reduce."""
    if gradient is not None and is_batched(gradient):
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


def gather_whole(
    tensor: DTensor, what: str, *, on_model_axes: bool = True, device: torch.device | None = None
) -> Tensor:
    """Return the whole tensor in new memory. Differentiable. Collective: every rank that has a shard must call it.

    Args:
        tensor: sharded.
        what: the operation that needs it, for messages.
        on_model_axes: whether to gather over the tensor-parallel axes; if not, the result is a DTensor on them.
        device: where to gather; by default where the shards are.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # inference tensors have no versions
            return gather_whole(tensor, what, on_model_axes=on_model_axes, device=device)
    item, device = GatherItem.of(tensor), device or tensor.device
    what = f"{what} of {item.name}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        whole: Tensor = Gather.apply(tensor, item, what, device)  # type: ignore[no-untyped-call]  # torch's
    else:
        whole = item.gather(local_tensor(tensor), what, device)
    if on_model_axes and isinstance(whole, DTensor):
        for peers in item.sharding.others:
            peers.share(what)
        replicated = [Replicate()] * whole.device_mesh.ndim
        whole = whole.redistribute(placements=replicated).to_local(grad_placements=replicated)
    if whole.grad_fn is not None:
        setattr(whole.grad_fn, GATHERED, True)
    return whole


class Scatter(torch.autograd.Function):
    """Shards a plain tensor, equal on all ranks, as another tensor is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: DTensor) -> DTensor:
        ctx.placements = like.placements
        return new_dtensor(local_part(value.detach(), sharding_of(like)).clone(), spec_of(like))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None]:
        return gather_whole(gradient.redistribute(placements=ctx.placements), "gradients"), None


# ── whole modules ─────────────────────────────────────────────────────────────────────────────────────────────────────


PIPELINES: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Modules of pipelines with parameters of their own, and the name of the group of the stages."""


@torch.no_grad()
def full_state_dict(module: nn.Module, *, cpu: bool = True) -> dict[str, Any]:
    """Return the state dict of a module with whole tensors, in new memory.

    Collective: every rank that has shards of the module must call it, even if it discards the result; in a pipeline,
    every rank. The entries of the first stages come first there.

    >>> import torch
    >>> from lightning_shardckpt import full_state_dict
    >>> sorted(full_state_dict(torch.nn.Linear(2, 1)))
    ['bias', 'weight']

    Args:
        module: sharded or not; may be a submodule.
        cpu: whether to move each tensor to the CPU before the next one is gathered.

    Returns:
        Tensors, and other entries of the state dict, by name, on every rank.
    """
    own = dict[str, Any]()
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, Tensor):
            value = value.detach().cpu().clone() if cpu else value.detach().clone()
        own[name] = value
    name_of_group = next((PIPELINES[part] for part in module.modules() if part in PIPELINES), None)
    if name_of_group is None:
        return own
    group, entries = host_group(group_of_name(name_of_group)), dict[str, Any]()
    for source in range(group.size()):  # each entry comes from the first stage that has it
        for name in broadcast_object([name for name in own if name not in entries], source, group):
            value = own.get(name)
            sent = broadcast_object(value.cpu() if isinstance(value, Tensor) else value, source, group)
            entries[name] = value if group.rank() == source else sent
    return entries


# ── equality, and random numbers ──────────────────────────────────────────────────────────────────────────────────────


_equal: MutableMapping[Tensor, tuple[int, int]] = WeakIdKeyDictionary()
"""Plain tensors that were equal on all ranks: their version then, and the id of the sharding."""


def is_equal_on_ranks(value: Tensor, sharding: Sharding, what: str) -> bool:
    """Return whether a plain tensor has equal bits on all ranks of a sharded tensor's mesh."""
    mark, is_same = (version_of(value), id(sharding)), True
    if _equal.get(value) == mark:
        return True
    own = float(zlib.crc32(byte_view(value.detach().contiguous()).cpu().numpy().tobytes()))
    for peers in (*sharding.data_axes, *sharding.others):
        every = peers.share(f"{what} with a tensor of shape {tuple(value.shape)}", [own])
        is_same = is_same and all(numbers == [own] for numbers in every)
        own = float(is_same and own)  # passes a difference on to the ranks of the next axis
    if is_same:
        _equal[value] = mark
    return is_same


def check_equal_on_ranks(value: Tensor, sharding: Sharding, what: str) -> None:
    """Raise on every rank unless a plain tensor, to be written into a sharded one, has equal values on all ranks."""
    if not is_equal_on_ranks(value, sharding, what):
        raise UnsupportedCodeError(
            f"{what} writes a tensor of shape {tuple(value.shape)} into a sharded one, and its values differ between "
            "the ranks: each would write its own values into its shard. Compute the same values on all ranks: average "
            "values that depend on a batch (self.all_gather, self.trainer.strategy.reduce), and seed random numbers."
        )


def check_state_of_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raise on every rank unless plain tensors in the optimizer state of sharded parameters are equal on all ranks."""
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, DTensor) or type(parameter) is DTensor or not isinstance(values, dict):
            continue
        for name, value in values.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.ndim == 0:
                continue
            if not is_equal_on_ranks(value, sharding_of(parameter), "the state of an optimizer"):
                raise UnsupportedCodeError(
                    f"{name!r}, of shape {tuple(value.shape)}, in the state of {type(optimizer).__name__} for a "
                    f"parameter of shape {tuple(parameter.shape)}, differs between the ranks: it belongs to the rows "
                    "of one rank, so a checkpoint could not be resumed on another topology. Use an optimizer that "
                    "creates its state from the parameter (torch.zeros_like(p)), or train with "
                    "data_parallel_shard_size=1."
                )


@contextmanager
def share_rng(group: dist.ProcessGroup | None = None) -> Iterator[list[str]]:
    """Inside, every rank draws the first rank's random numbers; then, generators that differed get their states back.

    Yields a list that has the generators of which this rank drew, after the end.

    Collective: every rank of ``group``, or of the world, must enter it.
    """
    own, drawn = get_rng_state(every_device=False), list[str]()
    broadcast_rng(group)
    first = get_rng_state(every_device=False)
    try:
        yield drawn
    finally:
        now = get_rng_state(every_device=False)
        drawn += differing_generators(first, now)
        set_rng_state(now | differing_generators(own, first))


def broadcast_rng(group: dist.ProcessGroup | None) -> None:
    """Give every rank of ``group``, or of the world, the first rank's random state.

    Collective: every rank of ``group`` must call it.
    """
    if dist.is_initialized():
        set_rng_state(broadcast_object(get_rng_state(every_device=False), group=group))


# ── numbers that code writes into sharded tensors ───────────────────────────────────────────────────────────────────

_BITS = (1 << 62) - 1
_NOTHING = -(1 << 62)  # less than any hash or its negative


class _Numbers:
    mark = 0
    last: tuple[str, Sequence[float], Sequence[int]] = ("nothing", (), ())


def record_numbers(name: str, shape: Sequence[int], numbers: Sequence[float]) -> None:
    """Record numbers that the function ``name`` is about to write into a tensor of ``shape``."""
    _Numbers.last, _Numbers.mark = (name, numbers, shape), hash((_Numbers.mark, *numbers)) & _BITS


def report_numbers(stage: int, stages: int) -> list[int]:
    """Return numbers for `refuse_different_numbers`, which takes their maxima over the ranks of all pipeline stages."""
    own = [_NOTHING] * (2 * stages)
    own[2 * stage : 2 * stage + 2] = _Numbers.mark, -_Numbers.mark
    return own


def refuse_different_numbers(maxima: Sequence[int]) -> None:
    """Raise if ranks of a stage recorded different numbers.

    >>> refuse_different_numbers([5, -5, _NOTHING, _NOTHING])

    Raises:
        UnsupportedCodeError: on every rank, with the last write on this one.
    """
    if all(a == -b for a, b in zip(maxima[::2], maxima[1::2], strict=True) if a != _NOTHING):
        return
    name, numbers, shape = _Numbers.last
    raise UnsupportedCodeError(
        "the ranks wrote different numbers into sharded parameters or optimizer state since they last agreed, so their "
        f"shards belong to different models now. Here the last was {name}({', '.join(map(repr, numbers))}) into a "
        f"tensor of shape {tuple(shape)}. Reduce values that are computed from a rank's own batch before they are "
        "used: self.all_gather(loss).mean(), or self.log(…, sync_dist=True) for values that schedulers and callbacks "
        "read."
    )


def reset_numbers() -> None:
    """Forget all recorded numbers; every rank must do so at the same point of the run."""
    _Numbers.mark, _Numbers.last = 0, ("nothing", (), ())
