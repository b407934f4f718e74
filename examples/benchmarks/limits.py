"""The limits: the same bytes by plain system calls, one file of each rank, its shards one after the other.

No format, no checksums, no agreement between ranks: what no way of saving or loading can beat.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from state import State, view
from turns import Way

_PIECE = 8 << 20


def _file(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return os.path.join(path, f"{dist.get_rank()}.bin")


def write_direct(state: State, path: str) -> None:
    """Past the page cache, from page-aligned memory, and durable."""
    memory = memoryview(state.arena)
    fd = os.open(_file(path), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        for at in range(0, len(memory), _PIECE):
            piece = memory[at : at + _PIECE]
            if os.pwrite(fd, piece, at) != len(piece):
                raise OSError("a short write")
        os.fsync(fd)
    finally:
        os.close(fd)


def write_buffered(state: State, path: str, *, sync: bool) -> None:
    """Into the page cache; with ``sync`` from there to the disk."""
    fd = os.open(_file(path), os.O_WRONLY | os.O_CREAT)
    try:
        for tensor in state.pull():
            left = view(tensor)
            while left:
                left = left[os.write(fd, left) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def read(state: State, path: str) -> None:
    """Into the live tensors."""
    tensors = state.pull()
    read_into(tensors, path)
    state.push(tensors)


def read_into(tensors: Iterable[torch.Tensor], path: str) -> None:
    """From the beginning of this rank's file into tensors, one after the other."""
    fd, at = os.open(_file(path), os.O_RDONLY), 0
    try:
        for tensor in tensors:
            left = view(tensor)
            while left:
                count = os.preadv(fd, [left], at)
                if not count:
                    raise EOFError(path)
                left, at = left[count:], at + count
    finally:
        os.close(fd)


def read_anew(state: State, path: str) -> None:
    """The same, but the optimizer's tensors are allocated first, as in a run that resumes."""
    for parameter in state.model.parameters():
        moments = {name: torch.empty_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        state.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    read(state, path)


def copy(state: State, path: str) -> Any:
    """What any asynchronous save has to wait for: a copy of all values, here into memory that was used before."""
    if "copies" not in state.kept:
        at, copies = 0, []
        for tensor in state.locals().values():
            part = torch.frombuffer(state.arena, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            copies.append(part.view(tensor.shape))
            at += tensor.nbytes
        state.kept["copies"] = copies
    for to, tensor in zip(state.kept["copies"], state.locals().values(), strict=True):
        to.copy_(tensor)
    return lambda: None


def _copied(state: State, path: str) -> None:
    for of, tensor in zip(state.kept["copies"], state.locals().values(), strict=True):
        tensor.copy_(of)


DIRECT, SYNCED, BUFFERED = "limit: O_DIRECT + fsync", "limit: write + fsync", "limit: write, no fsync"
READ, READ_ANEW, COPY = "limit: preadv in place", "limit: preadv, new moments", "limit: memcpy"

WRITES = [
    Way(DIRECT, write_direct, read, limit=DIRECT),
    Way(SYNCED, lambda s, p: write_buffered(s, p, sync=True), read, limit=DIRECT),
    Way(BUFFERED, lambda s, p: write_buffered(s, p, sync=False), read, limit=BUFFERED),
]
READS = [
    Way(READ, lambda s, p: write_buffered(s, p, sync=True), read, limit=READ),
]
RESUMES = [Way(READ_ANEW, lambda s, p: write_buffered(s, p, sync=True), read_anew, limit=READ_ANEW, fresh=True)]
COPIES = [Way(COPY, lambda s, p: None, _copied, begin=copy, limit=COPY)]
