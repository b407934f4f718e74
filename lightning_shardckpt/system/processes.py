"""Identity of processes: the host that can look a process up, and when the process started."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def host_id() -> str:
    """Return a text that is equal for two processes if they can look each other up in /proc."""
    with suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):  # the /proc of this pid namespace
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{namespace}"
    return uuid.uuid4().hex


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot: the system reuses ids. Empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the process name before it may contain any character
    return "" if fields[0] in "ZX" else fields[19]
