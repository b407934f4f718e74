"""The target of a save: what is there, whether it is replaced or filled in place, and how it is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress

from lightning_shardckpt.format.index import HEAD_BYTES, PREFIXED_NAME, ROOT_NAME, is_ours, read_prefix
from lightning_shardckpt.storage.local import leftovers
from lightning_shardckpt.storage.local.posix import EXCHANGE, is_mount_point, rename_with_flag, status_of
from lightning_shardckpt.system.text import count_text, size_text

Rename = Callable[[str, str, int], bool]
"""Renames with a flag, or returns False if the file system does not support it."""


def absolute_path(path: str) -> str:
    """Return the absolute path of a path or ``file://`` URL. Raises ValueError for other URLs."""
    path = os.fspath(path)
    if "://" in path and not path.startswith(("file://", "local://")):
        raise ValueError(f"{path!r}: only paths of a file system are supported, not URLs")
    return os.path.abspath(path.removeprefix("file://").removeprefix("local://"))  # abspath drops a trailing slash


def path_or_aside(path: str) -> str:
    """Return the path, or the path to which an interrupted save moved the checkpoint that was there."""
    aside = leftovers.aside_name(path)
    return aside if not os.path.lexists(path) and os.path.exists(os.path.join(aside, ROOT_NAME)) else path


def check_replaceable(target: str, *, filled: bool = True) -> None:
    """Check that a save may replace or fill ``target``.

    That is a missing path, a checkpoint of ours, a link, and a directory that is empty or, if ``filled``, has only
    files of an unfinished save in it.

    Raises:
        FileExistsError: for anything else.
        OSError: if the name is too long.
    """
    entry = status_of(target)
    if entry is None or stat.S_ISLNK(entry.st_mode):  # such as ModelCheckpoint's "last"; the link is replaced
        return
    if not stat.S_ISDIR(entry.st_mode):
        raise FileExistsError(
            f"a file is in the way at {target!r}: a sharded checkpoint is a directory; move it or use another path"
        )
    with suppress(FileNotFoundError):  # removed since
        names = os.listdir(target)
        is_foreign = ROOT_NAME not in names and not all(filled and _is_of_a_save(name) for name in names)
        if is_foreign and os.path.samestat(entry, os.lstat(target)):  # not replaced between these calls
            raise FileExistsError(
                f"the directory {target!r} is not empty and holds no checkpoint of this package, so it is not "
                "replaced; move it or use another path"
            )


def _is_of_a_save(name: str) -> bool:
    return PREFIXED_NAME.fullmatch(name) is not None or leftovers.is_temporary(name)


def is_filled_in_place(target: str) -> bool:
    """Return True if a target is a directory that is filled in place rather than replaced."""
    entry = status_of(target)
    if entry is None or not stat.S_ISDIR(entry.st_mode):
        return False
    names = os.listdir(target)
    return (
        ROOT_NAME not in names
        or any(map(PREFIXED_NAME.fullmatch, names))
        or is_mount_point(target)
        or not os.access(os.path.dirname(target), os.W_OK | os.X_OK, effective_ids=True)
        or _is_current(entry)
    )


def _is_current(entry: os.stat_result) -> bool:
    try:
        return os.path.samestat(entry, os.stat("."))
    except OSError:  # the current directory was deleted, or this user may not enter it
        return False


# ── replacing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def swap(new: str, target: str, rename: Rename = rename_with_flag) -> str | None:
    """Move a directory to the target; return the new path of the old directory, if there was one."""
    is_link = os.path.islink(target)
    if not is_link and not (os.path.isdir(target) and os.listdir(target)):
        os.rename(new, target)  # the target is missing or an empty directory
        return None
    if rename(new, target, EXCHANGE):
        return new
    if not os.path.exists(target):
        os.unlink(target)  # a dangling link; the old checkpoint, if there is one, is at the aside name
        os.rename(new, target)
        return None
    aside = leftovers.aside_name(target)
    leftovers.delete(aside)
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        with suppress(OSError):  # readers also find it at the aside name
            os.rename(aside, target)
        raise
    return aside


# ── files of checkpoints that were filled in place ────────────────────────────────────────────────────────────────────


def sizes_of(directory: str) -> dict[str, int]:
    """Return the sizes of the files of all saves in a directory, without the root index."""
    names = (name for name in os.listdir(directory) if name != ROOT_NAME and is_ours(name))
    return {name: os.lstat(os.path.join(directory, name)).st_size for name in names}


def prefix_at(directory: str) -> str | None:
    """Return the prefix of the names of a checkpoint's files; None without a checkpoint."""
    with suppress(FileNotFoundError), open(os.path.join(directory, ROOT_NAME), "rb") as file:
        return read_prefix(file.read(HEAD_BYTES)) or ""
    return None


def describe_leftovers(directory: str, files: dict[str, int], replaced: str | None) -> list[str]:
    """Return a sentence about files of unfinished saves among those that are about to be deleted."""
    dead = (name for name in files if PREFIXED_NAME.fullmatch(name) and not name.startswith(replaced or "?"))
    left = [files[name] for name in dead]
    if not left:
        return []
    what = f"{count_text(len(left), 'file')}, {size_text(sum(left))}"
    return [f"removed the leftover of an unfinished save, {what}, from {directory!r}"]


def delete_files(directory: str, names: Iterable[str]) -> list[str]:
    """Delete files of replaced checkpoints and unfinished saves; return a sentence about a failure."""
    for name in names:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            return [f"could not remove all files of the replaced checkpoint in {directory!r}: {error}"]
    return []
