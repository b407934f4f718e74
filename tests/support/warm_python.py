"""Run Python commands, and the ones that they start, in processes that have imported torch and Lightning already.

To import both takes a processor several seconds, which a script of four ranks pays five times. Here a process that
has them, and nothing of lightning_shardckpt, is forked instead: one of the pool's serves a command until it has ended.
Its ``sys.executable`` is a small program that asks for another fork and takes the place of the started process: it
passes on arguments, environment, directory, the three streams, signals, and how the fork ended. What a command does is
otherwise what a new interpreter does: its own ``__main__``, search path and warnings, and an orderly end of the
interpreter with all that runs at exit.

Not for what is asked of the imports themselves, nor for options of the interpreter: these get a new one.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import io
import json
import linecache
import os
import random
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from tests.support import pool

SHIM = "python"
SOCKET = "forks"
# The filters of an interpreter without options.
DEFAULT_FILTERS: list[tuple[Any, Any, type[Warning], Any, int]] = [
    ("default", None, DeprecationWarning, re.compile("__main__"), 0),
    *(("ignore", None, kind, None, 0) for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning)),
    ("ignore", None, ResourceWarning, None, 0),
]

_SHIM_CODE = """#!{real} -IS
import json, os, signal, socket, sys

main = sys.argv[2:3] if sys.argv[1:2] == ["-u"] else sys.argv[1:2]
if main in ([], ["-"]) or main[0][:1] == "-" and main[0] not in ("-c", "-m"):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
forks = socket.socket(socket.AF_UNIX)
forks.connect({path!r})
asked = [sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid() == os.getsid(0)]
text = json.dumps(asked).encode()
socket.send_fds(forks, [b"%16d" % len(text)], [0, 1, 2])
forks.sendall(text)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: forks.send(bytes([number])))
status = int(forks.recv(16) or -9)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs ``python *arguments``, a script, ``-m`` and a module, or ``-c`` and code, and then what is theirs."""


def run(
    arguments: Sequence[str | Path], *, env: Mapping[str, str], folder: Path = pool.ROOT, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Return how ``python *arguments`` ended, once all that it started has ended, and what it printed.

    Args:
        arguments: of Python: a script, or ``-m`` and a module, or ``-c`` and code, and then what is theirs.
        env: the environment.
        folder: where it runs.
        timeout_s: after which all processes are killed.

    Raises:
        RankFailure: after ``timeout_s``.
    """
    command = [str(argument) for argument in arguments]
    ((status, out, err),) = pool.run_ranks(
        1, _serve, command, dict(env), str(folder), timeout_s=timeout_s, init_process_group=False, bare=True
    )
    return subprocess.CompletedProcess([sys.executable, *command], status, out, err)


def run_new(
    arguments: Sequence[str | Path], *, env: Mapping[str, str], folder: Path = pool.ROOT, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Return the same of a new interpreter, which imports by itself what it needs; it waits for that one alone."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


# ── the process that is forked ──────────────────────────────────────────────────────────────────────────────────────


class _Forks:
    """The forks of this process, and those who asked for them."""

    def __init__(self, folder: Path) -> None:
        self.shim, path = folder / SHIM, str(folder / SOCKET)
        self.shim.write_text(_SHIM_CODE.format(real=sys.executable, path=path))
        self.shim.chmod(0o755)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.running: dict[int, int] = {}  # process by its file descriptor
        self.askers: dict[int, socket.socket] = {}  # by process
        self.leaders: set[int] = set()  # processes with a session of their own

    def fork(self, asked: tuple[list[str], dict[str, str], str, bool], streams: Sequence[int]) -> int:
        """Returns the process."""
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            pool.die_with(parent)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for key in [*self.selector.get_map().values()]:
                os.close(key.fd)
            _run(*asked, executable=str(self.shim))
        for stream in streams:
            os.close(stream)
        descriptor = os.pidfd_open(pid)
        self.running[descriptor] = pid
        self.selector.register(descriptor, selectors.EVENT_READ)
        return pid

    def serve(self) -> dict[int, int]:
        """Serve until nothing runs; returns how each process ended."""
        statuses: dict[int, int] = {}
        while self.running:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fd in self.running:
                    pid = self.running.pop(key.fd)
                    self.selector.unregister(key.fd)
                    os.close(key.fd)
                    statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    self._tell(pid, statuses[pid])
                elif key.data is not None:
                    self._pass_on(key.data)
        return statuses

    def _accept(self) -> None:
        asker, _ = self.listener.accept()
        length, streams, *_ = socket.recv_fds(asker, 16, 3)
        with asker.makefile("rb") as text:
            asked = json.loads(text.read(int(length)))
        pid = self.fork(asked, streams)
        if asked[-1]:
            self.leaders.add(pid)
        self.askers[pid] = asker
        self.selector.register(asker, selectors.EVENT_READ, pid)

    def _tell(self, pid: int, status: int) -> None:
        if asker := self.askers.pop(pid, None):
            self.selector.unregister(asker)
            with suppress(OSError):  # it was killed
                asker.send(str(status).encode())
            asker.close()

    def _pass_on(self, pid: int) -> None:
        """Pass on signals; who asked, and was killed, takes the fork with it."""
        if pid not in self.askers:  # told in this very round
            return
        signals = self.askers[pid].recv(16)
        for number in signals:
            os.kill(pid, number)
        if not signals:
            with suppress(ProcessLookupError):
                (os.killpg if pid in self.leaders else os.kill)(pid, signal.SIGKILL)
            self.selector.unregister(self.askers[pid])
            self.askers.pop(pid).close()


def _serve(command: list[str], env: dict[str, str], folder: str) -> tuple[int, str, str]:
    forks = _Forks(Path.cwd())
    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(name, os.O_CREAT | os.O_RDWR) for name in ("out", "err"))]
    pid = forks.fork((command, env, folder, False), files)
    status = forks.serve()[pid]
    return status, Path("out").read_text(errors="replace"), Path("err").read_text(errors="replace")


# ── a command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(command: list[str], env: dict[str, str], folder: str, leads: bool, *, executable: str) -> NoReturn:
    """Be the interpreter of a command, from its begin to its end."""
    code = 1
    try:
        if leads:
            os.setsid()
        _be_as_new(env, folder)
        sys.executable = executable
        code = _status_of(_run_main, command)
    except BaseException:
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(code)  # waits for threads, and runs what was left for the end
    raise AssertionError("unreachable")


def _be_as_new(env: dict[str, str], folder: str) -> None:
    """Undo what the pool sets up in a rank, and what other interpreters would not have in common."""
    import numpy

    removed = {str(pool.ROOT), "", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *(path for path in sys.path if path not in removed)]
    warnings.filters[:] = DEFAULT_FILTERS  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    faulthandler.unregister(signal.SIGUSR2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the interpreter is there)
    # Those of the pool know whether they could be sought in, which these can't tell.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    random.seed()
    numpy.random.seed()


def _status_of(fn: Any, *args: Any) -> int:
    """Return the exit status of an interpreter whose main program is this call, having told why as it does."""
    try:
        fn(*args)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _run_main(command: list[str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    if command[0] == "-u":  # as torchrun starts ranks
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
        command = command[1:]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        if sys.version_info >= (3, 13):  # which shows lines of such code in tracebacks
            linecache.cache["<string>"] = (len(command[1]), None, command[1].splitlines(keepends=True), "<string>")
        exec(compile(command[1], "<string>", "exec"), vars(main))
    else:
        sys.argv, script = command, os.path.abspath(command[0])
        sys.path.insert(0, str(Path(script).resolve().parent))
        main.__file__, main.__loader__ = script, SourceFileLoader("__main__", script)
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
