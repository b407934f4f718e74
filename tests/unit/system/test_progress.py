"""The progress bar on a real terminal, a narrow one, and none at all."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tests.support.pool import ROOT

CODE = """
from lightning_shardckpt.system.text import progress

with progress({total}, quiet_s={quiet}) as bar:
    bar.expect(3 << 20)
    for _ in range(3):
        bar(1 << 20)
        {end}
"""


def on_a_terminal(code: str, columns: int) -> tuple[str, int]:
    """Run code whose stderr is a terminal; return what it showed there, and its exit status."""
    screen, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=terminal) as process:
            os.close(terminal)
            terminal = -1
            shown = b""
            while part := read(screen):
                shown += part
    finally:
        os.close(screen)
        if terminal >= 0:
            os.close(terminal)
    return shown.decode().replace("\r\n", "\n"), process.returncode


def read(screen: int) -> bytes:
    try:
        return os.read(screen, 4096)
    except OSError:  # EIO: nobody has the terminal open any more
        return b""


@pytest.mark.parametrize("columns", [100, 30])
def test_a_bar_goes_to_its_end_on_one_line_of_a_terminal(columns: int) -> None:
    shown, status = on_a_terminal(CODE.format(total=None, quiet=0, end="0"), columns)
    drawn = shown.removesuffix("\n").split("\r")
    assert status == 0 and shown.endswith("\n") and shown.count("\n") == 1
    assert "100%" in drawn[-1] and max(map(len, drawn)) <= columns


def test_a_bar_that_is_interrupted_ends_its_line() -> None:
    shown, status = on_a_terminal(CODE.format(total=3 << 20, quiet=0, end="1 / 0"), 80)
    bar, _, after = shown.partition("\n")
    assert status == 1 and "1.00M/3.00M" in bar and after.startswith("Traceback")


def test_what_takes_little_time_shows_nothing() -> None:
    assert on_a_terminal(CODE.format(total=3 << 20, quiet=60, end="0"), 80) == ("", 0)


def test_a_log_gets_no_bar() -> None:
    command = [sys.executable, "-c", CODE.format(total=3 << 20, quiet=0, end="0")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")
