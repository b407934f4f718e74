"""Checkpoints of a few bytes, published and read through the protocol of storage, and file systems of a test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.protocol import Storage, read_all

ID, OTHER_ID, THIRD_ID = "0" * 32, "1" * 32, "2" * 32
SHARD = "model-dist-00000-shard-00001.safetensors"  # of other names, without a prefix, no file is deleted
LOCAL = LocalStorage()


def put(storage: Storage, path: str, save_id: str = ID, **files: bytes) -> list[str]:
    """Publish a checkpoint of these files; return the notes."""
    draft = storage.draft(path, save_id)
    draft.begin()
    for name, content in files.items():
        draft.write(name, [content])
    draft.write(ROOT_NAME, [root_of(save_id, draft.prefix)])
    draft.publish()
    return draft.notes


def root_of(save_id: str, prefix: str = "") -> bytes:
    """As much of a root index as a backend may look at."""
    return f'"save_id":"{save_id}","prefix":"{prefix}"'.encode()


def content(storage: Storage, path: str) -> dict[str, bytes]:
    """Every file but the root index."""
    reader = storage.open(path)
    try:
        return {name: read_all(reader, name) for name in reader.names() if name != ROOT_NAME}
    finally:
        reader.close()


def beside(path: str) -> list[str]:
    """What is in the directory of a checkpoint, but the checkpoint."""
    return sorted(name for name in os.listdir(os.path.dirname(path)) if name != os.path.basename(path))


def run(script: str, path: str, *command: str) -> None:
    """Run a script in a process of its own, which prints that all is as it should be."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, sys.executable, "-c", script, path], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "as it should be\n", done.stderr


def own_mounts() -> list[str]:
    """The command that runs another one with mounts of its own; skips where the system forbids it."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system allows no user namespaces")
    return command
