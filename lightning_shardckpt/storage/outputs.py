"""How does a single file appear whole or not at all? As a checkpoint does: under a temporary name first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO
from uuid import uuid4

from lightning_shardckpt.storage import leftovers
from lightning_shardckpt.storage.durable import NO_REPLACE, make_directories, naming, rename_at_once, sync_directory
from lightning_shardckpt.storage.replaceable import check_name


@contextmanager
def new_file(output: str) -> Iterator[tuple[BinaryIO, list[str]]]:
    """A new file that appears as ``output`` at the end, durable; an error removes it.

    What killed processes left beside it is removed first; the list tells of that.

    Raises:
        FileExistsError: if there is something at ``output``, or another process is making it.
    """
    output = os.path.abspath(output)
    check_name(output)
    make_directories(os.path.dirname(output))
    check_name(output)  # a name that is too long is one only where its parent is there
    unfinished = leftovers.temporary_name(output, uuid4().hex)
    claim = leftovers.claim(output, unfinished, _make)
    try:
        try:
            with naming(unfinished):
                with os.fdopen(claim.file, "r+b", closefd=False) as file:
                    yield file, claim.notes
                os.fsync(claim.file)
            _rename_new(unfinished, output)
        except BaseException:
            leftovers.delete(unfinished)
            raise
    finally:
        claim.release()
    sync_directory(os.path.dirname(output))


def _make(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _rename_new(source: str, target: str) -> None:
    if rename_at_once(source, target, NO_REPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
    os.rename(source, target)
