"""Messages between pipeline stages: activations forward, gradients backward.

A message consists of a header and tensors. The header holds numbers from host memory: the shapes and dtypes of the
tensors, which may differ between microbatches, or a mark that the stage failed.

- Headers are sent over gloo, with tags that identify the message.
- CPU tensors are sent over gloo, too; small ones inside the header.
- GPU tensors are sent over a communicator without tags, so both sides post sends and receives in the order of
  `Schedule.plan`. Only the stream waits for them, and no rank reads a number from its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.schedule import Receive, Schedule
from lightning_shardckpt.system.tensor_digest import byte_view

_HEADER = 256  # int64 numbers
_HEADER_AND_TENSORS = 2048  # int64 numbers of a header with small tensors
_ALIGNMENT = 16
_TAGS = 64  # the maximum number of parts of a message
_MICROBATCHES = 4096
_FAILED = -1
_DTYPES = tuple(sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str))


class PeerFailed(Exception):
    """A neighbouring stage failed instead of sending a message; the ranks raise its error."""


@dataclass(frozen=True, slots=True)
class Message:
    """The values that cross the boundary after a stage for one microbatch.

    Attributes:
        tensors: by position, with a flag; in a forward message, True if the tensor requires a gradient.
        checks: numbers that must be equal on both sides, such as a checksum of the random generators.
    """

    tensors: Mapping[int, tuple[Tensor, bool]]
    checks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A message with a received header, and the pending receives of its tensors; None if the sender failed."""

    message: Message | None
    works: Sequence[dist.Work] = ()


@dataclass(slots=True)
class Transport:
    """Messages between the stages of one pipeline.

    Attributes:
        schedule: assigns stages to ranks.
        group: the ranks of the pipeline, for tensors.
        header_group: the same ranks, with gloo.
        rank: of this process in ``group``.
        device: of the tensors.
    """

    schedule: Schedule
    group: dist.ProcessGroup
    header_group: dist.ProcessGroup
    rank: int
    device: torch.device
    _ranks: Sequence[int] = field(init=False)  # by stage
    _pending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _local: dict[Receive, Message | None] = field(default_factory=dict)
    _headers: dict[Receive, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _incoming: dict[Receive, _Incoming] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ranks = [self.schedule.rank_of(stage) for stage in range(self.schedule.stages)]

    def warm_up(self) -> None:
        """Exchange a byte between neighbours, in one order on all ranks: NCCL may create a communicator for each pair.

        Collective: every rank of ``group`` must call it.
        """
        if self._has_tags:
            return
        for pair in sorted({tuple(sorted(two)) for two in pairwise(self._ranks) if two[0] != two[1]}):
            for source, to in (pair, pair[::-1]):
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                if self.rank == source:
                    dist.send(byte, group=self.group, group_dst=to)
                elif self.rank == to:
                    dist.recv(byte, group=self.group, group_src=source)

    def send(self, place: Receive, message: Message | None) -> None:
        """Send a message, without a wait. ``None`` tells the receiver that this stage failed."""
        peer = self._ranks[place.boundary + (place.direction == "forward")]
        if peer == self.rank:
            self._local[place] = message
            return
        tag = _tag(place)
        values = [] if message is None else [tensor for tensor, _ in message.tensors.values()]
        tensors = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in values]
        header = torch.zeros(self._header_size, dtype=torch.int64)
        numbers = _encode_header(message, tensors)
        header.numpy()[: len(numbers)] = numbers
        ranges = self._inline_ranges([tensor.nbytes for tensor in tensors])
        if ranges is not None:
            for tensor, (start, stop) in zip(tensors, ranges, strict=True):
                header.view(torch.uint8)[start:stop] = byte_view(tensor)
            tensors = []
        while self._pending and self._pending[0][0].is_completed():
            self._pending.pop(0)[0].wait()
        self._post_send(header, peer, self.header_group, tag)
        for part, tensor in enumerate(tensors):
            if tensor.numel():
                self._post_send(byte_view(tensor), peer, self.group, tag + 1 + part if self._has_tags else 0)

    def post_header(self, place: Receive) -> None:
        """Post the receive of a message's header, which arrives while this rank computes; `receive` must follow."""
        source = self._source(place)
        if source is None or place in self._headers or place in self._incoming:
            return
        header = torch.empty(self._header_size, dtype=torch.int64)
        work = dist.irecv(header, group=self.header_group, group_src=source, tag=_tag(place))
        assert work is not None
        self._headers[place] = work, header

    def post_tensors(self, place: Receive) -> None:
        """Post the receives of a message's GPU tensors; call it at this point of the plan, before `receive`.

        Waits until the sender has called `send`, but not for a device. Does nothing on a CPU, where tags allow to post
        receives when the message is needed.
        """
        if not self._has_tags:
            self._await_header(place)

    def receive(self, place: Receive) -> Message:
        """Return a message. Waits for its tensors on a CPU; on a GPU only the stream waits.

        Raises:
            PeerFailed: if the sending stage failed.
        """
        if self._source(place) is None:
            message = self._local.pop(place)
        else:
            self._await_header(place)
            incoming = self._incoming.pop(place)
            for work in incoming.works:
                work.wait()
            message = incoming.message
        if message is None:
            raise PeerFailed
        return message

    def discard(self, place: Receive) -> None:
        """Receive and discard a message, unless it has been received."""
        if place in self._local or place in self._headers or place in self._incoming:
            with suppress(PeerFailed):
                self.receive(place)

    def flush(self) -> None:
        """Wait until all sent messages have arrived. Call it after all ranks have received their messages."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    @property
    def _has_tags(self) -> bool:
        """True if tensors are sent over gloo, too."""
        return self.device.type == "cpu"

    @property
    def _header_size(self) -> int:
        return _HEADER_AND_TENSORS if self._has_tags else _HEADER

    def _post_send(self, tensor: Tensor, to: int, group: dist.ProcessGroup, tag: int) -> None:
        work = dist.isend(tensor, group=group, group_dst=to, tag=tag)
        assert work is not None
        self._pending.append((work, tensor))

    def _await_header(self, place: Receive) -> None:
        source = self._source(place)
        if source is None or place in self._incoming:
            return
        self.post_header(place)
        work, header = self._headers.pop(place)
        work.wait()
        self._incoming[place] = self._read_header(header, source, _tag(place))

    def _read_header(self, header: Tensor, source: int, tag: int) -> _Incoming:
        """Read a header, and post the receives of the tensors that are not inside it."""
        numbers = header.numpy()[:_HEADER].tolist()
        if numbers[0] == _FAILED:
            return _Incoming(None)
        checks, parts = _decode_header(numbers)
        values = [torch.empty(shape, dtype=dtype, device=self.device) for _, _, dtype, shape in parts]
        ranges = self._inline_ranges([tensor.nbytes for tensor in values])
        works = []
        for part, tensor in enumerate(values):
            if ranges is not None:
                start, stop = ranges[part]
                byte_view(tensor).copy_(header.view(torch.uint8)[start:stop])
            elif tensor.numel():
                own_tag = tag + 1 + part if self._has_tags else 0
                works.append(dist.irecv(byte_view(tensor), group=self.group, group_src=source, tag=own_tag))
        tensors = {position: (tensor, flag) for tensor, (position, flag, _, _) in zip(values, parts, strict=True)}
        return _Incoming(Message(tensors, checks), [work for work in works if work is not None])

    def _source(self, place: Receive) -> int | None:
        """Return the rank that sends a message; None if it is this one."""
        peer = self._ranks[place.boundary + (place.direction == "backward")]
        return None if peer == self.rank else peer

    def _inline_ranges(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of tensors inside a header; None if they are sent separately."""
        if not self._has_tags:
            return None
        ranges, at = list[tuple[int, int]](), _HEADER * torch.int64.itemsize
        for size in sizes:
            ranges.append((at, at + size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return ranges if at <= self._header_size * torch.int64.itemsize else None


def _tag(place: Receive) -> int:
    channel = 2 * place.boundary + (place.direction == "backward")
    return (channel * _MICROBATCHES + place.microbatch) * _TAGS


def _encode_header(message: Message | None, tensors: Sequence[Tensor]) -> list[int]:
    if message is None:
        return [_FAILED]
    numbers = [len(message.checks), *message.checks, len(tensors)]
    for tensor, (position, (_, flag)) in zip(tensors, message.tensors.items(), strict=True):
        numbers += [position, int(flag), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    if len(numbers) > _HEADER or len(tensors) >= _TAGS:
        raise UnsupportedCodeError(
            f"{len(tensors)} tensors are too many for one message between pipeline stages (at most {_TAGS - 1}, fewer "
            "with many dims): stack some of them"
        )
    return numbers


def _decode_header(numbers: list[int]) -> tuple[tuple[int, ...], list[tuple[int, bool, torch.dtype, list[int]]]]:
    """Return the checks, and the position, flag, dtype and shape of each tensor."""
    checks, at = tuple(numbers[1 : 1 + numbers[0]]), 2 + numbers[0]
    parts = []
    for _ in range(numbers[at - 1]):
        position, flag, dtype, ndim = numbers[at : at + 4]
        parts.append((position, bool(flag), _DTYPES[dtype], numbers[at + 4 : at + 4 + ndim]))
        at += 4 + ndim
    return checks, parts
