"""A sharded tensor as a whole: its elements, its norm, and agreement of ranks about values.

Collective, all of it: every rank that has a shard must call, with the same tensors in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import Gather, GatherItem
from lightning_shardckpt.parallel.tensors.peers import Peers, peers_of
from lightning_shardckpt.parallel.tensors.placement import Placements, describe, local_part, placements_of

_agreed: MutableMapping[Tensor, tuple[int, int]] = WeakIdKeyDictionary()  # plain tensors: version and placements


def where_is(tensor: DTensor) -> Placements:
    """Return how a tensor is sharded."""
    spec = spec_of(tensor)
    return placements_of(spec.mesh, tuple(spec.placements))


def holders(where: Placements) -> list[Peers]:
    """The ranks of every axis that a tensor is laid out on, also of those that only replicate it."""
    found = [peers for peers in (where.shard, where.replicate) if peers is not None]
    return found + [peers for peers, _ in _model_axes(where)]


def whole(tensor: DTensor, what: str, *, on_model_axes: bool = True, device: torch.device | None = None) -> Tensor:
    """Return all elements, in memory of their own; with history, if ``tensor`` has one and gradients are enabled.

    Args:
        tensor: sharded.
        what: is asked for, in messages.
        on_model_axes: False leaves it sharded as the tensor-parallel plan did, as a DTensor.
        device: where to gather; by default where the shards are.
    """
    item, device = GatherItem.of(tensor), device or tensor.device
    what = f"{what} of {item.name}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: Tensor = Gather.apply(tensor, item, what, device)  # type: ignore[no-untyped-call]  # torch's
    else:
        found = item.gather(local_tensor(tensor), what, device)
    if on_model_axes and isinstance(found, DTensor):
        for peers, _ in _model_axes(item.where):
            peers.announce(what)
        replicated = [Replicate()] * found.device_mesh.ndim
        found = found.redistribute(placements=replicated).to_local(grad_placements=replicated)
    return found


@torch.no_grad()
def full_state_dict(module: nn.Module, *, cpu: bool = True) -> dict[str, Any]:
    """The state dict of a module, or of a part of one, with whole tensors in memory of their own.

    Collective: every rank that has shards of the module must call it, also those that throw the result away. In a
    pipeline it has what this rank's stages have.

    >>> import torch
    >>> from lightning_shardckpt import full_state_dict
    >>> sorted(full_state_dict(torch.nn.Linear(2, 1)))
    ['bias', 'weight']

    Args:
        module: sharded or not.
        cpu: whether to move each tensor to the CPU before the next one is gathered.

    Returns:
        Names to tensors, and to whatever else the state dict holds, on every rank.
    """
    found: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            whole = value.detach()
            value = whole.cpu().clone() if cpu else whole.clone()
        found[name] = value
    return found


def joined_norms(tensors: Sequence[DTensor], own: Sequence[float], order: float) -> list[float]:
    """Return the norm of all elements of each tensor, from the norms of this rank's; the tensors are laid out alike."""
    where, found = where_is(tensors[0]), list(own)
    axes = [where.shard] if where.shard is not None else []
    axes += [peers for peers, is_sharded in _model_axes(where) if is_sharded]
    for peers in axes:
        every = torch.tensor(peers.share(f"the norm of {describe(tensors[0])}", found), dtype=torch.float64)
        found = torch.linalg.vector_norm(every, order, dim=0).tolist()
    return found


class Scatter(torch.autograd.Function):
    """A plain tensor, the same on all ranks → its shards, laid out like another tensor's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: DTensor) -> DTensor:
        ctx.placements = like.placements
        local = local_part(value.detach(), where_is(like)).clone()
        return new_dtensor(local, spec_of(like))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None]:
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        return whole(gradient, "gradients"), None


def is_same_everywhere(value: Tensor, where: Placements, what: str) -> bool:
    """Return whether a plain tensor is equal, to the bit, on all ranks that hold parts of a tensor sharded so."""
    known = _agreed.get(value)
    mark = (version_of(value), id(where))
    if known == mark:
        return True
    content = value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    own = float(zlib.crc32(content.tobytes()))
    same = True
    for peers in holders(where):
        every = peers.share(f"{what} with a tensor of shape {tuple(value.shape)}", [own])
        same = same and all(numbers == [own] for numbers in every)
        own = float(same and own)  # so that the ranks of the next axis decide alike
    if same:
        _agreed[value] = mark
    return same


def check_same(value: Tensor, where: Placements, what: str) -> None:
    """Refuse a plain tensor that is to be written into a sharded one, and is another on other ranks.

    Raises:
        UnsupportedCodeError: on every rank.
    """
    if not is_same_everywhere(value, where, what):
        raise UnsupportedCodeError(
            f"{what} writes a tensor of shape {tuple(value.shape)} into a sharded one, and its values differ between "
            "the ranks: each would write its own into its shard. Compute it alike on all ranks: average what depends "
            "on a batch (self.all_gather, self.trainer.strategy.reduce), and seed what is drawn."
        )


def check_state_of_shards(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of sharded parameters that is not sharded and differs between the ranks, such as that of their rows.

    Raises:
        UnsupportedCodeError: on every rank.
    """
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, DTensor) or type(parameter) is DTensor or not isinstance(values, dict):
            continue
        for name, value in values.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.ndim == 0:
                continue
            if not is_same_everywhere(value, where_is(parameter), "the state of an optimizer"):
                raise UnsupportedCodeError(
                    f"{name!r}, of shape {tuple(value.shape)}, in the state of {type(optimizer).__name__} for a "
                    f"parameter of shape {tuple(parameter.shape)}, differs between the ranks: it belongs to their rows "
                    "alone, so that no checkpoint could be resumed on another topology. Use an optimizer that makes "
                    "its state of the parameter (torch.zeros_like(p)), or train with data_parallel_shard_size=1."
                )


@contextmanager
def drawn_alike(where: Placements, device: torch.device, what: str) -> Iterator[None]:
    """Inside, the ranks draw what the first of them draws; who would have drawn others then gets its state back."""
    cuda = device.type == "cuda"
    own = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    state = own.clone()
    differs = False
    for peers in holders(where):
        mark = float(zlib.crc32(state.numpy().tobytes()))
        if any(numbers != [mark] for numbers in peers.share(f"{what} of random numbers", [mark])):
            peers.broadcast_read(state, what)
    differs = not torch.equal(own, state)
    if differs:
        _set_rng_state(state, device)
    try:
        yield
    finally:
        if differs:
            _set_rng_state(own, device)


def _set_rng_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _model_axes(where: Placements) -> list[tuple[Peers, bool]]:
    """Return the ranks of each tensor-parallel axis, and whether that shards."""
    mesh = where.model_mesh
    if mesh is None:
        return []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = zip(names, where.model, mesh.shape, strict=True)
    return [
        (peers_of(mesh if mesh.ndim == 1 else mesh[name]), not placement.is_replicate())
        for name, placement, size in axes
        if size > 1
    ]
