"""All bytes arrive on the way past the page cache. Oracle: the joined parts. Files on a disk, and in memory."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet, ref

import numpy
import pytest
import torch

from lightning_shardckpt.checkpoint.checkpoint import load_full, save
from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.local.direct_io import write_durably
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.tuning import TUNING, Tuning
from tests.sweeps.faults.inject import Fault, Interposer

BLOCK, BUFFER, SMALL = 4096, 16384, 8192
# files of some KB are written as large ones are
SMALL_FILES = Tuning(disk_buffer_bytes=BUFFER, direct_io_bytes=SMALL, numpy_copy_bytes=BLOCK)
RANDOM = numpy.random.default_rng(0).bytes(1 << 20)
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, SMALL - 1, SMALL, BUFFER - 1, BUFFER, BUFFER + 1, 5 * BUFFER + 7)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk asks for alignment, a file system in memory does not, or refuses to be written directly at all."""
    if request.param == "disk":
        yield tmp_path
        return
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("this machine has no /dev/shm")
    found = memory / f"test-direct-{os.getpid()}"
    found.mkdir()
    try:
        yield found
    finally:
        for path in found.iterdir():
            path.unlink()
        found.rmdir()


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def written(path: Path, parts: Any, tuning: Tuning = SMALL_FILES) -> bytes:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_durably(file, parts, tuning)
    finally:
        os.close(file)
    return path.read_bytes()


def split(sizes: Sequence[int], at: int = 0) -> list[Bytes]:
    """Random parts; the memory of every second one begins at an odd address."""
    memory = numpy.frombuffer(RANDOM, numpy.uint8).copy()
    begin = 1 - memory.ctypes.data % 2 + at
    found: list[Bytes] = []
    for number, size in enumerate(sizes):
        part = memoryview(memory)[begin : begin + size]  # type: ignore[arg-type]
        found.append(bytes(part) if number % 2 else part)
        begin += size + size % 2
    return found


def calls(interposer: Interposer) -> list[str]:
    return [call.split()[0] for call in interposer.calls]


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_parts_of_all_sizes_arrive_whole(count: int, folder: Path) -> None:
    every = 7 if count == 3 else 1  # and no divisor of how many there are
    for sizes in itertools.islice(itertools.product(SIZES, repeat=count), 0, None, every):
        parts = split(sizes)
        assert written(folder / "a", iter(parts)) == b"".join(parts), sizes
        (folder / "a").unlink()


def test_many_parts_of_all_addresses_arrive_whole(folder: Path) -> None:
    parts = [part for at in range(64) for part in split([at, 700, BLOCK + at], at)]
    assert written(folder / "a", parts) == b"".join(parts)


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, (33 << 20) + 5])
def test_one_part_of_any_size_arrives_whole(size: int, folder: Path) -> None:
    part = (RANDOM * 34)[:size]
    assert written(folder / "a", [memoryview(part)], TUNING) == part


def test_only_what_is_large_and_aligned_goes_past_the_cache(tmp_path: Path) -> None:
    flags: list[tuple[int, bool]] = []
    pwrite = os.pwrite

    def seen(file: int, data: memoryview, offset: int) -> int:
        flags.append((len(data), bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)))
        return pwrite(file, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", seen)
        for name, size in {"a": SMALL - 1, "b": SMALL, "c": 2 * BUFFER + BLOCK + 3}.items():
            assert len(written(tmp_path / name, [RANDOM[:size]])) == size
    if not any(is_direct for _, is_direct in flags):
        pytest.skip(f"the file system of {tmp_path} has no direct writes")
    assert flags == [(SMALL - 1, False), (SMALL, True), (BUFFER, True), (BUFFER, True), (BLOCK, True), (3, False)]


def test_parts_are_dropped_when_they_are_copied(tmp_path: Path) -> None:
    alive: list[ref[numpy.ndarray]] = []

    def parts() -> Iterator[memoryview]:
        for _ in range(50):
            array = numpy.zeros(BLOCK, numpy.uint8)
            alive.append(ref(array))
            assert sum(each() is not None for each in alive) <= 2
            yield memoryview(array)

    assert len(written(tmp_path / "a", parts())) == 50 * BLOCK


def test_a_file_is_written_while_its_parts_are_made(tmp_path: Path) -> None:
    """No part after the first buffer is made before that buffer is on its way; and by another thread."""
    threads: list[int] = []
    first, pwrite = threading.Event(), os.pwrite

    def seen(*args: Any) -> int:
        threads.append(threading.get_ident())
        first.set()
        return pwrite(*args)

    def parts() -> Iterator[bytes]:
        yield bytes(BUFFER)
        assert first.wait(60)
        yield b"end"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", seen)
        assert written(tmp_path / "a", parts()) == bytes(BUFFER) + b"end"
    assert threading.get_ident() not in threads


def test_several_threads_write_files_of_their_own(folder: Path) -> None:
    contents = [RANDOM[i * 999 : i * 999 + 9 * BUFFER + i] for i in range(4)]
    found: dict[int, bytes] = {}

    def write(number: int) -> None:
        for again in range(5):
            part = memoryview(contents[number])
            cuts = [part[i : i + 1000] for i in range(0, len(part), 1000)]
            found[number] = written(folder / f"{number}-{again}", cuts)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == contents


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_meanwhile_changes_nothing(folder: Path) -> None:
    """It has the memory of its parent, and writes a file of its own."""
    children: list[int] = []

    def parts() -> Iterator[bytes]:
        for number in range(40):
            if number % 10 == 5:
                child = os.fork()
                if child == 0:
                    good, content = False, b"\xff" * (3 * BUFFER)
                    try:
                        good = written(folder / f"child-{number}", [content]) == content
                    finally:
                        os._exit(0 if good else 1)
                children.append(child)
            yield bytes([number]) * 3000

    assert written(folder / "a", parts()) == b"".join(bytes([number]) * 3000 for number in range(40))
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4


def test_without_another_thread_the_file_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert written(tmp_path / "a", split([5 * BUFFER + 9])) == b"".join(split([5 * BUFFER + 9]))


# ── refusals and errors ───────────────────────────────────────────────────────────────────────────────────────────

PARTS = split([1000, 3 * BUFFER, 7, BUFFER // 2])  # more buffers than there are, and an end that is not aligned


def ended(folder: Path, fault: Fault, parts: Any = PARTS) -> tuple[bytes | OSError, list[str]]:
    """What was written, or the error; and the calls."""
    with Interposer(str(folder), fault) as interposer:
        try:
            found: bytes | OSError = written(folder / "a", parts)
        except OSError as error:
            found = error
    if (folder / "a").exists():
        (folder / "a").unlink()
    return found, calls(interposer)


def each_call(folder: Path, *names: str) -> list[int]:
    """The numbers of the calls of these names."""
    found, made = ended(folder, Fault("errno"))
    assert found == b"".join(PARTS)
    return [number for number, name in enumerate(made, 1) if name in names]


def test_the_calls_of_a_file_are_the_same_every_time(folder: Path) -> None:
    assert len({tuple(ended(folder, Fault("errno"))[1]) for _ in range(20)}) == 1


@pytest.mark.parametrize("what", ["fcntl", "pwrite"])
def test_where_a_direct_write_is_refused_the_bytes_are_the_same(what: str, tmp_path: Path) -> None:
    numbers = each_call(tmp_path, what)
    if len(each_call(tmp_path, "fcntl")) < 2:
        pytest.skip(f"the file system of {tmp_path} has no direct writes")
    for number in numbers[:1] if what == "fcntl" else numbers[:-1]:  # the last ones are buffered
        found, made = ended(tmp_path, Fault("errno", number, errno.EINVAL))
        assert found == b"".join(PARTS) and "fsync" in made


@pytest.mark.parametrize("kind", ["short", "short from on"])
def test_what_a_write_left_over_is_written(kind: Any, folder: Path) -> None:
    for number in each_call(folder, "pwrite"):
        assert ended(folder, Fault(kind, number))[0] == b"".join(PARTS)


@pytest.mark.parametrize("kind", ["errno", "sticky"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_error_is_raised_where_the_parts_come_from(kind: Any, code: int, folder: Path) -> None:
    for number in each_call(folder, "pwrite", "fsync"):
        found, made = ended(folder, Fault(kind, number, code))
        assert isinstance(found, OSError) and found.errno == code
        assert made[number:] == []  # nothing is written or synced after an error


def test_an_error_of_the_disk_stops_whoever_makes_the_parts(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(SMALL_FILES.disk_buffers + 2):  # so many may be made until the error is known
            yield bytes(BUFFER)
        pytest.fail("more is made, though nothing can be written")

    found, _ = ended(tmp_path, Fault("sticky", each_call(tmp_path, "pwrite")[0], errno.ENOSPC), parts())
    assert isinstance(found, OSError)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    draft = LocalStorage().draft(str(tmp_path / "a.ckpt"), "0" * 32)
    draft.begin()
    with (
        Interposer(str(tmp_path), Fault("sticky", 3, errno.ENOSPC)),
        pytest.raises(OSError, match=rf"No space left.*{tmp_path}.*large\.safetensors"),
    ):
        draft.write("large.safetensors", [bytes(9 << 20)] * 3)
    draft.discard()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("after", [0, 1, 2, 9])
def test_an_error_of_whoever_makes_the_parts_leaves_no_thread(
    error: type[BaseException], after: int, tmp_path: Path
) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(after):
            yield bytes(BUFFER)
        raise error

    before = threading.active_count()
    with pytest.raises(error):
        written(tmp_path / "a", parts())
    assert threading.active_count() == before


def until_it_waits(thread: int, elsewhere_than: FrameType | None) -> FrameType:
    """Return where a thread stays at one instruction, look after look, since it waits for a lock or a queue."""
    pause, looks, before = threading.Event(), 0, None
    for _ in range(60_000):
        frame = sys._current_frames()[thread]
        here = frame, frame.f_lasti
        looks = looks + 1 if here == before and frame is not elsewhere_than else 0
        if looks == 50:
            return frame
        before = here
        pause.wait(0.001)
    raise TimeoutError


def test_an_interrupt_while_the_disk_is_waited_for_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them: one for who waits for an empty buffer, and one for who waits for the thread."""
    main, pwrite, waits = threading.get_ident(), os.pwrite, list[FrameType]()

    def slow(*args: Any) -> int:
        for _ in range(0 if waits else 2):
            waits.append(until_it_waits(main, waits[-1] if waits else None))
            signal.pthread_kill(main, signal.SIGINT)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "a", [bytes(BUFFER)] * 9)
    assert threading.active_count() == before
    assert len(waits) == 2


@pytest.mark.parametrize("number", [None, 3])
def test_no_buffer_is_kept(number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a file nor after an error, once that is forgotten."""
    alive: WeakSet[mmap.mmap] = WeakSet()

    class Seen(mmap.mmap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            alive.add(self)

    monkeypatch.setattr(mmap, "mmap", Seen)
    gc.disable()
    try:
        fault = Fault("errno") if number is None else Fault("sticky", number, errno.EIO)
        with suppress(OSError), Interposer(str(tmp_path), fault):
            written(tmp_path / "a", PARTS)
            assert number is None
        assert len(alive) == 0
    finally:
        gc.enable()


# ── without syncs ─────────────────────────────────────────────────────────────────────────────────────────────────


def state(step: int) -> dict[str, Any]:
    return {"state_dict": {"a": torch.arange(600_000.0) + step}, "global_step": step}


def saved(path: str, step: int, *, sync_files: bool) -> list[str]:
    """Save, and remove what was saved; the calls."""
    storage, about = LocalStorage(sync_files=sync_files), RunInfo(step)
    with Interposer(os.path.dirname(os.path.dirname(path))) as interposer:
        ranks, options = Ranks.alone(), SaveOptions(1)
        save(path, lambda: snapshot(state(step)), ranks=ranks, about=about, options=options, storage=storage)
        assert torch.equal(load_full(path)["state_dict"]["a"], state(step)["state_dict"]["a"])
        storage.remove(path)
    return calls(interposer)


def test_without_syncs_a_save_and_a_removal_sync_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "runs" / "a.ckpt")
    made = saved(path, 1, sync_files=False)
    assert {"fsync", "fdatasync", "pwrite", "fcntl"} & set(made) == set()
    synced = saved(path, 2, sync_files=True)
    assert [name for name in made if name in ("mkdir", "rename", "open", "unlink")][1:] == [
        name for name in synced if name in ("mkdir", "rename", "open", "unlink")
    ]  # all else is the same; the first one made a directory
    assert "fsync" in synced
