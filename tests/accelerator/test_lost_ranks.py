"""A rank that dies or fails is named on the others, though NCCL notices nothing; a slow one is awaited."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_shardckpt.distributed.world import watch_run
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system.host import Tuning
from tests.accelerator.ranks import run_on_gpus
from tests.support.tiny import TinyLM, loader, trainer

pytestmark = pytest.mark.gpu

QUICK = Tuning(watch_s=0.1, exception_agreement_s=0.3)
KILLED = "rank 1 is lost: its process, pid "


def _waits_for_the_lost() -> tuple[str, str]:
    """Rank 0 waits for the device, which waits for rank 1."""
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    with pytest.raises(RankError) as raised, watch_run(QUICK):
        dist.all_reduce(x)
        x.sum().item()  # both have begun
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x)
        x.sum().item()  # the host waits, until the communicator is aborted
        dist.all_reduce(x)
    return str(raised.value), type(raised.value.__cause__).__name__


def test_a_rank_is_named_and_what_waits_for_it_is_aborted() -> None:
    survivor, _ = run_on_gpus(2, _waits_for_the_lost, expect_errors=True)
    assert survivor.error is None, survivor
    text, cause = survivor.value
    assert text.startswith(KILLED) and cause == "DistBackendError"


def _waits_in_a_script() -> str:
    """Rank 0 trains on in a script of Fabric until it is told."""
    strategy = ShardedStrategy()
    strategy.tuning = QUICK
    fabric = Fabric(accelerator="cuda", devices=2, strategy=strategy)
    fabric.launch()
    model, said = fabric.setup(nn.Linear(4, 4)), ""
    for step in range(100):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            fabric.backward(model(torch.ones(2, 4, device="cuda")).sum())
            torch.cuda.synchronize()
        except RuntimeError as error:
            said = type(error).__name__
            break
    return said


def test_a_rank_is_named_in_a_script_of_fabric() -> None:
    survivor, _ = run_on_gpus(2, _waits_in_a_script, expect_errors=True)
    assert survivor.value and KILLED in survivor.output, survivor


class _Late(TinyLM):
    """Its second rank is in a step for much longer than between two looks of the other; or raises there."""

    raises = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1 and self.trainer.global_rank == 1:
            if self.raises:
                raise ValueError("of rank 1 alone")
            time.sleep(20 * QUICK.watch_s)
        return super().training_step(batch, index)


class _Failing(_Late):
    raises = True


class _Pending(TinyLM):
    """Fails in its second step, while the device of the first rank is in a collective that the other never enters."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1:
            if self.trainer.global_rank == 0:
                dist.all_reduce(torch.ones(2, device="cuda"))
            raise ValueError(f"of rank {self.trainer.global_rank}")
        return super().training_step(batch, index)


def _fit(kind: type[TinyLM]) -> int:
    module = kind(frozen=False)
    run = trainer({}, QUICK, accelerator="cuda", max_steps=3)
    run.fit(module, loader())
    return run.global_step


def test_a_rank_that_is_slow_is_waited_for() -> None:
    assert run_on_gpus(2, _fit, _Late) == [3, 3]


def test_a_rank_that_fails_is_named_on_the_others() -> None:
    other, failed = run_on_gpus(2, _fit, _Failing, expect_errors=True)
    assert other.error.type == "RankError" and "rank 1 failed: ValueError: of rank 1 alone" in other.error.message
    assert failed.error.type == "ValueError"


def test_a_rank_that_fails_does_not_wait_for_its_device() -> None:
    first, second = run_on_gpus(2, _fit, _Pending, expect_errors=True)
    assert (first.error.message, second.error.message) == ("of rank 0", "of rank 1")
