"""Our candidates, by the functions that scripts call; Lightning's plugins save and load in the same way.

All that a save costs is in its time: collecting the state, agreement, checksums, indexes, fsync and the rename.
"""

from __future__ import annotations

from typing import Any

from limits import BUFFERED, COPY, DIRECT, READ, READ_ANEW
from state import State
from turns import Way

from lightning_shardckpt import load, save, save_async


def _objects(state: State) -> dict[str, Any]:
    optimizer = {} if state.optimizer is None else {"optimizer": state.optimizer}
    return {"model": state.model, **optimizer}


def _save(state: State, path: str, **options: Any) -> None:
    save(path, _objects(state), **options)


def _load(state: State, path: str, **options: Any) -> None:
    load(path, _objects(state), **options)


def way(name: str = "ours", **about: Any) -> Way:
    """The default: durable, with checksums, which the load verifies."""
    return Way(name, _save, _load, **about)


SAVES = [
    way(limit=DIRECT, peer="DCP"),
    Way("ours, sync_files=False", lambda s, p: _save(s, p, sync_files=False), _load, BUFFERED, "DCP, no fsync"),
]
LOADS = [
    way(limit=READ, peer="DCP"),
    Way("ours, verify=False", _save, lambda s, p: _load(s, p, verify=False), READ, "DCP"),
]
RESUMES = [way("ours, new moments", limit=READ_ANEW, peer="DCP, new moments", fresh=True)]
COPIES = [Way("ours", _save, _load, COPY, "DCP, thread", begin=lambda s, p: save_async(p, _objects(s)).result)]
