"""Run a test's ranks on two hosts that one machine simulates, and show one of them late what the other one does.

Where the kernel lets this user, each host is a set of namespaces of its own: network, joined to the other one's by a
veth pair, host name and mounts. No rights are needed but those of making a user namespace. Elsewhere both hosts are on
loopback, and their processes are only told different host names; what needs a cable or a mount is skipped then.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.pool import run_ranks

_CABLE = "cable"
_KINDS = ("user", "uts", "net", "mnt")  # the user namespace gives the rights to enter the others


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts, ``host-0`` and ``host-1``. ``pids``: of a process in each one's namespaces; ``why_not``: none."""

    pids: tuple[int, ...]
    why_not: str = ""

    @property
    def how(self) -> str:
        """What is simulated, for the output of a test."""
        return f"two hosts on loopback: {self.why_not}" if self.why_not else "two hosts in namespaces, joined by veth"

    def address(self, host: int) -> str:
        """Of its network."""
        return f"10.77.0.{host + 1}" if self.pids else "127.0.0.1"

    def environment(self, host: int, port: int) -> dict[str, str]:
        """What a user sets on each machine, and the interface, since names of hosts resolve to nothing here."""
        common = {"NODE_RANK": str(host), "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port)}
        return common | {"GLOO_SOCKET_IFNAME": _CABLE if self.pids else "lo"}

    def enter(self, host: int) -> None:
        """Let this process, which must have one thread, be on a host from now on."""
        if not self.pids:
            _call_it(f"host-{host}")
            return
        here = os.getcwd()
        files = [os.open(f"/proc/{self.pids[host]}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
        for file in files:
            if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            os.close(file)
        os.chdir(here)

    def on(self, host: int, command: list[str]) -> list[str]:
        """A command line that runs on a host."""
        if not self.pids:
            return command
        return ["nsenter", "--preserve-credentials", "-t", str(self.pids[host]), "-U", "-u", "-n", "-m", *command]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Set up both; they end with the context, or with this process."""
    with ExitStack() as stack:
        try:
            hosts = _namespaces(stack)
        except (OSError, subprocess.SubprocessError) as error:
            hosts = Hosts((), str(error))
        print(hosts.how)
        yield hosts


def _namespaces(stack: ExitStack) -> Hosts:
    first = _holder(stack, ["unshare", "-U", "-r", "-u", "-n", "-m"], 0)
    second = _holder(stack, [*Hosts((first,)).on(0, []), "unshare", "-u", "-n", "-m"], 1)
    hosts = Hosts((first, second))
    _run(hosts, 0, f"ip link add {_CABLE} type veth peer name {_CABLE} netns {second}")
    for host in range(2):
        _run(hosts, host, "ip link set lo up")
        _run(hosts, host, f"ip address add {hosts.address(host)}/24 dev {_CABLE}")
        _run(hosts, host, f"ip link set {_CABLE} up")
    return hosts


def _holder(stack: ExitStack, enter: list[str], host: int) -> int:
    """A process that keeps namespaces alive until its input ends."""
    script = f"hostname host-{host} && echo here && exec cat"
    command = [*enter, "sh", "-c", script]
    pipe = subprocess.PIPE
    holder = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    stack.callback(holder.kill)
    assert holder.stdout and holder.stderr
    if holder.stdout.readline() != "here\n":
        raise OSError(f"{' '.join(command)}: {holder.stderr.read().strip()}")
    return holder.pid


def _run(hosts: Hosts, host: int, command: str) -> None:
    subprocess.run(hosts.on(host, command.split()), check=True, capture_output=True)


def _call_it(name: str) -> None:
    original = os.uname

    def uname() -> Any:
        found = original()
        return os.uname_result((found.sysname, name, found.release, found.version, found.machine))

    os.uname = uname


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_hosts(hosts: Hosts, each: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Like ``run_ranks``, with ``each`` ranks on each host; the process group is made by ``fn``, over the network."""
    options = {"init_process_group": False} | options
    return run_ranks(2 * each, _on_its_host, hosts, each, free_port(), fn, args, **options)


def _on_its_host(hosts: Hosts, each: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    host, local_rank = divmod(int(os.environ["RANK"]), each)
    os.environ.update(hosts.environment(host, port))
    os.environ.update({"GROUP_RANK": str(host), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(each)})
    hosts.enter(host)
    return fn(*args)


def this_host() -> int:
    """On which host the calling rank is."""
    return int(os.environ["NODE_RANK"])


class Lag:
    """Below ``root``, names that others make are seen ``late_s`` afterwards, as on network file systems; a context."""

    def __init__(self, root: str, late_s: float) -> None:
        self._root, self._late_s, self._known = os.path.abspath(root), late_s, set[str]()
        names = [(os, name) for name in ("stat", "lstat", "open", "listdir")] + [(builtins, "open")]
        self._originals: list[tuple[Any, str, Any]] = [(module, name, getattr(module, name)) for module, name in names]
        self.missed: set[str] = set()
        """Base names that were asked for, or left out of a list, when they were there."""

    def __enter__(self) -> Lag:
        self._lstat = os.lstat
        for module, name, original in self._originals:
            setattr(module, name, self._around(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in self._originals:
            setattr(module, name, original)

    def _is_visible(self, path: str) -> bool:
        if not path.startswith(self._root + "/") or path in self._known:
            return True
        if not self._is_visible(os.path.dirname(path)):
            return False
        try:
            if time.time() < self._lstat(path).st_ctime + self._late_s:
                self.missed.add(os.path.basename(path))
                return False
            self._known.add(path)
        except OSError:
            pass  # the call itself says so
        return True

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) and name != "listdir":
                return original(path, *args, **kwargs)
            folder = path if isinstance(path, int) else kwargs.get("dir_fd")
            base = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
            at = base if isinstance(path, int) else os.path.normpath(os.path.join(base, os.fsdecode(path)))
            making = bool(args) and isinstance(args[0], int) and bool(args[0] & os.O_CREAT)
            if not self._is_visible(os.path.dirname(at) if making else at):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            found = original(path, *args, **kwargs)
            if making:
                self._known.add(at)
            return [one for one in found if self._is_visible(f"{at}/{one}")] if name == "listdir" else found

        return call
