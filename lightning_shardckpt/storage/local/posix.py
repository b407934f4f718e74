"""Durable directories, renames with a flag, writes of many parts, and what a file system can do."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lightning_shardckpt.storage.protocol import Bytes

EXCHANGE, NO_REPLACE = 2, 1
_WRITE = 2  # SYNC_FILE_RANGE_WRITE alone: with a flag that waits, an error would be reported here, and not by fsync
_AT_FDCWD = -100
_OF_ONE_MACHINE = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)
_CALL_BYTES = 256 << 10  # measured on ext4, Linux 6.18, with little free memory: calls of 1 to 4 MiB took twice as long
_BATCH_PARTS, _BATCH_BYTES = 512, 1 << 20  # of one writev call: Linux takes 1,024 parts; hot from being hashed


def make_directories(path: str, *, sync: bool = True) -> None:
    """Make directories like ``os.makedirs``, and durable with ``sync``."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for name in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(name)
        if sync:
            sync_directory(os.path.dirname(name))


def make_and_open(path: str) -> int:
    """Make a directory and open it; an error leaves none."""
    os.mkdir(path)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except BaseException:
        with suppress(OSError):
            os.rmdir(path)
        raise


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors of the operating system tell the path, also those of calls that take a descriptor."""
    try:
        yield
    except OSError as error:
        add_path(error, path)
        raise


def add_path(error: OSError, path: str) -> None:
    """Make an error of the operating system tell the path, unless it tells an absolute one."""
    if error.errno is not None and not (error.filename and os.path.isabs(error.filename)):
        error.filename = path


def rename_at_once(source: str, target: str, flag: int) -> bool:
    """Rename with a flag of renameat2; False where the system or the file system does not know it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    what = "exchanging" if flag == EXCHANGE else "renaming"
    raise OSError(code, f"{what} {source!r} and {target!r}: {os.strerror(code)}")


def link_file(name: str, directory: int, path: str) -> None:
    """Make a hard link at ``path`` to a file of an open directory; what a symbolic link names is not followed."""
    os.link(name, path, src_dir_fd=directory, follow_symlinks=False)


def write_parts(file: int, parts: Iterable[Bytes]) -> None:
    """Write all parts, many with one system call; they are made one batch at a time."""
    for _ in _write_batches(file, parts):
        pass


def write_durably(file: int, parts: Iterable[Bytes], writeback_bytes: int) -> None:
    """Write all parts into a new file, and sync it.

    The file is on its way to the disk while its next parts are being made, so that the sync at the end has little to
    wait for; it stays in the page cache, for whoever loads it next.

    Args:
        file: a descriptor, at the start of an empty file.
        parts: of any size.
        writeback_bytes: after so many, the kernel is asked to write them to the disk, which it does meanwhile.

    Raises:
        OSError: of a write or of the sync, without a path.
    """
    waiting = 0
    for nbytes in _write_batches(file, parts):
        waiting += nbytes
        if waiting >= writeback_bytes:
            begin_writeback(file)
            waiting = 0
    os.fsync(file)


def begin_writeback(file: int) -> bool:
    """Ask the kernel to write to the disk what a file has in the page cache, and don't wait for it.

    Returns:
        Whether that was taken. It is advice: where it is not, or if a write fails, ``fsync`` does it, or raises.
    """
    ask = getattr(ctypes.CDLL(None), "sync_file_range", None)
    whole = ctypes.c_int64(0), ctypes.c_int64(0)  # from 0 to the end, which is what 0 bytes stand for
    return ask is not None and ask(file, *whole, _WRITE) == 0


def _write_batches(file: int, parts: Iterable[Bytes]) -> Iterator[int]:
    """Write all parts, batch by batch; how many bytes each batch had."""
    batch, size = list[Bytes](), 0
    for part in parts:
        batch.append(part)
        size += len(part)
        if len(batch) >= _BATCH_PARTS or size >= _BATCH_BYTES:
            _write_all(file, batch)
            yield size
            batch, size = [], 0
    _write_all(file, batch)
    yield size


def _write_all(file: int, parts: list[Bytes]) -> None:
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        count = os.writev(file, views[:_BATCH_PARTS])
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset of an open file."""
    while len(data):
        count = os.pwrite(file, data[:_CALL_BYTES], offset)
        data, offset = data[count:], offset + count


def locks_bind_everybody(directory: str, mounts_file: str = "/proc/self/mountinfo") -> bool:
    """Return whether all who may write to a directory see its locks; False where other machines may write to it.

    Network file systems often keep locks to the machine that took them (NFS with local_lock, Lustre with localflock,
    BeeGFS by default), which cannot be seen from here.
    """
    path, kind, longest = os.path.realpath(directory), "", -1
    try:
        with open(mounts_file, encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.readlines()
    except OSError:
        return False
    for line in lines:
        fields = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])  # a space is \040
        inside = place == "/" or path == place or path.startswith(place + "/")
        if inside and len(place) >= longest:  # the last one of a place is on top of the others
            kind, longest = fields[fields.index("-") + 1], len(place)
    return kind in _OF_ONE_MACHINE


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """What differs between file systems; a test gives functions of its own."""

    link: Callable[[str, int, str], None] = link_file
    rename_at_once: Callable[[str, str, int], bool] = rename_at_once
    locks_bind_everybody: Callable[[str], bool] = locks_bind_everybody


POSIX = FileSystem()
"""What the system says of each."""
