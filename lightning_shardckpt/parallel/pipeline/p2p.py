"""Messages between pipeline stages: activations forward, gradients backward.

Every message begins with a part of fixed size, with a header, so shapes may change from one microbatch to the next, and
a stage that failed can say so in place of what is waited for. Small tensors in host memory are in that part, too.
Sends never block; receives do, unless what they wait for was expected early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.pipeline.schedule import Schedule

_HEADER = 256  # int64 numbers
_FIRST_PART = 2048  # int64 numbers: the header, and small tensors
_ALIGNMENT = 16
_TAGS = 64  # a message has at most so many parts
_MICROBATCHES = 4096
_FAILED = -1
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.complex64, torch.complex128),
)

Direction = Literal["forward", "backward"]
_Place = tuple[Direction, int, int]
"""Direction, boundary and microbatch of a message."""


class PeerFailed(Exception):
    """A neighbouring stage could not send what was expected; its own error is the one that counts."""


@dataclass(frozen=True, slots=True)
class Message:
    """The values that cross the boundary after a stage for one microbatch.

    Attributes:
        tensors: by position, with a flag: forward, whether it takes a gradient.
        facts: numbers that both sides must agree on, such as the number of microbatches.
    """

    tensors: Mapping[int, tuple[Tensor, bool]]
    facts: tuple[int, ...] = ()


@dataclass(slots=True)
class Transport:
    """Messages between the stages of one pipeline.

    Written for gloo, whose messages are told apart by tags; NCCL has none and has not been run.

    Attributes:
        group: the ranks of the pipeline.
    """

    schedule: Schedule
    group: dist.ProcessGroup
    rank: int
    device: torch.device
    _pending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _local: dict[_Place, Message | None] = field(default_factory=dict)
    _expected: dict[_Place, tuple[dist.Work, Tensor]] = field(default_factory=dict)

    def send(self, direction: Direction, boundary: int, microbatch: int, message: Message | None) -> None:
        """Send over the boundary between stages ``boundary`` and ``boundary + 1``; None: this side failed."""
        to = boundary + 1 if direction == "forward" else boundary
        peer = self.schedule.rank_of(to)
        if peer == self.rank:
            self._local[direction, boundary, microbatch] = message
            return
        destination = dist.get_global_rank(self.group, peer)
        tag = self._tag(direction, boundary, microbatch)
        tensors = (
            []
            if message is None
            else [t.detach().resolve_conj().resolve_neg().contiguous() for t, _ in message.tensors.values()]
        )
        first = torch.zeros(_FIRST_PART, dtype=torch.int64)
        numbers = _header(message, tensors)
        first[: len(numbers)] = torch.tensor(numbers)
        places = self._places_inside([tensor.nbytes for tensor in tensors])
        if places is not None:
            for tensor, (start, stop) in zip(tensors, places, strict=True):
                first.view(torch.uint8)[start:stop] = tensor.reshape(-1).view(torch.uint8)
            tensors = []
        for part, tensor in enumerate([first.to(self.device), *tensors]):
            if tensor.numel():
                work = dist.isend(tensor, destination, group=self.group, tag=tag + part)
                assert work is not None
                self._pending.append((work, tensor))

    def expect(self, direction: Direction, boundary: int, microbatch: int) -> None:
        """Let a message arrive while this rank computes; `receive` must be called for it."""
        source = self._source(direction, boundary)
        if source is None or (direction, boundary, microbatch) in self._expected:
            return
        first = torch.empty(_FIRST_PART, dtype=torch.int64, device=self.device)
        work = dist.irecv(first, source, group=self.group, tag=self._tag(direction, boundary, microbatch))
        assert work is not None
        self._expected[direction, boundary, microbatch] = work, first

    def receive(self, direction: Direction, boundary: int, microbatch: int) -> Message:
        """Wait for the message that the other side of the boundary sends.

        Raises:
            PeerFailed: if it failed instead.
        """
        place = direction, boundary, microbatch
        source = self._source(direction, boundary)
        if source is None:
            message = self._local.pop(place)
            if message is None:
                raise PeerFailed
            return message
        tag = self._tag(direction, boundary, microbatch)
        self.expect(direction, boundary, microbatch)
        work, first = self._expected.pop(place)
        work.wait()
        facts, parts = _parsed(first[:_HEADER].tolist())
        found = [torch.empty(shape, dtype=dtype, device=self.device) for _, _, dtype, shape in parts]
        places = self._places_inside([tensor.nbytes for tensor in found])
        for part, tensor in enumerate(found):
            if places is not None:
                start, stop = places[part]
                tensor.view(-1).view(torch.uint8).copy_(first.view(torch.uint8)[start:stop])
            elif tensor.numel():
                dist.recv(tensor, source, group=self.group, tag=tag + 1 + part)
        tensors = {position: (tensor, flag) for tensor, (position, flag, _, _) in zip(found, parts, strict=True)}
        return Message(tensors, facts)

    def _source(self, direction: Direction, boundary: int) -> int | None:
        """Return the global rank from which messages over a boundary come; None if that is this one."""
        peer = self.schedule.rank_of(boundary if direction == "forward" else boundary + 1)
        return None if peer == self.rank else dist.get_global_rank(self.group, peer)

    def _places_inside(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return where the bytes of tensors are in the first part of a message; None if they come after it."""
        if self.device.type != "cpu":  # it is made in host memory
            return None
        places, at = list[tuple[int, int]](), _HEADER * torch.int64.itemsize
        for size in sizes:
            places.append((at, at + size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return places if at <= _FIRST_PART * torch.int64.itemsize else None

    def flush(self) -> None:
        """Wait until all that was sent has arrived. Call when every peer has received what it is going to."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _tag(self, direction: Direction, boundary: int, microbatch: int) -> int:
        channel = 2 * boundary + (direction == "backward")
        return (channel * _MICROBATCHES + microbatch) * _TAGS


def _header(message: Message | None, tensors: Sequence[Tensor]) -> list[int]:
    if message is None:
        return [_FAILED]
    numbers = [len(message.facts), *message.facts, len(tensors)]
    for tensor, (position, (_, flag)) in zip(tensors, message.tensors.items(), strict=True):
        if tensor.dtype not in _DTYPES:
            raise TopologyError(f"a tensor of {tensor.dtype} cannot cross pipeline stages; expected one of {_DTYPES}")
        numbers += [position, int(flag), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    if len(numbers) > _HEADER or len(tensors) >= _TAGS:
        raise TopologyError(f"{len(tensors)} tensors cross a pipeline stage at once, which is too many")
    return numbers


def _parsed(numbers: list[int]) -> tuple[tuple[int, ...], list[tuple[int, bool, torch.dtype, list[int]]]]:
    if numbers[0] == _FAILED:
        raise PeerFailed
    facts, at = tuple(numbers[1 : 1 + numbers[0]]), 2 + numbers[0]
    places = []
    for _ in range(numbers[at - 1]):
        position, flag, dtype, ndim = numbers[at : at + 4]
        places.append((position, bool(flag), _DTYPES[dtype], numbers[at + 4 : at + 4 + ndim]))
        at += 4 + ndim
    return facts, places
