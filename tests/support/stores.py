"""A store for the tests: a server that speaks S3, which is moto's in a process of its own, and a proxy before it."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.system.host import Tuning

IMPATIENT = Tuning(retry_attempts=4, retry_pause_s=0.01, retry_total_s=20.0)


_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class Bucket:
    """A bucket of the server, or of a proxy before it."""

    name: str
    port: int

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "key": "test", "secret": "test"}

    @property
    def environment(self) -> dict[str, str]:
        """The same for what takes no options, such as Lightning's ModelCheckpoint."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def url(self, *names: str) -> str:
        return "/".join((f"s3://{self.name}", *names))

    def listed(self) -> list[str]:
        return sorted(one["Key"] for one in self._client().list_objects_v2(Bucket=self.name).get("Contents", ()))

    def uploads(self) -> list[str]:
        """What was begun to be uploaded, and neither completed nor given up."""
        return [one["Key"] for one in self._client().list_multipart_uploads(Bucket=self.name).get("Uploads", ())]

    def put(self, key: str, content: bytes = b"") -> None:
        self._client().put_object(Bucket=self.name, Key=key, Body=content)

    def make(self) -> None:
        self._client().create_bucket(Bucket=self.name)

    def _client(self) -> Any:
        import boto3  # comes with moto

        about = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", **about)


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """The port of a running server, and its process id."""
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", _SERVER], text=True, **pipe) as process:
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.stdin.close()
            process.wait(30)


def bucket(port: int) -> Bucket:
    found = Bucket(f"test-{uuid.uuid4().hex[:12]}", port)
    found.make()
    return found


# ── a proxy that does harm ──────────────────────────────────────────────────────────────────────────────────────────

Harm = Callable[["Asked"], "str | int | None"]
"""What to do to a request: nothing, a status to answer with, or a word.

"truncate", "lose" (the answer), "expired" (a token).
"""


@dataclass(frozen=True)
class Asked:
    """A request. ``turn`` counts those with the same method and path, from 1 on."""

    method: str
    path: str
    turn: int
    is_conditional: bool = False
    authorization: str = ""

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.path

    @property
    def is_root(self) -> bool:
        return self.path.partition("?")[0].endswith(ROOT_NAME)


class Proxy:
    """Passes requests on to a server, unless ``harm`` says otherwise; notes all of them. Use it as a context."""

    def __init__(self, port: int) -> None:
        self.harm: Harm = lambda asked: None
        self.asked: list[Asked] = []
        self.sent_bytes = 0  # of objects
        self.received_bytes = 0
        self._turns: Counter[tuple[str, str]] = Counter()
        self._lock, self._target = Lock(), port
        self._connections: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,), name="proxy")
        self.port = self._server.server_address[1]

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        with self._lock:
            for connection in self._connections:  # clients keep them open
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        with self._lock:
            self.asked.clear()
            self._turns.clear()
            self.sent_bytes = self.received_bytes = 0

    def passed(self, name: str) -> bool:
        with self._lock:
            return sum(a.method == "PUT" and a.path.partition("?")[0].endswith(name) for a in self.asked) > 1

    def note(self, method: str, path: str, nbytes: int, headers: Message) -> Asked:
        with self._lock:
            self._turns[method, path] += 1
            self.received_bytes += nbytes
            about = "If-Match" in headers or "If-None-Match" in headers, headers.get("Authorization", "")
            self.asked.append(Asked(method, path, self._turns[method, path], *about))
            return self.asked[-1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                with proxy._lock:
                    proxy._connections.append(self.connection)

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def do(self) -> None:
                body = self._body()
                harm = proxy.harm(proxy.note(self.command, self.path, len(body), self.headers))
                if isinstance(harm, int) or harm == "expired":
                    status = harm if isinstance(harm, int) else 400
                    about = f"<Error><Code>{CODES[harm]}</Code><Message>harm</Message></Error>"
                    self._answer(status, {}, about.encode())
                    return
                connection = HTTPConnection("127.0.0.1", proxy._target, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if harm == "lose":
                    self._drop()
                    return
                headers = {k: v for k, v in answer.getheaders() if k.lower() not in SKIPPED}
                length = answer.getheader("Content-Length")
                self._answer(answer.status, headers, content, truncated=harm == "truncate", length=length)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                del self.headers["Transfer-Encoding"]
                return found

            def _drop(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

            def _answer(
                self, status: int, headers: Any, content: bytes, truncated: bool = False, length: str | None = None
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if self.command == "GET" and "?" not in self.path:
                    proxy.sent_bytes += len(content)
                self.wfile.write(content[: len(content) // 2] if truncated else content)
                if truncated:
                    self.wfile.flush()
                    self._drop()

            def log_message(self, *args: object) -> None: ...

        return Handler


SKIPPED = {"content-length", "transfer-encoding", "connection", "server", "date"}
CODES: dict[int | str, str] = {"expired": "ExpiredToken", 403: "AccessDenied", 404: "NoSuchKey", 429: "SlowDown"}
CODES |= {500: "InternalError", 501: "NotImplemented", 503: "SlowDown"}
