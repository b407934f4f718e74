"""What optimizers get when they are built, as `compat.optimizer_construction` changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shardckpt.compat.optimizer_construction import changed_parameters


def test_every_optimizer_gets_what_the_change_returns_until_the_end() -> None:
    given: list[Any] = []
    other = torch.zeros(1, requires_grad=True)

    def change(params: Any) -> list[Tensor]:
        given.append(params)
        return [other]

    with changed_parameters(change):
        optimizers = [torch.optim.SGD([], lr=0.1), torch.optim.AdamW([]), torch.optim.LBFGS([])]
    assert given == [[], [], []]
    assert all(optimizer.param_groups[0]["params"] == [other] for optimizer in optimizers)
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD([], lr=0.1)
