"""Temporary names: the claim of the process that writes under one, and the deletion of leftovers of dead processes.

A save or an export for a target writes under ``.tmp-<hash of the target's base name>-<save id>``, and holds the lock of
its claim meanwhile: a file of that name followed by ``.<hash of the machine>``. So a temporary whose claim is of this
machine and can be locked is a leftover of a dead process. Locks may not reach other machines, or may not exist: a
temporary of another machine, or without a claim, is a leftover if it has not changed for an hour. Nothing else of other
processes is deleted, and never the target of a link.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.local import locks
from lightning_shardckpt.storage.local.posix import sync_directory
from lightning_shardckpt.system.text import count_text, size_text

QUIET_S = 3600.0
_NAME = re.compile(r"(\.tmp-([0-9a-f]{16})-([0-9a-f]{32}))(?:\.([0-9a-f]{16}))?")
_DELETE_ATTEMPTS = 3


def temporary_name(target: str, save_id: str, folder: str | None = None) -> str:
    """Return the path under which the content of ``target`` is written; by default in the folder of the target."""
    return os.path.join(os.path.dirname(target) if folder is None else folder, f".tmp-{_key(target)}-{save_id}")


def is_claim(name: str, temporary: str) -> bool:
    """Return True if ``name`` is the name of a claim on the temporary of that path."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == os.path.basename(temporary) and match[4] is not None


def is_temporary(name: str) -> bool:
    """Return True if a name is one of a temporary or of a claim."""
    return _NAME.fullmatch(name) is not None


def _key(target: str) -> str:
    return checksum(os.fsencode(os.path.basename(target)))


@cache
def this_machine() -> str:
    """Return 16 hex digits for the running kernel, whose processes see each other's locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return checksum(file.read())
    except OSError:  # a sandbox
        return checksum(os.uname().nodename.encode())


# ── claims ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Claim:
    """This process's claim on a temporary.

    Attributes:
        notes: sentences for the user about leftovers.
        living: the ids of saves in the same folder that may still be going on.
    """

    notes: list[str] = field(default_factory=list)
    living: set[str] = field(default_factory=set)
    _path: str = ""
    _file: int = -1

    @classmethod
    def take(cls, target: str, temporary: str, machine: str | None = None) -> Claim:
        """Claim a temporary for ``target``, and delete the leftovers in its folder.

        Args:
            target: the path where the content will appear.
            temporary: its path until then, from ``temporary_name``; nothing needs to be there.
            machine: the name of this machine; tests pass others.

        Raises:
            FileExistsError: if another process is writing ``target`` right now; nothing was changed then.
        """
        claim, folder, machine = cls(), os.path.dirname(temporary), machine or this_machine()
        with locks.locked_directory(folder):
            claims = _claims_in(folder)
            held = {stem: _is_held(folder, stem, owner) for stem, owner in claims.items()}
            for stem, is_held in held.items():
                if is_held and stem.startswith(f".tmp-{_key(target)}-"):
                    raise FileExistsError(
                        f"another process is saving to {target!r} right now (it, or a process that it started, holds "
                        f"{os.path.join(folder, stem)!r}); let each job save to paths of its own"
                    )
            claim._hold(temporary, machine)
        if claims:
            sync_directory(folder)  # or else a loss of power might bring back the name of what is deleted here
        quiet_since = os.fstat(claim._file).st_mtime - QUIET_S  # by the clock of the file system
        for stem, owner in claims.items():
            path = os.path.join(folder, stem)
            is_dead = owner == machine and held[stem] is False
            if held[stem] or not (is_dead or _last_change(path, owner) <= quiet_since):
                claim.living.add(stem[-32:])
            else:
                claim.notes += _remove_leftover(path, owner)
        return claim

    def _hold(self, temporary: str, machine: str) -> None:
        self._path = f"{temporary}.{machine}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            locks.try_lock(self._file)
        except BaseException:
            self.release()
            raise

    @property
    def is_held(self) -> bool:
        """True until ``release``."""
        return self._file >= 0

    def release(self, *, is_done: bool = True) -> None:
        """Release the claim; a temporary that is not ``is_done`` becomes a leftover, which the next save deletes."""
        if self.is_held:
            if is_done:
                with suppress(OSError):
                    os.unlink(self._path)
            locks.release(self._file)
            self._file = -1


def _claims_in(folder: str) -> dict[str, str | None]:
    """Return the machine of each claim in a folder by the temporary's name; None for a temporary without a claim."""
    matches = [match for name in sorted(os.listdir(folder)) if (match := _NAME.fullmatch(name))]
    matches = [match for match in matches if _may_be_ours(os.path.join(folder, match[0]))]
    found: dict[str, str | None] = {match[1]: None for match in matches}
    return found | {match[1]: match[4] for match in matches if match[4]}


def _may_be_ours(path: str) -> bool:
    return os.path.islink(path) or os.path.isdir(path) or os.path.isfile(path)


def _is_held(folder: str, stem: str, owner: str | None) -> bool | None:
    """Return whether a process holds a claim; None if that is unknown: without a claim, or without locks."""
    if owner is None:
        return None
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(os.path.join(folder, f"{stem}.{owner}"), flags)
    except OSError:
        return None
    try:
        is_free = locks.try_lock(file)
        return None if is_free is None else not is_free
    finally:
        locks.release(file)


# ── leftovers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _remove_leftover(path: str, owner: str | None) -> list[str]:
    """Delete a temporary and its claim; return sentences for the user."""
    sizes = [entry.st_size for entry in _contents(path) if stat.S_ISREG(entry.st_mode)]
    leftover = f"the leftover of an unfinished save, {count_text(len(sizes), 'file')}, {size_text(sum(sizes))}"
    exists, error = os.path.lexists(path), delete(path)
    if error is not None:
        return [f"could not remove {leftover}, {path!r}: {error}"]
    if owner is not None:
        with suppress(OSError):
            os.unlink(f"{path}.{owner}")
    return [f"removed {leftover}, {os.path.basename(path)}"] if exists else []


def _contents(path: str) -> Iterator[os.stat_result]:
    """Yield the ``lstat`` of a temporary and of the files in it."""
    with suppress(OSError):
        yield os.lstat(path)
        for name in os.listdir(path):
            yield os.lstat(os.path.join(path, name))


def _last_change(path: str, owner: str | None) -> float:
    claim = [] if owner is None else _contents(f"{path}.{owner}")
    return max((entry.st_mtime for entry in (*claim, *_contents(path))), default=0.0)


def delete(path: str) -> OSError | None:
    """Delete a directory or a file without following links; return the error if it could not be deleted."""
    for _ in range(_DELETE_ATTEMPTS):
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, 0o700)  # an old checkpoint may be read-only
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return None
        except FileNotFoundError:  # another process is deleting it, too
            if not os.path.lexists(path):
                return None
        except OSError as error:
            return error
    return OSError(f"{path!r} changes while it is deleted")
