"""The object store of section remote: moto's server, which speaks S3, in a process of its own; it counts requests.

    python examples/benchmarks/s3server.py       # prints its port, and ends with its standard input

Objects are kept in its memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from threading import Lock, Thread
from typing import Any
from unittest.mock import patch

from turns import Missing

_COUNTS = "/-/counts"
_HOST = "127.0.0.1"
_IN_MEMORY = {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 40)}  # larger objects are files


@dataclass(frozen=True)
class Server:
    """A running one."""

    port: int

    def counts(self) -> Counter[str]:
        """Its ``requests`` so far, and the bytes of their bodies: ``sent`` by clients, and ``received`` by them."""
        connection = HTTPConnection(_HOST, self.port, timeout=60)
        try:
            connection.request("GET", _COUNTS)
            return Counter(json.loads(connection.getresponse().read()))
        finally:
            connection.close()


@contextmanager
def serving() -> Iterator[Server]:
    """Have a server, which s3fs in this process and its children finds by environment variables.

    Raises:
        Missing: if moto or what its server needs is not installed.
    """
    command = [sys.executable, __file__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, env=os.environ | _IN_MEMORY, text=True) as process:
        try:
            port = process.stdout.readline()  # type: ignore[union-attr]
            if not port:
                raise Missing("moto's server does not run: pip install -e '.[bench]'")
            found = {"AWS_ENDPOINT_URL": f"http://{_HOST}:{int(port)}", "AWS_DEFAULT_REGION": "us-east-1"}
            with patch.dict(os.environ, found, AWS_ACCESS_KEY_ID="benchmark", AWS_SECRET_ACCESS_KEY="benchmark"):
                yield Server(int(port))
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(60)


class _Counting:
    """A WSGI application around another one."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app, self._lock, self._counts = app, Lock(), Counter[str]()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == _COUNTS:
            content = json.dumps(self._counts).encode()
            start_response("200 OK", [("Content-Length", str(len(content)))])
            return [content]

        def respond(status: str, headers: Sequence[tuple[str, str]], *more: Any) -> Any:
            if environ["REQUEST_METHOD"] != "HEAD":
                self._add(received=sum(int(value) for name, value in headers if name.lower() == "content-length"))
            return start_response(status, headers, *more)

        length = environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0
        self._add(requests=1, sent=int(length))
        return self._app(environ, respond)

    def _add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def _serve() -> None:
    from moto.s3.models import FakeKey
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    # moto copies a whole object for each range of it that somebody asks for: that would be all that is measured
    FakeKey.value = property(lambda key: key._value_buffer._file.getvalue(), FakeKey.value.fset)
    server = make_server(_HOST, 0, _Counting(DomainDispatcherApplication(create_backend_app)), threaded=True)
    Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
