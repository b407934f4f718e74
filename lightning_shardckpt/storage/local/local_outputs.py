"""Files and directories that appear whole or not at all: as a checkpoint does, they first have another name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal
from uuid import uuid4

from lightning_shardckpt.storage.local import leftovers
from lightning_shardckpt.storage.local.leftovers import check_name
from lightning_shardckpt.storage.local.posix import (
    EXCHANGE,
    NO_REPLACE,
    POSIX,
    FileSystem,
    make_and_open,
    make_directories,
    naming,
    sync_directory,
)
from lightning_shardckpt.storage.protocol import Contents, NewFile


class LocalOutputs:
    """``Outputs`` of a file system. What killed processes left beside an output is removed first, which is told."""

    def __init__(self, file_system: FileSystem = POSIX) -> None:
        self._file_system = file_system

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """Return what is at a path; a link to anything is a file."""
        if not os.path.lexists(path):
            return None
        if os.path.islink(path) or os.path.isfile(path):
            return "file"
        return "directory" if os.path.isdir(path) else "other"

    def contents(self, path: str) -> Contents:
        """Return what is in a directory."""
        names = [os.path.relpath(os.path.join(at, name), path) for at, _, names in os.walk(path) for name in names]

        def head(name: str, nbytes: int) -> bytes:
            with open(os.path.join(path, name), "rb") as file:
                return file.read(nbytes)

        return Contents(names, head)

    @contextmanager
    def file(self, path: str, nbytes: int, *, overwrite: bool) -> Iterator[tuple[int, list[str]]]:
        """The descriptor of a new file; it may replace a regular file or a link, at once.

        Raises:
            FileExistsError: if there is something else at ``path``, or another process is making it.
        """
        publish = _replace_file if overwrite else self._rename_new
        with self._temporary(path, _make, publish) as (unfinished, claim):
            yield claim.file, claim.notes
            with naming(unfinished):
                os.fsync(claim.file)

    @contextmanager
    def directory(self, path: str, *, replaceable: Callable[[Contents], bool]) -> Iterator[tuple[NewFile, list[str]]]:
        """A function that makes files in a new directory; whether one that is there may go is asked at the end.

        Raises:
            FileExistsError: if there is something else at ``path``, or another process is making it.
        """

        def publish(unfinished: str, output: str) -> str | None:
            if not os.path.isdir(output) or os.path.islink(output) or not replaceable(self.contents(output)):
                self._rename_new(unfinished, output)
                return None
            if self._file_system.rename_at_once(unfinished, output, EXCHANGE):
                return unfinished
            doomed = leftovers.doomed_name(output)
            os.rename(output, doomed)  # nothing is there until the next line; this file system has nothing better
            os.rename(unfinished, output)
            return doomed

        with self._temporary(path, make_and_open, publish) as (unfinished, claim):
            yield partial(_open_new, unfinished), claim.notes
            for folder, _, names in os.walk(unfinished, topdown=False):
                for name in names:
                    _sync_file(os.path.join(folder, name))
                sync_directory(folder)

    @contextmanager
    def _temporary(
        self, output: str, make: Callable[[str], int], publish: Callable[[str, str], str | None]
    ) -> Iterator[tuple[str, leftovers.Claim]]:
        """Give what ``make`` makes, to be renamed by ``publish``, which returns where what was there before is now."""
        output = os.path.abspath(output)
        check_name(output)
        make_directories(os.path.dirname(output))
        check_name(output)  # a name that is too long is one only where its parent is there
        unfinished = leftovers.temporary_name(output, uuid4().hex)
        claim = leftovers.claim(output, unfinished, make, self._file_system)
        try:
            try:
                with naming(unfinished):
                    yield unfinished, claim
                old = publish(unfinished, output)
            except BaseException:
                leftovers.delete(unfinished)
                raise
        finally:
            claim.release()
        sync_directory(os.path.dirname(output))
        if old is not None:
            claim.notes += leftovers.doom_replaced(old).delete()

    def _rename_new(self, source: str, target: str) -> None:
        if self._file_system.rename_at_once(source, target, NO_REPLACE):
            return
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
        os.rename(source, target)


def _sync_file(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(file)
    finally:
        os.close(file)


def _make(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _replace_file(source: str, target: str) -> None:
    there = check_name(target)
    if there is not None and not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
        raise FileExistsError(errno.EEXIST, "no regular file is there, so it is not replaced", target)
    os.replace(source, target)


@contextmanager
def _open_new(folder: str, name: str, nbytes: int) -> Iterator[int]:
    """A descriptor of a new file."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)
