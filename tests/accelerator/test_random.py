"""Draws on the device count as those on the CPU do, its stream follows the rank, and its values count at the start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.ranks import run_on_gpus
from tests.accelerator.topologies import REPLICAS
from tests.support.tiny import TinyLM, loader, trainer, whole

pytestmark = pytest.mark.gpu


class _Noisy(torch.optim.SGD):
    """Draws on the device alone."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn(parameter.shape, device=parameter.device), alpha=0.1)
        return found


class _HasNoise(TinyLM):
    def configure_optimizers(self) -> Any:
        return _Noisy(self.parameters(), lr=0.1)


def _replica_with_noise() -> tuple[list[float], list[float]]:
    """Parameters after some steps, and what the rank draws by itself then."""
    module = _HasNoise(frozen=False)
    torch.cuda.manual_seed(dist.get_rank())
    trainer(REPLICAS, accelerator="cuda", max_steps=2).fit(module, loader())
    return [float(whole(p).double().sum()) for p in module.parameters()], torch.rand(3, device="cuda").tolist()


def test_replicas_add_the_same_noise_of_the_device_and_go_on_with_their_own() -> None:
    (one, own), (other, others) = run_on_gpus(2, _replica_with_noise)
    assert one == other and all(map(math.isfinite, one))
    assert own != others
