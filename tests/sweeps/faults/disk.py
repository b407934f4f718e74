"""Saves to a disk that is really full: small file systems in memory, of every size up to one that is enough."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_shardckpt.distributed.ranks import Ranks
from tests.sweeps.faults.inject import NO_FAULT, Fault, FaultKind
from tests.sweeps.faults.trial import Outcome, Scenario, acted, judged, prepared, repeated, scratch, spread

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_REMOUNT, _RECURSIVE, _PRIVATE = 32, 1 << 14, 1 << 18
_MOST = 200  # pages or names; far more than a trial takes


def full_disks(scenario: Scenario) -> list[Outcome] | str:
    """Trials with every number of free pages, then of free inodes, from none to enough; or why that can't be tried."""
    with scratch() as folder:
        template, _ = prepared(scenario, folder)
        return spread(_in_own_namespace, [(scenario, template, folder)], 1)[0]  # type: ignore[no-any-return]


def _in_own_namespace(job: tuple[Scenario, str, str]) -> list[Outcome] | str:
    scenario, template, folder = job
    try:
        _become_root_of_namespace()
    except OSError as error:
        return f"this machine lets no user mount: {error}"
    return [outcome for kind in ("full", "no inodes") for outcome in _sizes(scenario, template, folder, kind)]


def _become_root_of_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)


def _sizes(scenario: Scenario, template: str, folder: str, kind: FaultKind) -> Iterator[Outcome]:
    for free in range(_MOST):
        outcome = _attempt(scenario, template, folder, Fault(kind, free, errno.ENOSPC))
        yield outcome
        if outcome.ends[0].how == "returned":
            return
    raise RuntimeError(f"{scenario.name}: does not fit into {_MOST} pages or inodes")


def _attempt(scenario: Scenario, template: str, folder: str, fault: Fault) -> Outcome:
    disk = os.path.join(folder, "disk")
    os.makedirs(disk, exist_ok=True)
    _call("mount", b"tmpfs", os.fsencode(disk), b"tmpfs", 0, b"size=64m,nr_inodes=10000")
    try:
        root = os.path.join(disk, "root")
        shutil.copytree(template, root, symlinks=True)
        used = os.statvfs(disk)
        pages, inodes = used.f_blocks - used.f_bfree, used.f_files - used.f_ffree
        sizes = {"full": f"size={(pages + fault.number) * used.f_frsize}"}
        left = sizes.get(fault.kind, f"nr_inodes={inodes + fault.number}")
        if left != "size=0":  # which would mean no limit
            _call("mount", b"tmpfs", os.fsencode(disk), b"tmpfs", _REMOUNT, left.encode())
        end = acted(scenario, root, lambda: scenario.act(root, Ranks.alone()), NO_FAULT, False)
        found = scenario.found(root)
        problems = list(judged(scenario, root, 0, fault, [end], found))
        _call("mount", b"tmpfs", os.fsencode(disk), b"tmpfs", _REMOUNT, b"size=64m,nr_inodes=10000")
        problems += repeated(scenario, root)
    finally:
        _call("umount2", os.fsencode(disk), 0)
    return Outcome(scenario.name, 0, fault, found, (end,), tuple(p.replace(disk, "") for p in problems))


def _call(name: str, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
