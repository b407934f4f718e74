"""Outputs of exports: like a checkpoint, they are written under a temporary name and then renamed.

An output is in place and durable when its context ends; after an error in the context, none of it is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeAlias
from uuid import uuid4

from lightning_shardckpt.storage.local.posix import Rename, errors_with_path, rename_with_flag, sync_directory
from lightning_shardckpt.storage.local.replacement import Replacement, put_directory, put_file, put_new

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
        publish = put_file if overwrite else partial(put_new, self._rename)
        with _replacing(path, lambda name: os.close(_make(name)), publish) as new:
            file = os.open(new.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield file, new.notes
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

        def publish(new: str, output: str) -> str | None:
            if os.path.isdir(output) and not os.path.islink(output) and replaceable(output):
                return put_directory(self._rename, new, output)
            put_new(self._rename, new, output)
            return None

        with _replacing(path, os.mkdir, publish) as new:
            yield partial(_open_new, new.path), new.notes
            for folder, _, names in os.walk(new.path, topdown=False):
                for name in names:
                    _sync_file(os.path.join(folder, name))
                sync_directory(folder)


@contextmanager
def _replacing(
    path: str, make: Callable[[str], object], publish: Callable[[str, str], str | None]
) -> Iterator[Replacement]:
    new = Replacement(os.path.abspath(path), uuid4().hex, make)
    try:
        with errors_with_path(new.path):
            yield new
        new.publish(publish)
    finally:
        new.discard()


def _sync_file(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with errors_with_path(path):
            os.fsync(file)
    finally:
        os.close(file)


def _make(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


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
