"""Among more ranks of a host than one look is at, those whose process has ended are found, and no others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import default_store
from lightning_shardckpt.distributed.host_ranks import HostRanks
from lightning_shardckpt.distributed.liveness import host
from tests.support.pool import run_ranks

RANKS = 200


def crowded() -> tuple[list[int], list[int]]:
    """Two processes play the even and the odd ranks; the odd one is killed."""
    store, mine = default_store(), dist.get_rank()
    everyone = [HostRanks(store, rank) for rank in range(mine, RANKS, 2)]
    store.set(f"registered/{mine}", "")
    store.wait(["registered/0", "registered/1"])
    if mine == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for one in everyone:
        while len(one.gone()) < RANKS // 2:
            pass
    return sorted(everyone[0].gone()), sorted(everyone[0].living())


def test_each_of_many_ranks_of_a_host_finds_all_that_have_ended() -> None:
    first, second = run_ranks(2, crowded, expect_errors=True, grace_s=60)
    assert second.killed
    assert first.value == (list(range(1, RANKS, 2)), list(range(0, RANKS, 2)))


def test_a_host_without_an_id_of_its_boot_has_a_name_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("one\n")
    assert host(tmp_path / "none") == f"{os.uname().nodename}-{os.getpid()}"
    assert host(tmp_path / "boot_id").startswith(f"{os.uname().nodename}-one-")
