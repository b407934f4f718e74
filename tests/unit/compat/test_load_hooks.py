"""Which code of modules counts when a state dict is loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_shardckpt.compat.load_hooks import code_before, has_code_after, has_own_load


def hook(*arguments: Any) -> None:
    """Do nothing."""


class Own(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign)


class Overridden(nn.BatchNorm1d):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def test_code_of_users_and_of_libraries_is_told_apart() -> None:
    assert code_before(nn.Linear(1, 1)) == code_before(pl.LightningModule()) == set()
    assert code_before(nn.BatchNorm1d(1)) == {"library"}
    assert code_before(Overridden(1)) == {"user"}
    module = nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(partial(hook, 1))  # type: ignore[no-untyped-call]  # torch's
    assert code_before(module) == {"user"} and not has_code_after(module)
    module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch's
    assert has_code_after(module)


def test_code_of_torch_distributed_does_not_count() -> None:
    wrapped = checkpoint_wrapper(nn.Linear(1, 1))
    assert len(wrapped._load_state_dict_pre_hooks) == 1 and code_before(wrapped) == set()


def test_a_load_state_dict_of_the_users_own_is_told() -> None:
    assert has_own_load(Own(1, 1))
    assert not has_own_load(nn.Linear(1, 1)) and not has_own_load(pl.LightningModule())
