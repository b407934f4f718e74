"""Which changed bytes a load notices: every byte of every file of a checkpoint, one bit of it flipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from safetensors.torch import load_file, save_file

from lightning_shardckpt.checkpoint.checkpoint import load_full
from tests.sweeps.faults import dcp
from tests.sweeps.faults.inject import NO_FAULT
from tests.sweeps.faults.saves import NEW, equal, scenario, whole
from tests.sweeps.faults.trial import WORKERS, scratch, spread, together

Noticed = Literal["detected", "harmless", "silent"]
_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Format:  # how checkpoints of a kind are made and read
    name: str
    save: Callable[[str], None]
    load: Callable[[str], Any]
    expected: Any


@dataclass(frozen=True, slots=True)
class Flip:  # one changed bit, and what a load made of it
    format: str
    file: str
    at: int
    noticed: Noticed


def _save_ours(root: str) -> None:
    saving = scenario("first save, 2 ranks")
    together(saving, root, saving.act, 0, NO_FAULT, False)


_TENSORS = whole(NEW)["state_dict"]
FORMATS = (
    Format("lightning-shardckpt", _save_ours, lambda root: load_full(f"{root}/last.ckpt"), whole(NEW)),
    Format("torch DCP", lambda root: dcp.save(f"{root}/a", NEW), lambda root: dcp.load(f"{root}/a"), _TENSORS),
    Format("one file", lambda root: save_file(_TENSORS, f"{root}/a"), lambda root: load_file(f"{root}/a"), _TENSORS),
)


def flips(kind: Format, *, every: int = 1) -> list[Flip]:
    """Flip one bit of every byte, or of one of ``every``, of the checkpoint that a format makes."""
    with scratch() as folder:
        template = os.path.join(folder, "template", "root")
        os.makedirs(template)
        kind.save(template)
        places = list(_places(template))[::every]
        jobs = [places[i : i + _AT_ONCE] for i in range(0, len(places), _AT_ONCE)]
        found = spread(partial(_flip, kind, template, folder), jobs, WORKERS)
    return [flip for some in found for flip in some]


def _places(root: str) -> Iterator[tuple[str, int]]:
    for folder, _, files in os.walk(root):
        for name in sorted(files):
            path = os.path.join(folder, name)
            yield from ((os.path.relpath(path, root), at) for at in range(os.path.getsize(path)))


def _flip(kind: Format, template: str, folder: str, places: list[tuple[str, int]]) -> list[Flip]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        root = shutil.copytree(template, os.path.join(own, "root"))
        return [Flip(kind.name, name, at, _noticed(kind, root, name, at)) for name, at in places]


def _noticed(kind: Format, root: str, name: str, at: int) -> Noticed:
    file = os.open(os.path.join(root, name), os.O_RDWR)
    try:
        byte = os.pread(file, 1, at)
        os.pwrite(file, bytes([byte[0] ^ 1 << at % 8]), at)
        try:  # compared before the byte is restored: what was loaded may be mapped from the file
            return "harmless" if equal(kind.load(root), kind.expected) else "silent"
        except BaseException:  # torch's CheckpointException is no Exception
            return "detected"
        finally:
            os.pwrite(file, byte, at)
    finally:
        os.close(file)


def summary(found: list[Flip]) -> Counter[Noticed]:
    """How many were noticed how."""
    return Counter(flip.noticed for flip in found)
