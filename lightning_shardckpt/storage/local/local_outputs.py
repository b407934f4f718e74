"""Outputs of exports in a file system: like a checkpoint, they are written under a temporary name and then renamed."""

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
    errors_with_path,
    make_and_open,
    make_directories,
    sync_directory,
)
from lightning_shardckpt.storage.protocol import Contents, NewFile


class LocalOutputs:
    """``Outputs`` of a file system. Leftovers of killed processes next to an output are removed first, with a note."""

    def __init__(self, file_system: FileSystem = POSIX) -> None:
        self._file_system = file_system

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """Return the type of the entry at a path; every link counts as a file."""
        if not os.path.lexists(path):
            return None
        if os.path.islink(path) or os.path.isfile(path):
            return "file"
        return "directory" if os.path.isdir(path) else "other"

    def contents(self, path: str) -> Contents:
        """Return the contents of a directory."""
        names = [os.path.relpath(os.path.join(at, name), path) for at, _, names in os.walk(path) for name in names]

        def head(name: str, nbytes: int) -> bytes:
            with open(os.path.join(path, name), "rb") as file:
                return file.read(nbytes)

        return Contents(names, head)

    @contextmanager
    def file(self, path: str, nbytes: int, *, overwrite: bool) -> Iterator[tuple[int, list[str]]]:
        """Create a file, and yield its descriptor and notes. It replaces a regular file or a link atomically.

        Raises:
            FileExistsError: if anything else is at ``path``, or another process is creating it.
        """
        publish = _replace_file if overwrite else self._rename_new
        with self._temporary(path, _make, publish) as (unfinished, claim):
            yield claim.file, claim.notes
            with errors_with_path(unfinished):
                os.fsync(claim.file)

    @contextmanager
    def directory(self, path: str, *, replaceable: Callable[[Contents], bool]) -> Iterator[tuple[NewFile, list[str]]]:
        """Create a directory, and yield a function that creates files in it. ``replaceable`` is called at the end.

        Raises:
            FileExistsError: if ``path`` must not be replaced, or another process is creating it.
        """

        def publish(unfinished: str, output: str) -> str | None:
            if not os.path.isdir(output) or os.path.islink(output) or not replaceable(self.contents(output)):
                self._rename_new(unfinished, output)
                return None
            if self._file_system.rename_with_flag(unfinished, output, EXCHANGE):
                return unfinished
            trash = leftovers.trash_name(output)
            os.rename(output, trash)  # the path is empty until the next line: this file system cannot exchange names
            os.rename(unfinished, output)
            return trash

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
        """Create a temporary with ``make``, yield it, and rename it with ``publish``.

        ``publish`` returns the path to which it moved the older output, or None; that output is deleted.
        """
        output = os.path.abspath(output)
        check_name(output)
        make_directories(os.path.dirname(output))
        check_name(output)  # again, since a name's length is only checked if its parent exists
        unfinished = leftovers.temporary_name(output, uuid4().hex)
        claim = leftovers.claim(output, unfinished, make, self._file_system)
        try:
            try:
                with errors_with_path(unfinished):
                    yield unfinished, claim
                old = publish(unfinished, output)
            except BaseException:
                leftovers.delete(unfinished)
                raise
        finally:
            claim.release()
        sync_directory(os.path.dirname(output))
        if old is not None:
            claim.notes += leftovers.trash_replaced(old).delete()

    def _rename_new(self, source: str, target: str) -> None:
        if self._file_system.rename_with_flag(source, target, NO_REPLACE):
            return
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
        os.rename(source, target)


def _sync_file(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with errors_with_path(path):
            os.fsync(file)
    finally:
        os.close(file)


def _make(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _replace_file(source: str, target: str) -> None:
    entry = check_name(target)
    if entry is not None and not (stat.S_ISREG(entry.st_mode) or stat.S_ISLNK(entry.st_mode)):
        raise FileExistsError(errno.EEXIST, "no regular file is there, so it is not replaced", target)
    os.replace(source, target)


@contextmanager
def _open_new(folder: str, name: str, nbytes: int) -> Iterator[int]:
    """Create a file below a folder, and yield its descriptor."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = _make(path)
    try:
        yield file
    finally:
        os.close(file)
