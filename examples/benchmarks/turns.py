"""Compare candidates by turns in the same processes, and only after each has shown that it works.

Every rank runs the same ways in the same order, round after round. Times are those of the slowest rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import shutil
import socket
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from tqdm import tqdm

MB = 1e6
Facts = dict[str, float]
Row = dict[str, Any]
_C = TypeVar("_C", bound="Candidate")
_TIMEOUT_S = 180


class Candidate(Protocol):
    """One way to do something, by name, with what it is to be compared with."""

    @property
    def name(self) -> str: ...

    @property
    def limit(self) -> str | None: ...

    @property
    def peer(self) -> str | None: ...


@dataclass(frozen=True)
class Way:
    """One way to save and load a ``State``, by name, with what it is to be compared with."""

    name: str
    save: Callable[[Any, str], Any]
    load: Callable[[Any, str], Any]
    limit: str | None = None
    peer: str | None = None
    fresh: bool = False
    """Its load begins without optimizer state, as that of a resumed run does, and makes it."""
    begin: Callable[[Any, str], Callable[[], Any]] | None = None
    """An asynchronous save: returns what waits until the checkpoint is complete."""


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def on_ranks(world: int, job: Callable[..., Any], *args: Any) -> Any:
    """What ``job(*args)`` returns on rank 0 of ``world`` processes with one thread each, over gloo.

    They are forked, so that none imports torch again; what they need should be imported before.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        answer = Path(folder, "answer.json")
        gc.collect()
        gc.freeze()  # what is imported need not be gone through by each collection of each rank
        start_processes(_enter, (world, port, answer, job, args), nprocs=world, start_method="fork")
        return json.loads(answer.read_text())


def case(section: str, name: str, run: Callable[..., list[Row]], *args: Any) -> list[Row]:
    """The rows of ``run(*args)``; one with the error if its processes failed as a whole: a way may take all down."""
    try:
        return run(*args)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return [_row("every way", section=section, case=name) | {"error": lines[-1], "rounds": []}]


def chosen(options: Namespace, *worlds: int) -> list[int]:
    """Return those of some numbers of ranks that ``--ranks`` asks for; all of them without it."""
    return [world for world in worlds if options.ranks is None or world in options.ranks]


def _row(way: str, limit: str | None = None, peer: str | None = None, **about: str) -> Row:
    return {**about, "way": way, "limit": limit, "peer": peer}


@cache
def device() -> torch.device:
    """Return the GPU of this rank, where there is one for each; else the CPU. Not for the process that starts ranks.

    A Trainer takes ``WORLD_SIZE`` out of the environment when it is done.
    """
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def now() -> float:
    """Return the time at which all work of this rank is done."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _enter(rank: int, world: int, port: int, answer: Path, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore")  # torch's, of names that it is going to change
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in places.items()} | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    backend = "gloo" if device().type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=_TIMEOUT_S))
    found = job(*args)
    if rank == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def together(work: Callable[[], Facts]) -> Facts:
    """Run ``work`` on every rank; the largest of each fact, but the sum of bytes. Raises on all if it fails on one."""
    mine: Facts = {}
    failure: Exception | None = None
    try:
        mine = work()
    except Exception as error:
        failure = error
    described = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}" if str(failure) else ""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, described if failure is not None else None))
    errors = [error for _, error in everyone if error is not None]
    if errors:
        raise RuntimeError(errors[0]) from failure
    return {key: (sum if key.endswith("bytes") else max)(facts[key] for facts, _ in everyone) for key in mine}


# ── rounds ────────────────────────────────────────────────────────────────────────────────────────────────────────


def take_turns(
    ways: Sequence[_C],
    rounds: int,
    check: Callable[[_C], Facts],
    act: Callable[[_C], Facts],
    **about: str,
) -> list[Row]:
    """A row for each way: the facts of every round, or why there are none. What fails ``check`` gets no turn.

    Each round has an order of its own, since a way that leaves memory in a bad state slows the one after it.
    """
    rows = {way.name: _row(way.name, way.limit, way.peer, **about) for way in ways}
    facts: dict[str, list[Facts]] = {way.name: [] for way in ways}

    def attempt(way: _C, work: Callable[[_C], Facts]) -> Facts | None:
        if "error" in rows[way.name]:
            return None
        try:
            return together(lambda: work(way))
        except Exception as error:
            rows[way.name]["error"] = str(error) or type(error).__name__
        return None

    hidden = None if dist.get_rank() == 0 else True  # None: where nobody watches
    with tqdm(total=(1 + rounds) * len(ways), desc=", ".join(about.values()), leave=False, disable=hidden) as bar:
        for way in ways:
            rows[way.name]["checked"] = attempt(way, check)
            bar.update()
        for number in range(rounds):
            for way in random.Random(number).sample(ways, len(ways)):
                found = attempt(way, act)
                if found is not None:
                    facts[way.name].append(found)
                bar.update()
    for name, row in rows.items():
        row["rounds"] = facts[name]
    return list(rows.values())


def timed(work: Callable[[], Any], ready: Callable[[], Any] = lambda: None) -> Facts:
    """Seconds, MB of memory that this rank needed above what it had before, and bytes that it read.

    ``ready`` is run first and is not timed.

    Memory is VmHWM, reset by /proc/self/clear_refs, so pages of mapped files count; what malloc kept is given back
    first. Bytes are /proc/self/io's rchar: those of read and pread by all threads, but not of mapped files.
    """
    ready()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    dist.barrier()
    read, begin = _read_bytes(), time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "extra_mb": memory_mb("VmHWM") - before, "read_bytes": _read_bytes() - read}


def memory_mb(key: str) -> float:
    """VmRSS or VmHWM of this process."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024 / MB


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


# ── disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def clear(path: str) -> None:
    """Delete a file or folder, so that its dirty pages do not slow the next way. Collective.

    Dirty pages of a deleted file are dropped; what is left is the journal's, for which this waits.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        Path(path).unlink(missing_ok=True)
        parent = os.open(Path(path).parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
    dist.barrier()


def use_page_cache(path: str, nbytes: int) -> None:
    """Write a file of zeros and delete it, so that every way finds memory for the page cache that was just in use.

    A virtual machine gives memory that is free for some seconds back to its host, and waits to get it again.
    """
    zeros = bytes(1 << 20)
    with open(path, "wb", buffering=0) as file:
        for _ in range(0, nbytes, len(zeros)):
            file.write(zeros)
    Path(path).unlink()


def recall(path: str) -> None:
    """Read the files below ``path``, so that the page cache has them: it may have dropped what nobody used for long."""
    for file in (file for file in Path(path).rglob("*") if file.is_file()):
        with open(file, "rb") as opened, open(os.devnull, "wb") as nowhere:
            shutil.copyfileobj(opened, nowhere, 1 << 20)


def evict(path: str) -> float:
    """Drop the files below ``path`` from the page cache; returns the share of their pages that stayed there."""
    total = stayed = 0
    for file in (file for file in Path(path).rglob("*") if file.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            pages, cached = _pages(fd)
            total, stayed = total + pages, stayed + cached
        finally:
            os.close(fd)
    return stayed / max(total, 1)


def _pages(fd: int) -> tuple[int, int]:
    """How many pages a file has, and how many of them are in the page cache, by mincore."""
    if (size := os.fstat(fd).st_size) == 0:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, 1, 1, fd, 0)  # PROT_READ, MAP_SHARED
    count = -(-size // 4096)
    resident = (ctypes.c_ubyte * count)()
    failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return count, sum(page & 1 for page in bytes(resident))
