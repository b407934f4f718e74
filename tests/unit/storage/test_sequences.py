"""Any sequence of saves, deaths, removals, moves and reads leaves at each path what a dict of paths says.

Each backend plays the same sequences, drawn by a seed that a failure names; ``--sweeps`` plays more of them.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.protocol import Draft, Storage, read_all
from lightning_shardckpt.storage.router import StorageRouter
from tests.support.faults import killed
from tests.support.stores import IMPATIENT, Bucket

ACTIONS = ("save", "save", "die", "discard", "remove", "move", "read while it is replaced", "two at once")
STEPS = 8


class Player:
    """Acts on three paths of a backend; ``expected`` has the number of the save that each path holds."""

    def __init__(self, storage: Storage, folder: str, seed: int, dies: Callable[[Callable[[], object]], None]) -> None:
        self.storage, self.draw, self.dies = storage, random.Random(seed), dies
        self.paths = [f"{folder}/{name}" for name in ("a.ckpt", "b.ckpt", "c.ckpt")]
        self.expected, self.saves, self.can_move = dict[str, int](), 0, folder.startswith("/")
        if self.can_move:
            os.makedirs(self.paths[1])  # one that is filled in place

    def begun(self, path: str) -> tuple[Draft, int]:
        self.saves += 1
        draft = self.storage.draft(path, save_id(self.saves))
        draft.begin()
        return draft, self.saves

    @staticmethod
    def write(draft: Draft, number: int, count: int = 3) -> None:
        for name, content in [*files(number, draft.prefix).items()][:count]:
            draft.write(name, [content])

    def act(self) -> str:
        """Do something, and return what."""
        action, path = self.draw.choice(ACTIONS), self.draw.choice(self.paths)
        free = [other for other in self.paths if other not in self.expected]
        if action == "save":
            draft, number = self.begun(path)
            self.write(draft, number)
            draft.publish()
            self.expected[path] = number
        elif action == "die":
            count = self.draw.randrange(4)
            self.dies(lambda: self.write(*self.begun(path), count))
            self.saves += 1  # which a process that died has counted for itself
        elif action == "discard":
            draft, number = self.begun(path)
            self.write(draft, number, self.draw.randrange(4))
            draft.discard()
        elif action == "remove" and path in self.expected:
            self.storage.remove(path)
            del self.expected[path]
        elif action == "remove":
            with pytest.raises(CheckpointNotFoundError):
                self.storage.remove(path)
        elif action == "move" and self.can_move and path in self.expected and free:
            os.rename(path, free[0])
            self.expected[free[0]] = self.expected.pop(path)
        elif action == "read while it is replaced" and path in self.expected:
            reader, before = self.storage.open(path), self.expected[path]
            draft, number = self.begun(path)
            self.write(draft, number)
            draft.publish()
            self.expected[path] = number
            try:
                assert {name: read_all(reader, name) for name in "ab"} == without_root(before)
            except OSError as error:  # what an open reader had not opened yet may be gone
                assert error.errno == errno.ESTALE, error
            finally:
                reader.close()
        elif action == "two at once":
            first, number = self.begun(path)
            self.write(first, number, 1)
            try:
                second, other = self.begun(path)
            except FileExistsError:
                second = None
            for name, data in [*files(number, first.prefix).items()][1:]:
                first.write(name, [data])
            first.publish()
            self.expected[path] = number
            if second is not None:
                self.write(second, other)
                try:
                    second.publish()
                    self.expected[path] = other
                except FileExistsError:  # it compares what is there with what was there when it began
                    second.discard()
        return f"{action} {path[-6:]}"

    def check(self) -> None:
        """Compare each path."""
        for path in self.paths:
            if path not in self.expected:
                with pytest.raises(CheckpointNotFoundError):
                    self.storage.open(path).close()
                continue
            reader = self.storage.open(path)
            try:
                assert {*reader.names()} >= {"a", "b", ROOT_NAME}
                assert {name: read_all(reader, name) for name in "ab"} == without_root(self.expected[path]), path
            finally:
                reader.close()


def save_id(number: int) -> str:
    """Return one that differs from others at its begin, of which names are made."""
    return f"{number:08x}" + "0" * 24


def files(number: int, prefix: str = "") -> dict[str, bytes]:
    """A checkpoint, with as much of a root index as a backend may look at, which is written last."""
    return {**without_root(number), ROOT_NAME: f'"prefix":"{prefix}"'.encode()}


def without_root(number: int) -> dict[str, bytes]:
    return {"a": b"%d" % number, "b": b"%9d" % number * 1000}


def play(storage: Storage, folder: str, seeds: range, dies: Callable[[Callable[[], object]], None]) -> None:
    for seed in seeds:
        player, done = Player(storage, f"{folder}/{seed}", seed, dies), list[str]()
        try:
            for _ in range(STEPS):
                done.append(player.act())
                player.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, after {done}")
            raise


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        ("memory", range(50)),
        ("disk", range(15)),  # which waits for syncs
        ("s3", range(3)),
        *(pytest.param(kind, range(100, 2000), marks=pytest.mark.sweep) for kind in ("memory", "disk")),
    ],
)
def test_each_path_holds_the_last_save_that_was_published(
    kind: str, seeds: range, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "disk":
        play(LocalStorage(), str(tmp_path), seeds, killed)
        return
    s3: Bucket | None = request.getfixturevalue("s3") if kind == "s3" else None
    storage = StorageRouter(tuning=IMPATIENT, storage_options=s3 and s3.options)
    play(storage, s3.url("runs") if s3 else f"memory:/{tmp_path}", seeds, lambda work: work() and None)
