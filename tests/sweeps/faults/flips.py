"""Which changed bytes a load notices: every byte of every file of a checkpoint, one bit of it flipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_shardckpt.checkpoint.checkpoint import load_full
from tests.sweeps.faults.inject import NO_FAULT
from tests.sweeps.faults.saves import NEW, equal, scenario, whole
from tests.sweeps.faults.trial import WORKERS, scratch, spread, together

Noticed = Literal["detected", "harmless", "silent"]
_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Flip:  # one changed bit, and what a load made of it
    file: str
    at: int
    noticed: Noticed


def flips(*, every: int = 1) -> list[Flip]:
    """Flip one bit of every byte, or of one of ``every``, of a checkpoint of two ranks."""
    with scratch() as folder:
        template = os.path.join(folder, "template", "root")
        os.makedirs(template)
        saving = scenario("first save, 2 ranks")
        together(saving, template, saving.act, 0, NO_FAULT, False)
        places = list(_places(template))[::every]
        jobs = [places[i : i + _AT_ONCE] for i in range(0, len(places), _AT_ONCE)]
        found = spread(partial(_flip, template, folder), jobs, WORKERS)
    return [flip for some in found for flip in some]


def _places(root: str) -> Iterator[tuple[str, int]]:
    for folder, _, files in os.walk(root):
        for name in sorted(files):
            path = os.path.join(folder, name)
            yield from ((os.path.relpath(path, root), at) for at in range(os.path.getsize(path)))


def _flip(template: str, folder: str, places: list[tuple[str, int]]) -> list[Flip]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        root = shutil.copytree(template, os.path.join(own, "root"))
        return [Flip(name, at, _noticed(root, name, at)) for name, at in places]


def _noticed(root: str, name: str, at: int) -> Noticed:
    file = os.open(os.path.join(root, name), os.O_RDWR)
    try:
        byte = os.pread(file, 1, at)
        os.pwrite(file, bytes([byte[0] ^ 1 << at % 8]), at)
        try:  # compared before the byte is restored: what was loaded may be mapped from the file
            return "harmless" if equal(load_full(f"{root}/last.ckpt"), whole(NEW)) else "silent"
        except Exception:
            return "detected"
        finally:
            os.pwrite(file, byte, at)
    finally:
        os.close(file)
