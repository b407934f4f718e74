"""Outputs of exports: like a checkpoint, they are written under a temporary name and then renamed.

An output is in place and durable when its context ends; after an error in the context, none of it is left.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeAlias
from uuid import uuid4

from lightning_shardckpt.storage.local import leftovers
from lightning_shardckpt.storage.local.leftovers import status_of
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

NewFile: TypeAlias = Callable[[str], AbstractContextManager[int]]
"""Creates a file with a name, which may contain slashes; yields its descriptor."""


class LocalOutputs:
    """Files and directories for exports. Leftovers of killed processes next to an output are removed first.

    Each context also yields a list of notes for the user.
    """

    def __init__(self, file_system: FileSystem = POSIX) -> None:
        self._file_system = file_system

    @contextmanager
    def file(self, path: str, *, overwrite: bool) -> Iterator[tuple[int, list[str]]]:
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
    def directory(self, path: str, *, replaceable: Callable[[str], bool]) -> Iterator[tuple[NewFile, list[str]]]:
        """Create a directory, and yield a function that creates files in it.

        At the end, ``replaceable`` is called with the path of a directory that is there.

        Raises:
            FileExistsError: if ``path`` must not be replaced, or another process is creating it.
        """

        def publish(unfinished: str, output: str) -> str | None:
            if not os.path.isdir(output) or os.path.islink(output) or not replaceable(output):
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
        status_of(output)
        make_directories(os.path.dirname(output))
        status_of(output)  # again, since a name's length is only checked if its parent exists
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
    entry = status_of(target)
    if entry is not None and not (stat.S_ISREG(entry.st_mode) or stat.S_ISLNK(entry.st_mode)):
        raise FileExistsError(errno.EEXIST, "no regular file is there, so it is not replaced", target)
    os.replace(source, target)


@contextmanager
def _open_new(folder: str, name: str) -> Iterator[int]:
    """Create a file below a folder, and yield its descriptor."""
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = _make(path)
    try:
        yield file
    finally:
        os.close(file)
