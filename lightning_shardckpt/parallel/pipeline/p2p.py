"""Messages between pipeline stages: activations forward, gradients backward.

A message is a header from host memory, sent over gloo under a tag, and tensors. The header describes the tensors, whose
shapes may differ between microbatches, or says that the stage failed; on a CPU it also holds small tensors. Other CPU
tensors are sent over gloo, too. GPU tensors are sent over a communicator without tags, so both sides post sends and
receives in the order of `Schedule.plan`. Only the stream waits for them, and no rank reads a number from its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.distributed.host_numbers import pickle_to_tensor, unpickle_tensor
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.schedule import Receive, Schedule
from lightning_shardckpt.system.tensor_digest import byte_view

_DESCRIPTION = 2048  # bytes at the start of a header
_HEADER = 16384  # bytes of a header with small tensors
_TAGS = 64  # the maximum number of parts of a message
_MICROBATCHES = 4096


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


class Transport:
    """Messages between the stages of one pipeline.

    Args:
        schedule: assigns stages to ranks.
        group: the ranks of the pipeline, for tensors.
        header_group: the same ranks, with gloo.
        rank: of this process in ``group``.
        device: of the tensors.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: dist.ProcessGroup,
        header_group: dist.ProcessGroup,
        rank: int,
        device: torch.device,
    ) -> None:
        self.rank, self._device, self._group, self._header_group = rank, device, group, header_group
        self._ranks = [schedule.rank_of(stage) for stage in range(schedule.stages)]
        self._has_tags = device.type == "cpu"  # tensors are sent over gloo, too
        self._header_size = _HEADER if self._has_tags else _DESCRIPTION
        self._pending = list[tuple[dist.Work | None, Tensor]]()
        self._local = dict[Receive, Message | None]()
        self._headers = dict[Receive, tuple[dist.Work | None, Tensor]]()
        self._incoming = dict[Receive, tuple[Message | None, Sequence[dist.Work | None]]]()

    def warm_up(self) -> None:
        """Exchange a byte between neighbours, in one order on all ranks: NCCL may create a communicator for each pair.

        Collective: every rank of ``group`` must call it.
        """
        if self._has_tags:
            return
        for pair in sorted({tuple(sorted(two)) for two in pairwise(self._ranks) if two[0] != two[1]}):
            for source, to in (pair, pair[::-1]):
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                if self.rank == source:
                    dist.send(byte, group=self._group, group_dst=to)
                elif self.rank == to:
                    dist.recv(byte, group=self._group, group_src=source)

    def send(self, place: Receive, message: Message | None) -> None:
        """Send a message, without a wait. ``None`` tells the receiver that this stage failed."""
        peer = self._ranks[place.boundary + (place.direction == "forward")]
        if peer == self.rank:
            self._local[place] = message
            return
        description, tensors, tag = None, list[Tensor](), _tag(place)
        if message is not None:
            tensors = [t.detach().resolve_conj().resolve_neg().contiguous() for t, _ in message.tensors.values()]
            flags = [(position, flag) for position, (_, flag) in message.tensors.items()]
            description = message.checks, flags, [(t.dtype, tuple(t.shape)) for t in tensors]
        content = pickle_to_tensor(description)
        if len(content) > _DESCRIPTION or len(tensors) >= _TAGS:
            raise UnsupportedCodeError(
                f"{len(tensors)} tensors are too many for one message between pipeline stages (at most {_TAGS - 1}, "
                "fewer with many dims): stack some of them"
            )
        header = torch.zeros(self._header_size, dtype=torch.uint8)
        header[: len(content)] = content
        if self._fit_inside(tensors):
            at = _DESCRIPTION
            for tensor in tensors:
                header[at : at + tensor.nbytes] = byte_view(tensor)
                at += tensor.nbytes
            tensors = []
        while self._pending and self._pending[0][0].is_completed():  # type: ignore[union-attr]  # this rank sends
            _wait([self._pending.pop(0)[0]])
        self._pending.append((dist.isend(header, group=self._header_group, group_dst=peer, tag=tag), header))
        for part, tensor in enumerate(map(byte_view, tensors)):
            if tensor.numel():
                own_tag = tag + 1 + part if self._has_tags else 0
                work = dist.isend(tensor, group=self._group, group_dst=peer, tag=own_tag)
                self._pending.append((work, tensor))

    def post_header(self, place: Receive) -> None:
        """Post the receive of a message's header, which arrives while this rank computes; `receive` must follow."""
        if place in self._headers or place in self._incoming or (source := self._source(place)) is None:
            return
        header = torch.empty(self._header_size, dtype=torch.uint8)
        work = dist.irecv(header, group=self._header_group, group_src=source, tag=_tag(place))
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
            message, works = self._incoming.pop(place)
            _wait(works)
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
        _wait([work for work, _ in self._pending])
        self._pending.clear()

    def _await_header(self, place: Receive) -> None:
        """Wait for a message's header, and post the receives of the tensors that are not inside it."""
        source = self._source(place)
        if source is None or place in self._incoming:
            return
        self.post_header(place)
        work, header = self._headers.pop(place)
        _wait([work])
        described = unpickle_tensor(header)
        if described is None:
            self._incoming[place] = None, ()
            return
        checks, flags, kinds = described
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in kinds]
        works, at, is_inside = list[dist.Work | None](), _DESCRIPTION, self._fit_inside(tensors)
        for part, tensor in enumerate(tensors):
            if is_inside:
                byte_view(tensor).copy_(header[at : at + tensor.nbytes])
                at += tensor.nbytes
            elif tensor.numel():
                own_tag = _tag(place) + 1 + part if self._has_tags else 0
                works.append(dist.irecv(byte_view(tensor), group=self._group, group_src=source, tag=own_tag))
        by_position = {position: (tensor, flag) for (position, flag), tensor in zip(flags, tensors, strict=True)}
        self._incoming[place] = Message(by_position, checks), works

    def _source(self, place: Receive) -> int | None:
        """Return the rank that sends a message; None if it is this one."""
        peer = self._ranks[place.boundary + (place.direction == "backward")]
        return None if peer == self.rank else peer

    def _fit_inside(self, tensors: Sequence[Tensor]) -> bool:
        return self._has_tags and _DESCRIPTION + sum(tensor.nbytes for tensor in tensors) <= _HEADER


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # since this rank is in the group
        work.wait()


def _tag(place: Receive) -> int:
    channel = 2 * place.boundary + (place.direction == "backward")
    return (channel * _MICROBATCHES + place.microbatch) * _TAGS
