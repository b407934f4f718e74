"""Agree before a batch whether to end, and that the ranks have not drifted apart, in one reduction of host numbers.

With steps of a few milliseconds a reduction before each of them would be a large part of the time. So ranks meet before
the first batches, then after a few batches, as many as fit into a bound on time; the number follows from what all of
them reduced the last time, so it is the same on all. They also meet before a save and the end. A meeting does not wait
for a GPU: a digest that it computes is compared in the next one.

Parameters that are not sharded, and buffers, must be the same on every data-parallel rank. A number of a rank's own
batch (a learning rate, a running mean) makes them drift apart without an error, and a checkpoint has those of one rank.
So a few of them are compared, in turn, in each meeting. Statistics of norms are those of the first rank, see
``parallel.sharding.batch_norm``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_modules import (
    NormWithStatistics,
    buffer_slots,
    non_persistent_buffers,
    parameter_slots,
)
from lightning_shardckpt.distributed.host_numbers import HostCopy, gather_numbers, max_over_ranks
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors import written_numbers
from lightning_shardckpt.system.tensor_digest import bit_digest
from lightning_shardckpt.system.tuning import TUNING, Tuning

Slots = Mapping[str, Tensor | None]

_LOOK_AGAIN = 100  # digests until values are listed anew: for a thousand modules it takes milliseconds


@dataclass(frozen=True, slots=True)
class Look:
    """What was looked at together.

    Attributes:
        tensors: by their FQNs.
        digest: of all of them, a number that differs where one of them does, but for chance; on its way to the host.
    """

    tensors: list[tuple[str, Tensor]]
    digest: HostCopy


@dataclass(slots=True)
class ReplicatedValues:
    """The plain values of some modules, of which the next few are looked at.

    Every rank must look at the same ones, so all of them must call the same methods.
    """

    roots: list[nn.Module] = field(default_factory=list)
    tuning: Tuning = TUNING
    _slots: list[tuple[str, Slots, str]] = field(default_factory=list)
    _next: int = 0
    _digests: int = 0  # since it was looked for what there is

    def add(self, root: nn.Module) -> None:
        """Look at the values of this module, too."""
        self.roots.append(root)
        self.begin()

    def begin(self) -> None:
        """Look for what the modules have now; call when an epoch begins."""
        self._slots, self._next = [slot for root in self.roots for slot in _slots_of(root)], 0
        self._digests = 0

    def look(self, device: torch.device) -> Look:
        """Return the next values and their digest, which is computed on ``device``; the host does not wait for it."""
        self._digests += 1
        if self._digests > _LOOK_AGAIN:  # a script has no epochs, and its modules may get new buffers
            at = self._next
            self.begin()
            self._next = at % max(len(self._slots), 1)
        tensors = list(self._following())
        return Look(tensors, HostCopy(_digest([tensor for _, tensor in tensors], device)))

    def _following(self) -> Iterator[tuple[str, Tensor]]:
        size = 0
        for _ in range(min(len(self._slots), self.tuning.compared_tensors)):
            fqn, slots, name = self._slots[self._next]
            value = slots.get(name)
            self._next = (self._next + 1) % len(self._slots)
            if _is_plain(value) and value.layout == torch.strided and value.numel():
                yield fqn, value
                size += value.nbytes
                if size >= self.tuning.compared_bytes:
                    return


def refuse(look: Look, group: dist.ProcessGroup) -> None:
    """Raise, naming what differs of what was looked at, in this or another data-parallel group.

    Collective: every rank of the world must call it, with its data-parallel group.

    Raises:
        UnsupportedCodeError: on every rank.
    """
    own = torch.tensor([int(_digest([tensor], tensor.device)) for _, tensor in look.tensors])
    differs = (gather_numbers(own, group) != own).any(0).tolist()
    wrong = [name for (name, _), bad in zip(look.tensors, differs, strict=True) if bad]
    names = wrong or [f"one of {', '.join(name for name, _ in look.tensors)}, on other ranks,"]
    raise UnsupportedCodeError(
        f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} differs between the data-parallel ranks, which "
        "each compute it from their own batches: the model is not that of one process, and a checkpoint would have "
        "one rank's. Reduce what is computed from a batch (self.all_gather(x).mean(0), "
        "self.trainer.strategy.reduce(x)) before it is used; for a buffer that may be a rank's own, "
        "register_buffer(…, persistent=False)."
    )


def _slots_of(root: nn.Module) -> Iterator[tuple[str, Slots, str]]:
    """Each value by its FQN, the dict in which its module has it, and its name there: it may be assigned anew."""
    for prefix, module in root.named_modules():
        kept: list[tuple[Slots, Collection[str]]] = [(parameter_slots(module), parameter_slots(module))]
        if not isinstance(module, NormWithStatistics):
            kept.append((buffer_slots(module), buffer_slots(module).keys() - non_persistent_buffers(module)))
        for slots, names in kept:
            for name in sorted(names):
                if _is_plain(slots[name]):
                    yield f"{prefix}.{name}" if prefix else name, slots, name


def _is_plain(value: Tensor | None) -> TypeGuard[Tensor]:
    return type(value) in (Tensor, nn.Parameter)


@torch.no_grad()
def _digest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """A digest of the bits of tensors in their order, positive."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total = total * 31 + bit_digest(tensor).to(device)
    return total & ((1 << 61) - 1)


class BatchAgreement:
    """The meetings of the ranks in one run of training. Every rank must make the same calls in the same order.

    Attributes:
        values: what data-parallel ranks must have alike; the next few are compared in each meeting.
    """

    def __init__(self) -> None:
        self.values: ReplicatedValues | None = None
        self._due: Look | None = None  # on a GPU, at the last meeting
        self._skips = 0  # batches until they meet
        self._most = 1  # of batches from one meeting to the next: doubles, so that one short step puts off nothing far
        self._batches, self._met_s = 0, time.monotonic()  # since they met, and when

    def any_rank_told(self, told: bool, meshes: Meshes, device: torch.device, tuning: Tuning) -> bool:
        """Return whether the ranks meet before this batch, and one of them was told to end.

        Collective: every rank of the world must call it.

        Args:
            told: whether this rank was; it must say so until one of them returns True.
            meshes: all ranks.
            device: of this rank.
            tuning: how long it may take until the others hear of it.

        Raises:
            UnsupportedCodeError: as in ``meet``.
        """
        self._batches += 1
        if self._skips > 0:
            self._skips -= 1
            return False
        anybody, step_s = self._meet(told, meshes, device)
        fitting = tuning.agreement_s / step_s if step_s > 0 else self._most
        self._skips = int(max(min(fitting, self._most) - 1, 0))
        self._most = min(2 * self._most, tuning.agreement_batches)
        return anybody

    def meet(self, ranks: Ranks, meshes: Meshes, device: torch.device) -> None:
        """Compare what the ranks wrote, before a save.

        Collective: every rank of the world must call it. One that doesn't come is named.

        Raises:
            UnsupportedCodeError: if ranks wrote different numbers into sharded tensors since they last met, or have
                other values where they must have the same.
            Exception: as `Ranks.step` does.
        """
        self._batches, self._met_s = 0, time.monotonic()
        votes = written_numbers.votes(meshes.pipeline_rank, meshes.topology.pipeline)
        look = self.values.look(device) if self.values is not None else None
        self._due = None
        more = _votes_on(look, meshes)
        maxima = ranks.step("comparing what ranks wrote", lambda: [*votes, *more], _maxima)
        _judge(maxima[: len(votes)], maxima[len(votes) :], look, meshes)

    def _meet(self, told: bool, meshes: Meshes, device: torch.device) -> tuple[bool, float]:
        """Return whether a rank was told, and the seconds that a batch took on the slowest one: the same on all."""
        now, batches = time.monotonic(), max(self._batches, 1)
        elapsed_us = int((now - self._met_s) * 1e6)
        self._batches, self._met_s = 0, now
        votes = written_numbers.votes(meshes.pipeline_rank, meshes.topology.pipeline)
        look = self.values.look(device) if self.values is not None else None
        if device.type != "cpu":
            look, self._due = self._due, look
        found = torch.tensor([int(told), elapsed_us, *votes, *_votes_on(look, meshes)])
        anybody, longest_us, *maxima = max_over_ranks(found).tolist()
        _judge(maxima[: len(votes)], maxima[len(votes) :], look, meshes)
        return bool(anybody), longest_us / batches / 1e6


def _judge(written: list[int], values: list[int], look: Look | None, meshes: Meshes) -> None:
    """Raise on every rank if the maxima of all ranks' votes say that they have drifted apart."""
    if written_numbers.differ(written):
        raise UnsupportedCodeError(
            "the ranks wrote different numbers into sharded parameters or optimizer state since they last met, "
            "so their shards belong to different models now. Here the last was "
            f"{written_numbers.describe_last_numbers()}. Reduce "
            "what is computed from a rank's own batch before it is used: self.all_gather(loss).mean(), or "
            "self.log(…, sync_dist=True) for what schedulers and callbacks read."
        )
    if look is not None and written_numbers.differ(values):
        refuse(look, meshes.data_parallel_group)


def _maxima(votes: list[list[int]]) -> list[int]:
    return [max(of) for of in zip(*votes, strict=True)]


def _votes_on(look: Look | None, meshes: Meshes) -> list[int]:
    """Return this rank's part of a maximum over all ranks, as `written_numbers.votes`: each data-parallel group has its
    place."""
    if look is None:
        return []
    digest, tensor = int(look.digest.read()), meshes.topology.tensor
    place = meshes.pipeline_rank * tensor + (meshes.root.get_local_rank("tensor") if tensor > 1 else 0)
    found = [written_numbers.NOTHING] * (2 * meshes.topology.pipeline * tensor)
    found[2 * place : 2 * place + 2] = digest, -digest
    return found
