"""Agreement of the ranks before a batch: whether to stop, and that replicated values are equal on all ranks.

One reduction of numbers from host memory does both. With steps of a few milliseconds, a reduction before each step
would take too long, so ranks meet before the first batches, then once per several batches within a bound on time. The
number of batches follows from the last reduction, so it is the same on all ranks. They also meet before a save and at
the end. A meeting does not wait for a GPU: a digest that it computes is compared in the next meeting.

Buffers and parameters that are not sharded must be equal on all data-parallel ranks. A value computed from a rank's own
batch (a learning rate, a running mean) would make them differ without an error, and a checkpoint would have the
values of one rank. So each meeting compares a few of them, in turn. Statistics of norms are excluded: they are
broadcast, see ``parallel.sharding.batch_norm``.
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
from lightning_shardckpt.system.tuning import Tuning

Slots = Mapping[str, Tensor | None]

_COMPARED_BYTES = 256 << 10  # before each batch, of unsharded parameters and of buffers, in turn
_COMPARED_TENSORS = 16  # at most; each takes about 10 µs
_LIST_AGAIN = 100  # digests until values are listed again, which takes milliseconds for a thousand modules


@dataclass(frozen=True, slots=True)
class Sample:
    """Some tensors, with a digest of their bits that is being copied to the host."""

    tensors: list[tuple[str, Tensor]]
    digest: HostCopy


@dataclass(slots=True)
class ReplicatedValues:
    """The replicated values of some modules, sampled in turn. All ranks must make the same calls."""

    roots: list[nn.Module] = field(default_factory=list)
    _slots: list[tuple[str, Slots, str]] = field(default_factory=list)
    _next: int = 0
    _digests: int = 0  # since values were listed

    def add(self, root: nn.Module) -> None:
        """Add the values of a module."""
        self.roots.append(root)
        self.begin()

    def begin(self) -> None:
        """List the current values of the modules. Call it at the start of an epoch."""
        self._slots, self._next = [slot for root in self.roots for slot in _find_slots(root)], 0
        self._digests = 0

    def sample(self, device: torch.device) -> Sample:
        """Return the next few values, with a digest that is computed on ``device`` without a wait."""
        self._digests += 1
        if self._digests > _LIST_AGAIN:  # a script has no epochs, and its modules may get new buffers
            position = self._next
            self.begin()
            self._next = position % max(len(self._slots), 1)
        tensors = list(self._next_values())
        return Sample(tensors, HostCopy(_digest([tensor for _, tensor in tensors], device)))

    def _next_values(self) -> Iterator[tuple[str, Tensor]]:
        size = 0
        for _ in range(min(len(self._slots), _COMPARED_TENSORS)):
            fqn, slots, name = self._slots[self._next]
            value = slots.get(name)
            self._next = (self._next + 1) % len(self._slots)
            if _is_plain(value) and value.layout == torch.strided and value.numel():
                yield fqn, value
                size += value.nbytes
                if size >= _COMPARED_BYTES:
                    return


def refuse_difference(sample: Sample, group: dist.ProcessGroup) -> None:
    """Raise an UnsupportedCodeError that names the tensors of a sample that differ, on every rank.

    Collective: every rank of the world must call it, with its data-parallel group.
    """
    own = torch.tensor([int(_digest([tensor], tensor.device)) for _, tensor in sample.tensors])
    differs = (gather_numbers(own, group) != own).any(0).tolist()
    names = [name for (name, _), is_different in zip(sample.tensors, differs, strict=True) if is_different]
    names = names or [f"one of {', '.join(name for name, _ in sample.tensors)}, on other ranks,"]
    raise UnsupportedCodeError(
        f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} differs between the data-parallel ranks, which "
        "each compute it from their own batches: the model differs from one process, and a checkpoint would have the "
        "values of one rank. Reduce values that are computed from a batch (self.all_gather(x).mean(0), "
        "self.trainer.strategy.reduce(x)) before they are used; if a buffer may differ between ranks, use "
        "register_buffer(…, persistent=False)."
    )


def _find_slots(root: nn.Module) -> Iterator[tuple[str, Slots, str]]:
    """Yield the FQN of each replicated value, and the dict and key that hold it, since it may be replaced."""
    for prefix, module in root.named_modules():
        kinds: list[tuple[Slots, Collection[str]]] = [(parameter_slots(module), parameter_slots(module))]
        if not isinstance(module, NormWithStatistics):
            kinds.append((buffer_slots(module), buffer_slots(module).keys() - non_persistent_buffers(module)))
        for slots, names in kinds:
            for name in sorted(names):
                if _is_plain(slots[name]):
                    yield f"{prefix}.{name}" if prefix else name, slots, name


def _is_plain(value: Tensor | None) -> TypeGuard[Tensor]:
    return type(value) in (Tensor, nn.Parameter)


@torch.no_grad()
def _digest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return a positive digest of the bits of tensors, in order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total = total * 31 + bit_digest(tensor).to(device)
    return total & ((1 << 61) - 1)


class BatchAgreement:
    """The meetings of the ranks in one run of training. Every rank must make the same calls in the same order.

    Attributes:
        values: the values that must be equal on data-parallel ranks; None compares none.
    """

    def __init__(self) -> None:
        self.values: ReplicatedValues | None = None
        self._due: Sample | None = None  # on a GPU: of the last meeting, to be compared in the next
        self._skips = 0  # batches until the next meeting
        self._limit = 1  # of batches between meetings; it doubles, so that one short step doesn't postpone many
        self._batches, self._met_s = 0, time.monotonic()  # batches since the last meeting, and its time

    def should_stop(self, is_told: bool, meshes: Meshes, device: torch.device, tuning: Tuning) -> bool:
        """Return True if the ranks meet before this batch, and one of them was told to stop.

        Collective: every rank of the world must call it.

        Args:
            is_told: True if this rank was told to stop; it must be passed until the result is True.
            meshes: the meshes of the strategy.
            device: of this rank.
            tuning: bounds the time between meetings.

        Raises:
            UnsupportedCodeError: as in `meet`.
        """
        self._batches += 1
        if self._skips > 0:
            self._skips -= 1
            return False
        stop, step_s = self._meet(is_told, meshes, device)
        batches = tuning.agreement_s / step_s if step_s > 0 else self._limit
        self._skips = int(max(min(batches, self._limit) - 1, 0))
        self._limit = min(2 * self._limit, tuning.agreement_batches)
        return stop

    def meet(self, ranks: Ranks, meshes: Meshes, device: torch.device) -> None:
        """Compare written numbers and replicated values before a save.

        Collective: every rank of the world must call it. The error names a rank that doesn't.

        Raises:
            UnsupportedCodeError: if ranks wrote different numbers into sharded tensors since the last meeting, or if
                replicated values differ.
            Exception: as in `Ranks.step`.
        """
        self._batches, self._met_s = 0, time.monotonic()
        reports = written_numbers.reports(meshes.pipeline_rank, meshes.topology.pipeline)
        sample = self.values.sample(device) if self.values is not None else None
        self._due = None
        numbers = [*reports, *_encode_digest(sample, meshes)]
        maxima = ranks.step("comparing written numbers", lambda: numbers, _maxima)
        _check(maxima[: len(reports)], maxima[len(reports) :], sample, meshes)

    def _meet(self, is_told: bool, meshes: Meshes, device: torch.device) -> tuple[bool, float]:
        """Return True if a rank was told to stop, and the seconds per batch on the slowest rank; equal on all ranks."""
        now, batches = time.monotonic(), max(self._batches, 1)
        elapsed_us = int((now - self._met_s) * 1e6)
        self._batches, self._met_s = 0, now
        reports = written_numbers.reports(meshes.pipeline_rank, meshes.topology.pipeline)
        sample = self.values.sample(device) if self.values is not None else None
        if device.type != "cpu":
            sample, self._due = self._due, sample
        numbers = torch.tensor([int(is_told), elapsed_us, *reports, *_encode_digest(sample, meshes)])
        stop, longest_us, *maxima = max_over_ranks(numbers).tolist()
        _check(maxima[: len(reports)], maxima[len(reports) :], sample, meshes)
        return bool(stop), longest_us / batches / 1e6


def _check(written: list[int], digests: list[int], sample: Sample | None, meshes: Meshes) -> None:
    """Raise an UnsupportedCodeError on every rank if the maxima over all ranks show a difference."""
    if written_numbers.differ(written):
        raise UnsupportedCodeError(
            "the ranks wrote different numbers into sharded parameters or optimizer state since they last met, "
            "so their shards belong to different models now. Here the last was "
            f"{written_numbers.describe_last_numbers()}. Reduce values that are computed from a rank's own batch "
            "before they are used: self.all_gather(loss).mean(), or self.log(…, sync_dist=True) for values that "
            "schedulers and callbacks read."
        )
    if sample is not None and written_numbers.differ(digests):
        refuse_difference(sample, meshes.data_parallel_group)


def _maxima(rows: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*rows, strict=True)]


def _encode_digest(sample: Sample | None, meshes: Meshes) -> list[int]:
    """Return numbers for a maximum over all ranks, as `written_numbers.reports`, a slot per data-parallel group."""
    if sample is None:
        return []
    digest, tensor = int(sample.digest.read()), meshes.topology.tensor
    slot = meshes.pipeline_rank * tensor + (meshes.root.get_local_rank("tensor") if tensor > 1 else 0)
    numbers = [written_numbers.NOTHING] * (2 * meshes.topology.pipeline * tensor)
    numbers[2 * slot : 2 * slot + 2] = digest, -digest
    return numbers
