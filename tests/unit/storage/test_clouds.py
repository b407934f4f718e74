"""How buckets are reached: whose credentials count, what each cloud is asked, and what a fork and the web can do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import lightning_shardckpt
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.storage.object_store import ObjectStore, find_aws
from lightning_shardckpt.storage.router import StorageRouter
from tests.support.stores import IMPATIENT, Bucket, Proxy

PROCESS = """
import json, pathlib, sys
log = pathlib.Path(sys.argv[1])
number = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (number + 1))
print(json.dumps({"Version": 1, "AccessKeyId": f"KEY{number}", "SecretAccessKey": "s", "Expiration": sys.argv[2]}))
"""


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the configuration of AWS is; there is nothing in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def test_profiles_and_files_count_as_for_the_tools_of_aws(
    aws: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(s3.port) as proxy:
        endpoint = f"endpoint_url = http://127.0.0.1:{proxy.port}\n"
        (aws / "config").write_text(f"[profile mine]\nregion = eu-north-1\n{endpoint}[profile other]\n{endpoint}")
        keys = [f"[{name}]\naws_access_key_id = OF{name}\naws_secret_access_key = s\n" for name in ("mine", "other")]
        (aws / "credentials").write_text("".join(keys))
        monkeypatch.setenv("AWS_PROFILE", "mine")
        lightning_shardckpt.save(s3.url("a.ckpt"), {"step": 7})
        options = {"profile": "other"}
        assert lightning_shardckpt.load(s3.url("a.ckpt"), storage_options=options)["step"] == 7
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
        options = {"key": "given", "secret": "s"}
        assert lightning_shardckpt.load(s3.url("a.ckpt"), storage_options=options)["step"] == 7
        used = [asked.authorization.partition("Credential=")[2].partition(",")[0] for asked in proxy.asked]
    users = [tuple(credential.split("/")[::2][:2]) for credential in dict.fromkeys(used)]
    assert users == [("OFmine", "eu-north-1"), ("OFother", "us-east-1"), ("given", "eu-north-1")]


def test_credentials_are_renewed(aws: Path) -> None:
    """Those of the process expire within the time in which botocore renews them."""
    from datetime import UTC, datetime, timedelta

    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    (aws / "process.py").write_text(PROCESS)
    command = f"{sys.executable} {aws / 'process.py'} {aws / 'log'} {soon}"
    (aws / "config").write_text(f"[default]\nregion = eu-north-1\ncredential_process = {command}\n")
    found, provide = find_aws("s3://bucket/a", {})
    assert found == {"region": "eu-north-1"} and provide is not None
    first, second = provide(), provide()
    assert int(second["access_key_id"].removeprefix("KEY")) > int(first["access_key_id"].removeprefix("KEY"))
    assert first["expires_at"] - datetime.now(UTC) < timedelta(minutes=10)  # less than botocore leaves


def test_without_credentials_an_error_says_so(aws: Path) -> None:
    with pytest.raises(PermissionError, match=r"no credentials for 's3://bucket/a\.ckpt': set AWS_PROFILE"):
        lightning_shardckpt.metadata("s3://bucket/a.ckpt")


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), name="server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Cloud(BaseHTTPRequestHandler):
    """As much of GCS and of Azure as one object needs: whole puts with conditions, and reads."""

    objects: dict[str, tuple[bytes, int]]

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        before = self.objects.get(self.path)
        number = 0 if before is None else before[1]
        wanted = {"x-goog-if-generation-match": str(number), "If-Match": f'"{number}"'}
        ok = all(self.headers.get(name) in (None, value) for name, value in wanted.items())
        if not ok or (self.headers.get("If-None-Match") == "*" and before is not None):
            self.answer(412)
            return
        self.objects[self.path] = content, number + 1
        self.answer(201)

    def do_HEAD(self) -> None:
        found = self.objects.get(self.path)
        self.answer(404) if found is None else self.answer(200, found[0])

    do_GET = do_HEAD

    def answer(self, status: int, content: bytes = b"") -> None:
        wanted = self.headers.get("Range", self.headers.get("x-ms-range", "")).removeprefix("bytes=")
        self.send_response(206 if wanted else status)
        if wanted:
            start, stop = map(int, wanted.split("-"))
            self.send_header("Content-Range", f"bytes {start}-{stop}/{len(content)}")
            content = content[start : stop + 1]
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Sat, 01 Nov 2025 00:00:00 GMT")
        if self.path in self.objects:
            number = self.objects[self.path][1]
            self.send_header("ETag", f'"{number}"')
            self.send_header("x-goog-generation", str(number))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.mark.parametrize("url", ["gs://bucket/a", "az://bucket/a", "abfss://bucket@account.dfs.core.windows.net/a"])
def test_gcs_and_azure_compare_as_they_write(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(Cloud):
        objects: dict[str, tuple[bytes, int]] = {}  # noqa: RUF012

    with serving(Handler) as endpoint:
        options: dict[str, Any] = {"token": "a token", "endpoint_url": endpoint}
        if not url.startswith("gs"):
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
            options = {"anon": True} | ({} if "@" in url else {"account_name": "account"})
        store = ObjectStore(url, options, IMPATIENT)
        with pytest.raises(FileNotFoundError, match=f"looking at {url}: "):
            store.stat(url)
        store.put(url, b"first", None)
        tag = store.stat(url).tag
        with pytest.raises(FileExistsError):
            store.put(url, b"other", None)
        store.put(url, b"second", tag)
        with pytest.raises(FileExistsError):
            store.put(url, b"third", tag)
        assert store.get(url) == (b"second", store.stat(url).tag) and store.read(url, 1, 4) == b"eco"


def test_a_forked_process_is_told_and_does_not_hang(s3: Bucket) -> None:
    storage = StorageRouter(storage_options=s3.options, tuning=IMPATIENT)
    with pytest.raises(CheckpointNotFoundError):
        storage.open(s3.url("a.ckpt"))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            storage.open(s3.url("a.ckpt"))
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        assert "RuntimeError: s3://" in (said := pipe.read()) and "start processes with spawn" in said
    assert os.waitpid(child, 0)[1] == 0


def test_a_checkpoint_on_a_server_of_the_web_is_read_by_ranges(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(300_000.0)}, "step": 7}
    lightning_shardckpt.save(tmp_path / "a.ckpt", state)

    class Handler(Cloud):
        objects = {f"/a.ckpt/{file.name}": (file.read_bytes(), 1) for file in (tmp_path / "a.ckpt").iterdir()}  # noqa: RUF012

    with serving(Handler) as server:
        found = lightning_shardckpt.load(f"{server}/a.ckpt")
        assert found["step"] == 7 and torch.equal(found["model"]["w"], state["model"]["w"])
        with pytest.raises(CheckpointNotFoundError, match="is not a complete checkpoint"):
            lightning_shardckpt.load(f"{server}/b.ckpt")
        with pytest.raises(ValueError, match="can be read, but not written"):
            lightning_shardckpt.save(f"{server}/b.ckpt", state)
    with pytest.raises(OSError, match=rf"{server}/a\.ckpt.*Cannot connect to host") as raised:
        lightning_shardckpt.load(f"{server}/a.ckpt")
    assert not isinstance(raised.value, FileNotFoundError)
