"""Our candidates, through the entry point that Lightning uses: ``ShardCkptIO``, attached as by ``ShardedStrategy``.

All that a save costs is in its time: collecting the state dicts, agreement, checksums, indexes, fsync and the rename.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from limits import BUFFERED, COPY, DIRECT, READ, READ_ANEW
from state import State
from turns import Way

from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.optimizer import optimizer_state
from lightning_shardckpt.system.memory import gc_paused

OURS, UNSYNCED, UNVERIFIED, RESUMED = "ours", "ours, sync_files=False", "ours, verify=False", "ours, new moments"
ASYNC, SYNC = "ours, use_async=True", "ours, blocking"


def _checkpoint_io(state: State, **options: Any) -> ShardCkptIO:
    """The CheckpointIO with these options, made once; all ranks must ask for theirs in the same order."""
    key = f"ShardCkptIO {options}"
    if key not in state.kept:
        state.kept[key] = attached(state, Ranks.of_default_group(), **options)
    return state.kept[key]


def attached(state: State, ranks: Ranks, **options: Any) -> ShardCkptIO:
    """A CheckpointIO of a strategy that trains ``state``."""
    io = ShardCkptIO(**options)
    io.attach(ranks, state.model, {})
    if io.is_async:
        io.enable_async(Ranks.of_default_group())
    return io


def _names(state: State) -> dict[int, str]:
    return {id(parameter): name for name, parameter in state.model.named_parameters()}


def checkpoint(state: State, io: ShardCkptIO) -> dict[str, Any]:
    """Lightning's checkpoint dict."""
    optimizers = [optimizer_state(state.optimizer, _names(state))]
    weights = _state_dict(state, io)
    return {"state_dict": weights, "optimizer_states": optimizers, "epoch": 0, "global_step": 1, "loops": {}}


def _state_dict(state: State, io: ShardCkptIO) -> dict[str, Any]:
    """As ``ShardedStrategy`` collects it."""
    with gc_paused():
        return live_state_dict(state.model)


def _save(state: State, path: str, **options: Any) -> None:
    io = _checkpoint_io(state, **options)
    io.save_checkpoint(checkpoint(state, io), path)
    io.wait()


def _begin(state: State, path: str, **options: Any) -> Callable[[], Any]:
    io = _checkpoint_io(state, **options)
    io.save_checkpoint(checkpoint(state, io), path)
    return io.wait


def _load(state: State, path: str, **options: Any) -> None:
    load_into(_checkpoint_io(state, **options), state, path)


def load_into(io: ShardCkptIO, state: State, path: str) -> None:
    """As ``ShardedStrategy`` resumes."""
    targets = LoadTargets.of_module(state.model, _state_dict(state, io), io.names, [state.optimizer])
    io.load_into(path, targets, strict=True)


def way(name: str = OURS, **about: Any) -> Way:
    """The default: durable, with checksums, which the load verifies."""
    return Way(name, _save, _load, **about)


DCP, DCP_UNSYNCED = "DCP", "DCP, no fsync"  # what ours is compared with
DCP_RESUMED = "DCP, new moments"

SAVES = [
    way(limit=DIRECT, peer=DCP),
    Way(UNSYNCED, lambda s, p: _save(s, p, sync_files=False), _load, BUFFERED, DCP_UNSYNCED),
]
LOADS = [
    way(limit=READ, peer=DCP),
    Way(UNVERIFIED, _save, lambda s, p: _load(s, p, verify=False), READ, DCP),
]
RESUMES = [way(RESUMED, limit=READ_ANEW, peer=DCP_RESUMED, fresh=True)]
COPIES = [
    Way(ASYNC, _save, _load, COPY, "DCP, thread", begin=lambda s, p: _begin(s, p, use_async=True)),
    Way(SYNC, _save, _load, COPY, "DCP, thread", begin=_begin),
]
