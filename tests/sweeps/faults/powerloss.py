"""Every state that a file system may leave on a disk after the power fails, replayed from recorded calls.

Promised is only what was synced: a file's bytes by a sync of the file, a directory's names by a sync of the directory.
Of unsynced bytes all, none, zeros in their place or the first half may be there. Of the unsynced changes of a directory
any prefix may have happened, in each directory by itself. The states of all moments of an action are enumerated.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from tests.sweeps.faults.inject import NO_FAULT, Change
from tests.sweeps.faults.trial import WORKERS, Found, Scenario, action, prepared, scratch, spread

State: TypeAlias = Union[bytes, str, "tuple[tuple[str, State], ...]"]
"""A file's content, a link's target or a directory's entries; a value, so that equal states are loaded once."""


@dataclass(slots=True)
class File:  # a file, or a link with ``content`` as str
    content: bytes | str = b""
    durable: bytes | str = b""

    def states(self) -> set[State]:
        if isinstance(self.content, str) or isinstance(self.durable, str) or self.content == self.durable:
            return {self.content}
        size = len(self.content)
        half = self.content[: size // 2]
        return {self.content, self.durable, bytes(size), half + bytes(size - len(half))}


@dataclass(slots=True)
class Directory:  # a directory: its names now, and all versions that may be on the disk, the durable one first
    entries: dict[str, Node] = field(default_factory=dict)
    versions: list[dict[str, Node]] = field(default_factory=lambda: [{}])

    def changed(self) -> None:
        self.versions.append(dict(self.entries))

    def states(self) -> set[State]:
        return {
            tuple(zip(sorted(version), found, strict=True))
            for version in self.versions
            for found in itertools.product(*(version[name].states() for name in sorted(version)))
        }


Node: TypeAlias = File | Directory


@dataclass(slots=True)
class Disk:
    """A file tree that changes as the calls of a log say."""

    root: Directory

    def apply(self, change: Change) -> None:
        parent, name = self._parent(change.path)
        match change.name:
            case "create":
                if name not in parent.entries:
                    parent.entries[name] = File()
                    parent.changed()
                elif change.data:
                    self._node(change.path).content = b""
            case "write" | "truncate":
                file = self._node(change.path)
                file.content = _written(file.content, change)
            case "sync":
                self._sync(change.path)
            case "mkdir":
                parent.entries[name] = Directory()
                parent.changed()
            case "symlink":
                parent.entries[name] = File(change.other, change.other)
                parent.changed()
            case "remove":
                del parent.entries[name]
                parent.changed()
            case "move" | "exchange":
                self._move(change)

    def _move(self, change: Change) -> None:
        (source, a), (target, b) = self._parent(change.path), self._parent(change.other)
        moved = source.entries.pop(a)
        if change.name == "exchange":
            source.entries[a] = target.entries[b]
        target.entries[b] = moved
        source.changed()
        if target is not source:
            target.changed()

    def _sync(self, path: str) -> None:
        node = self._node(path)
        if isinstance(node, Directory):
            node.versions = [dict(node.entries)]
        else:
            node.durable = node.content

    def _node(self, path: str) -> Any:
        node: Any = self.root
        for name in [] if path == "." else path.split("/"):
            node = node.entries[name]
        return node

    def _parent(self, path: str) -> tuple[Any, str]:
        folder, _, name = path.rpartition("/")
        return self._node(folder or "."), name


def _written(content: bytes, change: Change) -> bytes:
    if change.name == "truncate":
        return content[: change.offset].ljust(change.offset, b"\0")
    end = change.offset + len(change.data)
    return content[: change.offset].ljust(change.offset, b"\0") + change.data + content[end:]


def read(path: str) -> Node:
    """What is at a path, all of it durable."""
    if os.path.islink(path):
        return File(os.readlink(path), os.readlink(path))
    if os.path.isdir(path):
        entries = {name: read(os.path.join(path, name)) for name in os.listdir(path)}
        return Directory(entries, [dict(entries)])
    with open(path, "rb") as file:
        content = file.read()
    return File(content, content)


def make(state: State, path: str) -> None:
    """Bring a state to a path at which nothing is."""
    if isinstance(state, str):
        os.symlink(state, path)
    elif isinstance(state, bytes):
        with open(path, "wb") as file:
            file.write(state)
    else:
        os.mkdir(path)
        for name, below in state:
            make(below, os.path.join(path, name))


@dataclass(frozen=True, slots=True)
class Loss:  # what loads after the power failed when ``done`` of ``of`` calls had been made; in how many of the states
    scenario: str
    done: int
    of: int
    after: str
    found: Found
    states: int

    @property
    def problem(self) -> str | None:
        if self.found not in ("mixed", "lost") and (self.done < self.of or self.found == "new"):
            return None
        when = "the action had returned" if self.done == self.of else f"call {self.done}, {self.after!r},"
        return f"{self.scenario}: {self.found} in {self.states} states if the power fails after {when}"


def losses(scenario: Scenario, *, without: Any = lambda change: False, every: int = 1) -> list[Loss]:
    """Lose power at every moment of an action, as if it had not made the changes that ``without`` names.

    Of all states that may be left, one of ``every`` is loaded.
    """
    with scratch() as folder:
        template, _ = prepared(scenario, folder)
        ends = action(scenario, template, os.path.join(folder, "recorded", "root"), 0, NO_FAULT, True)
        log = sorted((c for end in ends for c in end.changes if not without(c)), key=lambda c: c.at_ns)
        moments = list(_moments(Disk(read(template)), log))
        distinct = sorted(set().union(*moments), key=repr)[::every]
        jobs = [(scenario, folder, state) for state in distinct]
        found = dict(zip(distinct, spread(_load, jobs, WORKERS), strict=True))
    return list(_counted(scenario, log, moments, found))


def _moments(disk: Disk, log: Sequence[Change]) -> Iterator[set[State]]:
    yield disk.root.states()
    for change in log:
        disk.apply(change)
        yield disk.root.states()


def _load(job: tuple[Scenario, str, State]) -> Found:
    scenario, folder, state = job
    path = os.path.join(folder, f"{os.getpid()}-{id(job)}")
    os.mkdir(path)
    make(state, os.path.join(path, "root"))
    return scenario.found(os.path.join(path, "root"))


def _counted(
    scenario: Scenario, log: Sequence[Change], moments: Sequence[set[State]], found: dict[State, Found]
) -> Iterator[Loss]:
    for done, states in enumerate(moments):
        after = f"{log[done - 1].name} {log[done - 1].path}" if done else ""
        kinds = [found[state] for state in states if state in found]
        for kind in sorted(set(kinds)):
            yield Loss(scenario.name, done, len(log), after, kind, kinds.count(kind))
