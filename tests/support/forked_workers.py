"""Workers of pytest, each with its fork server, forked from one process that has imported torch and Lightning.

Each would import them for itself, at twelve seconds of processor time a worker and server. xdist starts a worker as a
command that reads code from its stdin: here the command hands its stdin, stdout and stderr to the process that forks,
and stays as long as the worker does. A worker is as fresh as one that xdist starts, but for what is imported.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEAVING_S = 120  # workers have ended by then, or never will


@contextmanager
def forking() -> Iterator[str]:
    """Run the process that forks; the value is the command of a worker, which xdist's `popen` takes for a Python."""
    with tempfile.TemporaryDirectory(prefix="workers-") as folder, socket.socket(socket.AF_UNIX) as listening:
        address = os.path.join(folder, "socket")
        listening.bind(address)
        listening.listen()  # who comes before the imports are done waits
        command = [sys.executable, "-m", "tests.support.forked_workers", "fork", str(listening.fileno())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # A session of its own: Ctrl-C must reach pytest alone, which then ends the workers.
        with subprocess.Popen(
            command, cwd=ROOT, env=env, pass_fds=[listening.fileno()], stdin=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                yield shlex.join([sys.executable, "-P", __file__, "be", address])
                process.communicate(timeout=LEAVING_S)
            finally:
                process.kill()


def _be_worker(address: str, code: str) -> None:
    """Have a worker run `code` with what this process was given, and wait until it ends."""
    given = json.dumps({"code": code, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(address)
        socket.send_fds(worker, [len(given).to_bytes(4, "big")], [0, 1, 2])
        worker.sendall(given)
        for end in (0, 1, 2):
            os.close(end)
        worker.recv(1)


def _fork_workers(listening: socket.socket) -> None:
    """Fork a worker for whoever connects, until stdin ends, as it does with pytest; then wait for all of them."""
    from tests.support import pool

    pool.preload()
    pool.be_ready_to_fork()
    this = os.getpid()
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            pool.die_with(this)
            listening.close()
            length, ends, *_ = socket.recv_fds(connection, 4, 3)
            given = json.loads(_received(connection, int.from_bytes(length, "big")))
            for number, end in enumerate(ends):
                os.dup2(end, number)
                os.close(end)
            os.environ.clear()
            os.environ.update(given["env"])
            os.chdir(given["cwd"])
            pool.fork_server()
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv, sys.path[0] = ["-c"], ""
            exec(given["code"], main.__dict__)
            sys.exit()  # the connection closes
        connection.close()
    with suppress(ChildProcessError):  # none is left
        while True:
            os.wait()


def _received(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        assert more, "the worker's command ended"
        got += more
    return got


if __name__ == "__main__":
    if sys.argv[1] == "be":
        _be_worker(sys.argv[2], sys.argv[-1])
    else:
        _fork_workers(socket.socket(fileno=int(sys.argv[2])))
