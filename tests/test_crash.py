"""A process that is killed at any point of a save leaves a checkpoint that loads: the old one or the new one, whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt.checkpoint import load_full, save
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.saving import About
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage import local
from tests.pool import run_ranks

CALLS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "rmdir")  # of the os module, and the exchange


def content(step: int) -> dict[str, Any]:
    return {"state_dict": {name: torch.full((50, 40), float(step)) for name in "abc"}, "global_step": step}


def save_step(path: str, step: int) -> None:
    save(path, lambda: snapshot(content(step)), ranks=Ranks.alone(), about=About(step), size_per_shard=0.01)


def killed_at(number: int, half: bool, work: Callable[[], None]) -> bool:
    """Run ``work`` in a fork that dies at its call ``number``; with ``half``, a write is cut in the middle first."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = [number]

    def dying(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if half and name == "writev":
                    os.write(args[0], bytes(args[1][0])[: len(args[1][0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name), name))
    local._exchange = dying(local._exchange, "exchange")
    work()
    os._exit(0)


def sweep(directory: str, exchange: bool, half: bool) -> dict[str, int]:
    """Kill a save over an older checkpoint at every call it makes; count what loads afterwards."""
    if not exchange:
        local._exchange = lambda a, b: False  # as on a file system that can't
    found = {"old": 0, "new": 0}
    path, number = f"{directory}/a.ckpt", 0
    killed = True
    while killed:
        number += 1
        save_step(path, 1)
        killed = killed_at(number, half, lambda: save_step(path, 2))
        loaded = load_full(path)
        assert {float(t.unique()) for t in loaded["state_dict"].values()} == {float(loaded["global_step"])}
        found["old" if loaded["global_step"] == 1 else "new"] += 1
    return found


@pytest.mark.parametrize("half", [False, True], ids=["between calls", "in the middle of a write"])
@pytest.mark.parametrize(
    "exchange",
    [pytest.param(True, id="exchange"), pytest.param(False, id="two renames", marks=pytest.mark.slow)],
)
def test_killed_save_leaves_the_old_or_the_new_checkpoint(exchange: bool, half: bool, tmp_path: Path) -> None:
    (found,) = run_ranks(1, sweep, str(tmp_path), exchange, half)
    assert found["old"] > 20 and found["new"] > 2
