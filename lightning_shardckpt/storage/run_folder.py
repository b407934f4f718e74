"""The folder of a run's checkpoints, and the small files by which a training and its follower communicate.

``evaluations.jsonl`` has a line for each evaluation of a checkpoint. Files in the folder ``.follow``:

- ``follower``: the process that follows the run, the checkpoint that it evaluates, and until when this is valid.
- ``remove-…``: a checkpoint that was deleted while it was evaluated, and the checksum of its root index. After that the
  follower deletes it, or else the next deletion in the folder.
- ``ended``: the training has ended.
- ``logged``: a line for each evaluation that the training has logged.

A deletion writes ``remove-…`` before it reads ``follower``, and the follower writes ``follower`` before it looks for
``remove-…``, so at least one of them sees the other. In a folder that was never followed, a deletion takes one look.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from lightning_shardckpt.errors import CheckpointNotFoundError, ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME, root_from_json
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.local_files import open_output, write_at
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.storage.router import StorageRouter, absolute_path, check_writable, is_url

_log = logging.getLogger(__name__)
HOLD_S = 120.0  # of which each renewal is in the first tenth; clocks of hosts may differ by the rest
EVALUATIONS, LOGGED = "evaluations.jsonl", ".follow/logged"
_FOLDER, _FOLLOWER, _ENDED, _REMOVE = ".follow", ".follow/follower", ".follow/ended", "remove-"
Saved: TypeAlias = dict[str, Any]
"""A complete checkpoint as ``evaluations.jsonl`` names it: its ``path``, ``step`` and ``save_id``."""


class RunFolder:
    """The folder of a run's checkpoints: a directory, which may not exist yet, or a URL that can be written."""

    def __init__(self, path: str | os.PathLike[str], storage: StorageRouter) -> None:
        self.path, self._storage = absolute_path(path).rstrip("/"), storage
        self._saved = cache(self._read_root)
        check_writable(self.path)
        self._objects = storage.objects(self.path) if is_url(self.path) else None

    def exists(self) -> bool:
        """Return True if the folder exists; one of an object store exists if there is an object in it."""
        return os.path.isdir(self.path) if self._objects is None else bool(self._objects.list(self.path))

    def list_complete(self) -> dict[str, str]:
        """Return the paths of complete checkpoints, without links, each with a text that changes with its content."""
        if self._objects is not None:
            stats = self._objects.list(self.path)
            roots = sorted(name for name in stats if name.count("/") == 1 and os.path.basename(name) == ROOT_NAME)
            return {f"{self.path}/{os.path.dirname(name)}": str(stats[name]) for name in roots}
        found = dict[str, str]()
        for name in os.listdir(self.path) if os.path.isdir(self.path) else ():
            path = os.path.join(self.path, name)
            with suppress(FileNotFoundError, NotADirectoryError):
                if not name.startswith(".") and not os.path.islink(path):  # drafts begin with a dot
                    root = os.stat(os.path.join(path, ROOT_NAME))
                    found[path] = f"{root.st_ino} {root.st_mtime_ns} {root.st_size}"
        return found

    def pending(self, evaluations: Sequence[Mapping[str, Any]]) -> list[Saved]:
        """Return the complete checkpoints without an evaluation, by step; each save once, its root index is read once.

        A ``last*`` is left out if its step was also saved under another name.
        """
        found = [saved for item in self.list_complete().items() if (saved := self._saved(*item)) is not None]
        found.sort(key=lambda one: (one["step"] or 0, one["path"]))
        others = {one["step"] for one in (*found, *evaluations) if not _is_copy(one)}
        pending = {one["save_id"]: one for one in reversed(found) if not (_is_copy(one) and one["step"] in others)}
        done = {one["save_id"] for one in evaluations}
        return [one for one in found if pending.get(one["save_id"]) is one and one["save_id"] not in done]

    def _read_root(self, path: str, tag: str) -> Saved | None:
        """Return the checkpoint at a path; ``tag`` changes with it."""
        try:
            with closing(self._storage.open(path)) as reader:
                root = root_from_json(read_all(reader, ROOT_NAME), f"checkpoint {path!r}, file {ROOT_NAME}")
                return {"path": path, "step": root.step, "save_id": root.save_id}
        except FileNotFoundError:  # deleted meanwhile
            return None
        except (ShardCkptError, EOFError, ValueError) as error:
            _log.warning("%r is not evaluated: %s", path, error)
            return None

    def lines(self, name: str) -> list[Any]:
        """Return the lines of ``EVALUATIONS`` or ``LOGGED``, without those that somebody has edited."""
        found = list[Any]()
        for line in self._read(name).splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the lines of ``EVALUATIONS``."""
        return [one for one in self.lines(EVALUATIONS) if isinstance(one, dict) and "save_id" in one]

    def add_lines(self, name: str, lines: Iterable[Any]) -> None:
        """Add lines to a file of which this process is the only writer; they are durable on return."""
        self._write(name, self._read(name).decode() + "".join(f"{json.dumps(line)}\n" for line in lines))

    def follower(self) -> dict[str, Any]:
        """Return the ``process`` that follows the run, the ``checkpoint`` it evaluates, and ``until`` when; or none."""
        with suppress(ValueError):  # it is empty
            return dict(json.loads(self._read(_FOLLOWER)))
        return {}

    def set_follower(self, process: str | None, checkpoint: str | None = None, hold_s: float = HOLD_S) -> None:
        """Write the process that follows the run from now on, and the name of the checkpoint that it evaluates."""
        follower = {"process": process, "checkpoint": checkpoint, "until": time.time() + hold_s}
        self._write(_FOLLOWER, None if process is None else json.dumps(follower))

    def is_followed(self, checkpoint: str | None = None) -> bool:
        """Return True if a process that is alive follows the run, or evaluates the checkpoint of a name."""
        follower = self.follower()
        return time.time() < follower.get("until", 0.0) and checkpoint in (None, follower["checkpoint"])

    def has_ended(self) -> bool:
        """Return True if the training says that it has ended."""
        return bool(self._read(_ENDED))

    def set_ended(self, has_ended: bool) -> None:
        """Write that the training has ended, or that it goes on."""
        self._write(_ENDED, "true" if has_ended else None)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint, link, plain file or object at a path in this folder, if there is one; return notes.

        A checkpoint under evaluation is deleted once that is over. Raises CheckpointNotFoundError for other things.
        """
        if self._objects is not None:
            if self._objects.tag(path) is not None:
                self._objects.delete([path])
                return []
            if not any(stat.size for stat in self._objects.list(path).values()):
                return []
        elif os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
            return []
        elif not os.path.exists(path):
            return []
        if not self._names():
            return self._storage.remove(path)
        name = os.path.basename(path.rstrip("/"))
        self._write(_request_of(name), json.dumps({"checkpoint": name, "root": self._root_checksum(path)}))
        return self.remove_requested()

    def is_requested(self, path: str) -> bool:
        """Return True if the checkpoint at a path is to be deleted."""
        return bool(self._read(_request_of(os.path.basename(path))))

    def remove_requested(self) -> list[str]:
        """Delete the checkpoints that are to be deleted, except one under evaluation; return notes."""
        notes = list[str]()
        for file in self._names():
            content = self._read(f"{_FOLDER}/{file}") if file.startswith(_REMOVE) else b""
            request = json.loads(content or b"{}")
            name = os.path.basename(str(request.get("checkpoint")))  # a name stays in the folder, whoever wrote it
            if not content or self.is_followed(name):
                continue
            path = f"{self.path}/{name}"
            with suppress(CheckpointNotFoundError):
                if self._root_checksum(path) == request["root"]:  # else another one was saved there
                    notes += self._storage.remove(path)
            self._write(f"{_FOLDER}/{file}", None)
        return notes

    def _root_checksum(self, path: str) -> str:
        with closing(self._storage.open(path)) as reader:
            return checksum(read_all(reader, ROOT_NAME))

    def _names(self) -> list[str]:
        folder = f"{self.path}/{_FOLDER}"
        if self._objects is not None:
            return [*self._objects.list(folder)]
        return os.listdir(folder) if os.path.isdir(folder) else []

    def _read(self, name: str) -> bytes:
        """Return the content of a file; empty if there is none."""
        path = f"{self.path}/{name}"
        with suppress(FileNotFoundError, NotADirectoryError):
            return Path(path).read_bytes() if self._objects is None else self._objects.get(path)[0]
        return b""

    def _write(self, name: str, text: str | None) -> None:
        """Replace a file; without a text, delete it."""
        path, content = f"{self.path}/{name}", (text or "").encode()
        if self._objects is not None:
            self._objects.delete([path]) if text is None else self._objects.upload(path, [content])
        elif text is None:
            Path(path).unlink(missing_ok=True)
        else:
            with open_output(path, is_file=True, replaceable=lambda path: True) as (create, _), create("") as file:
                write_at(file, memoryview(content), 0)


def _is_copy(saved: Mapping[str, Any]) -> bool:
    """Return True for a ``last*``: ModelCheckpoint(save_last=True) saves a second checkpoint of the same step."""
    return re.match(r"last\b", os.path.basename(saved["path"])) is not None


def _request_of(name: str) -> str:
    return f"{_FOLDER}/{_REMOVE}{checksum(os.fsencode(name))}"
