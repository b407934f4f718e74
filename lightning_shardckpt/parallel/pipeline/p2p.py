"""Messages between pipeline stages: activations forward, gradients backward.

A message has words, numbers of the host that say which tensors follow, or that their stage failed; and the tensors.

- Words go over gloo, where messages are told apart by tags. Shapes may change from one microbatch to the next.
- Tensors on a CPU do, too; small ones are among the words.
- Tensors on a GPU go over a communicator that knows no tags: both sides begin what they send and receive in the order
  of `Schedule.plan`. Only the stream waits for them, and nobody reads a number from the device.
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
from lightning_shardckpt.parallel.pipeline.schedule import Direction, Receive, Schedule

_WORDS = 256  # int64 numbers
_WITH_TENSORS = 2048  # int64 numbers, where small tensors follow the words
_ALIGNMENT = 16
_TAGS = 64  # a message has at most so many parts
_MICROBATCHES = 4096
_FAILED = -1
_DTYPES = tuple(sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str))
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


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A message of which the words are here; None: the other side failed."""

    message: Message | None
    works: Sequence[dist.Work] = ()


@dataclass(slots=True)
class Transport:
    """Messages between the stages of one pipeline.

    Attributes:
        schedule: says which rank has a stage.
        group: the ranks of the pipeline, for tensors.
        words_group: the same ranks, on gloo.
        rank: of this process among them.
        device: of tensors.
    """

    schedule: Schedule
    group: dist.ProcessGroup
    words_group: dist.ProcessGroup
    rank: int
    device: torch.device
    _pending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _local: dict[_Place, Message | None] = field(default_factory=dict)
    _expected: dict[_Place, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _arriving: dict[_Place, _Arriving] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Let neighbours exchange a byte, in one order on all ranks: NCCL may make a communicator for each pair.

        Collective: every rank of ``group`` must call it.
        """
        if self._has_tags:
            return
        ranks = [self.schedule.rank_of(stage) for stage in range(self.schedule.stages)]
        for pair in sorted({tuple(sorted(two)) for two in pairwise(ranks) if two[0] != two[1]}):
            for source, to in (pair, pair[::-1]):
                byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                if self.rank == source:
                    dist.send(byte, group=self.group, group_dst=to)
                elif self.rank == to:
                    dist.recv(byte, group=self.group, group_src=source)

    def send(self, direction: Direction, boundary: int, microbatch: int, message: Message | None) -> None:
        """Send over the boundary between stages ``boundary`` and ``boundary + 1``; None: this side failed.

        Nobody waits for the other side.
        """
        peer = self.schedule.rank_of(boundary + 1 if direction == "forward" else boundary)
        if peer == self.rank:
            self._local[direction, boundary, microbatch] = message
            return
        tag = _tag(direction, boundary, microbatch)
        given = [] if message is None else [tensor for tensor, _ in message.tensors.values()]
        tensors = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in given]
        words = torch.zeros(self._words, dtype=torch.int64)
        numbers = _numbers(message, tensors)
        words[: len(numbers)] = torch.tensor(numbers)
        places = self._places_among_words([tensor.nbytes for tensor in tensors])
        if places is not None:
            for tensor, (start, stop) in zip(tensors, places, strict=True):
                words.view(torch.uint8)[start:stop] = _bytes(tensor)
            tensors = []
        self._release()
        self._begin(words, peer, self.words_group, tag)
        for part, tensor in enumerate(tensors):
            if tensor.numel():
                self._begin(_bytes(tensor), peer, self.group, tag + 1 + part if self._has_tags else 0)

    def expect(self, place: Receive) -> None:
        """Let the words of a message arrive while this rank computes; `receive` must be called for it."""
        source = self._source(place.direction, place.boundary)
        key = place.direction, place.boundary, place.microbatch
        if source is None or key in self._expected or key in self._arriving:
            return
        words = torch.empty(self._words, dtype=torch.int64)
        work = dist.irecv(words, group=self.words_group, group_src=source, tag=_tag(*key))
        assert work is not None
        self._expected[key] = work, words

    def begin(self, place: Receive) -> None:
        """Begin to receive the tensors of a message; call it at this place of the plan, before `receive`.

        On a GPU it waits until the other side's process has come to its `send`, but for no device. On a CPU tags allow
        to begin when the message is needed.
        """
        if not self._has_tags:
            self._arrive(place)

    def receive(self, direction: Direction, boundary: int, microbatch: int) -> Message:
        """Return the message that the other side of the boundary sends. On a CPU it waits for it, else the stream does.

        Raises:
            PeerFailed: if it failed instead.
        """
        key = direction, boundary, microbatch
        if self._source(direction, boundary) is None:
            message = self._local.pop(key)
        else:
            self._arrive(Receive(*key))
            found = self._arriving.pop(key)
            for work in found.works:
                work.wait()
            message = found.message
        if message is None:
            raise PeerFailed
        return message

    def discard(self, place: Receive) -> None:
        """Receive a message that nobody needs, unless that has happened."""
        key = place.direction, place.boundary, place.microbatch
        if key in self._local or key in self._expected or key in self._arriving:
            with suppress(PeerFailed):
                self.receive(*key)

    def flush(self) -> None:
        """Wait until all that was sent has arrived. Call when every peer has received what it is going to."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    @property
    def _has_tags(self) -> bool:
        """True if tensors go over gloo as well."""
        return self.device.type == "cpu"

    @property
    def _words(self) -> int:
        return _WITH_TENSORS if self._has_tags else _WORDS

    def _begin(self, tensor: Tensor, to: int, group: dist.ProcessGroup, tag: int) -> None:
        work = dist.isend(tensor, group=group, group_dst=to, tag=tag)
        assert work is not None
        self._pending.append((work, tensor))

    def _release(self) -> None:
        """Keep no longer what has arrived."""
        while self._pending and self._pending[0][0].is_completed():
            self._pending.pop(0)[0].wait()

    def _arrive(self, place: Receive) -> None:
        key = place.direction, place.boundary, place.microbatch
        source = self._source(place.direction, place.boundary)
        if source is None or key in self._arriving:
            return
        self.expect(place)
        work, words = self._expected.pop(key)
        work.wait()
        self._arriving[key] = self._received(words, source, _tag(*key))

    def _received(self, words: Tensor, source: int, tag: int) -> _Arriving:
        """Read words, and begin to receive the tensors of which they tell."""
        numbers = words[:_WORDS].tolist()
        if numbers[0] == _FAILED:
            return _Arriving(None)
        facts, parts = _parsed(numbers)
        found = [torch.empty(shape, dtype=dtype, device=self.device) for _, _, dtype, shape in parts]
        places = self._places_among_words([tensor.nbytes for tensor in found])
        works = []
        for part, tensor in enumerate(found):
            if places is not None:
                start, stop = places[part]
                _bytes(tensor).copy_(words.view(torch.uint8)[start:stop])
            elif tensor.numel():
                own_tag = tag + 1 + part if self._has_tags else 0
                works.append(dist.irecv(_bytes(tensor), group=self.group, group_src=source, tag=own_tag))
        tensors = {position: (tensor, flag) for tensor, (position, flag, _, _) in zip(found, parts, strict=True)}
        return _Arriving(Message(tensors, facts), [work for work in works if work is not None])

    def _source(self, direction: Direction, boundary: int) -> int | None:
        """Return the rank from which messages over a boundary come; None if that is this one."""
        peer = self.schedule.rank_of(boundary if direction == "forward" else boundary + 1)
        return None if peer == self.rank else peer

    def _places_among_words(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return where the bytes of tensors are after the words; None if they come by themselves."""
        if not self._has_tags:
            return None
        places, at = list[tuple[int, int]](), _WORDS * torch.int64.itemsize
        for size in sizes:
            places.append((at, at + size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return places if at <= self._words * torch.int64.itemsize else None


def _tag(direction: Direction, boundary: int, microbatch: int) -> int:
    channel = 2 * boundary + (direction == "backward")
    return (channel * _MICROBATCHES + microbatch) * _TAGS


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory: gloo and NCCL do not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _numbers(message: Message | None, tensors: Sequence[Tensor]) -> list[int]:
    if message is None:
        return [_FAILED]
    numbers = [len(message.facts), *message.facts, len(tensors)]
    for tensor, (position, (_, flag)) in zip(tensors, message.tensors.items(), strict=True):
        numbers += [position, int(flag), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    if len(numbers) > _WORDS or len(tensors) >= _TAGS:
        raise UnsupportedCodeError(f"{len(tensors)} tensors cross a pipeline stage at once, which is too many")
    return numbers


def _parsed(numbers: list[int]) -> tuple[tuple[int, ...], list[tuple[int, bool, torch.dtype, list[int]]]]:
    facts, at = tuple(numbers[1 : 1 + numbers[0]]), 2 + numbers[0]
    places = []
    for _ in range(numbers[at - 1]):
        position, flag, dtype, ndim = numbers[at : at + 4]
        places.append((position, bool(flag), _DTYPES[dtype], numbers[at + 4 : at + 4 + ndim]))
        at += 4 + ndim
    return facts, places
