"""Agree before a batch whether to end, and that the ranks have not drifted apart, in one reduction of host numbers.

With steps of a few milliseconds a reduction before each of them would be a large part of the time. So ranks meet before
the first batches, then after a few batches, as many as fit into a bound on time; the number follows from what all of
them reduced the last time, so it is the same on all. They also meet before a save and the end. A meeting does not wait
for a GPU: a digest that it computes is compared in the next one.
"""

from __future__ import annotations

import time

import torch

from lightning_shardckpt.distributed.host_numbers import highest
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors import written_numbers
from lightning_shardckpt.strategy.replicated_values import Look, ReplicatedValues, refuse
from lightning_shardckpt.system.tuning import Tuning


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
        anybody, longest_us, *maxima = highest(found).tolist()
        _judge(maxima[: len(votes)], maxima[len(votes) :], look, meshes)
        return bool(anybody), longest_us / batches / 1e6


def _judge(written: list[int], values: list[int], look: Look | None, meshes: Meshes) -> None:
    """Raise on every rank if the maxima of all ranks' votes say that they have drifted apart."""
    if written_numbers.differ(written):
        raise UnsupportedCodeError(
            "the ranks wrote different numbers into sharded parameters or optimizer state since they last met, "
            "so their shards belong to different models now. Here the last was "
            f"{written_numbers.last_noted()}. Reduce "
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
