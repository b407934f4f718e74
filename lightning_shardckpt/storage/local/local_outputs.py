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
from lightning_shardckpt.storage.local.leftovers import Claim
from lightning_shardckpt.storage.local.posix import (
    NO_REPLACE,
    errors_with_path,
    keep_owner_and_mode,
    make_directories,
    rename_with_flag,
    status_of,
    sync_directory,
)
from lightning_shardckpt.storage.local.targets import Rename, swap

NewFile: TypeAlias = Callable[[str], AbstractContextManager[int]]
"""Creates a file with a name, which may contain slashes; yields its descriptor."""


class LocalOutputs:
    """Files and directories for exports. Leftovers of killed processes next to an output are removed first.

    An output has the mode, owner and group of what it replaces. Each context also yields a list of notes for the user.
    """

    def __init__(self, rename: Rename = rename_with_flag) -> None:
        self._rename = rename

    @contextmanager
    def file(self, path: str, *, overwrite: bool) -> Iterator[tuple[int, list[str]]]:
        """Create a file, and yield its descriptor and notes. It replaces a regular file or a link atomically.

        Raises:
            FileExistsError: if anything else is at ``path``, or another process is creating it.
            PermissionError: if the file that is there has an owner or group that cannot be kept.
        """
        publish = _replace_file if overwrite else self._rename_new
        with self._temporary(path, lambda name: os.close(_make(name)), publish) as (unfinished, notes):
            file = os.open(unfinished, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield file, notes
                with errors_with_path(unfinished):
                    os.fsync(file)
            finally:
                os.close(file)

    @contextmanager
    def directory(self, path: str, *, replaceable: Callable[[str], bool]) -> Iterator[tuple[NewFile, list[str]]]:
        """Create a directory, and yield a function that creates files in it.

        At the end, ``replaceable`` is called with the path of a directory that is there.

        Raises:
            FileExistsError: if ``path`` must not be replaced, or another process is creating it.
            PermissionError: if the directory that is there has an owner or group that cannot be kept.
        """

        def publish(unfinished: str, output: str) -> str | None:
            if not os.path.isdir(output) or os.path.islink(output) or not replaceable(output):
                self._rename_new(unfinished, output)
                return None
            return swap(unfinished, output, self._rename)

        with self._temporary(path, os.mkdir, publish) as (unfinished, notes):
            yield partial(_open_new, unfinished), notes
            for folder, _, names in os.walk(unfinished, topdown=False):
                for name in names:
                    _sync_file(os.path.join(folder, name))
                sync_directory(folder)

    @contextmanager
    def _temporary(
        self, output: str, make: Callable[[str], object], publish: Callable[[str, str], str | None]
    ) -> Iterator[tuple[str, list[str]]]:
        """Create a temporary with ``make``, yield it, and rename it with ``publish``.

        ``publish`` returns the path to which it moved the older output, or None; that output is deleted.
        """
        output = os.path.abspath(output)
        status_of(output)
        make_directories(os.path.dirname(output))
        status_of(output)  # again, since a name's length is only checked if its parent exists
        unfinished = leftovers.temporary_name(output, uuid4().hex)
        claim, is_done = Claim.take(output, unfinished), False
        try:
            try:
                make(unfinished)
                if not keep_owner_and_mode(output, unfinished, writable=True):
                    raise PermissionError(
                        errno.EPERM, "its owner or group can't be kept: delete it, or give another path", output
                    )
                with errors_with_path(unfinished):
                    yield unfinished, claim.notes
                keep_owner_and_mode(output, unfinished)
                old = publish(unfinished, output)
            except BaseException:
                is_done = leftovers.delete(unfinished) is None
                raise
            sync_directory(os.path.dirname(output))
            error = None if old is None else leftovers.delete(old)
            is_done = error is None
            if error is not None:
                claim.notes.append(f"could not remove the replaced output {old!r}: {error}")
        finally:
            claim.release(is_done=is_done)

    def _rename_new(self, source: str, target: str) -> None:
        if self._rename(source, target, NO_REPLACE):
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
