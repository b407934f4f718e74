"""A state dict with the live tensors is what torch's own is, as `compat.module_state` makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.module_state import copied_state_dict, live_state_dict
from tests.support.pool import run_ranks


class Whole(DTensor):
    """A DTensor of another class, as strategies make them."""


class Counting(nn.Module):
    """Has a buffer that is not stored, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": 7}

    def set_extra_state(self, state: Any) -> None:
        pass


class Own(nn.Module):
    """Has a state dict of its own, which takes no options."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # as users write it
        return {"mine": self.w.detach() * 2}


def sharded_module() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(nn.Linear(3, 5), Counting(), nn.Linear(5, 3, bias=False))
    for part in (module[0], module[2]):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [Shard(0)]))
    module[2].weight.__class__ = Whole
    module.register_parameter("tied", module[0].weight)
    module[0].weight.requires_grad_(False)
    return module


def check_is_as_torch_makes_it() -> None:
    module = sharded_module()
    expected, found = module.state_dict(), live_state_dict(module)
    assert list(found) == list(expected) and found._metadata == expected._metadata  # type: ignore[attr-defined]
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value
            continue
        live = found[name]
        assert type(live) is (Whole if name == "2.weight" else type(value)) and not live.requires_grad
        assert (live.shape, live.dtype, live.stride()) == (value.shape, value.dtype, value.stride())
        assert local_tensor(live).data_ptr() == local_tensor(value).data_ptr()
        if isinstance(value, DTensor):
            assert (live.device_mesh, live.placements) == (value.device_mesh, value.placements)
        assert live is not dict(module.named_parameters()).get(name)
    found["0.weight"].mul_(0)
    assert not local_tensor(module[0].weight).any()


def check_hooks_see_what_torch_shows_them() -> None:
    module, seen = sharded_module(), list[bool]()

    def hook(part: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        seen.append(state["2.weight"].requires_grad)
        state["added"] = torch.ones(1)

    module.register_state_dict_post_hook(hook)
    assert "added" in live_state_dict(module) and seen == [False]


def check_copies_are_equal_and_share_no_memory() -> None:
    module = sharded_module()
    live = module.state_dict()
    found = copied_state_dict(live)
    assert list(found) == list(live) and found._metadata == live._metadata  # type: ignore[attr-defined]
    for name, value in live.items():
        if isinstance(value, torch.Tensor):
            assert type(found[name]) is type(value) and torch.equal(local_tensor(found[name]), local_tensor(value))
            assert local_tensor(found[name]).data_ptr() != local_tensor(value).data_ptr()
    local_tensor(found["tied"]).zero_()
    assert not local_tensor(found["0.weight"]).any() and local_tensor(module[0].weight).any()


CHECKS = [check_is_as_torch_makes_it, check_hooks_see_what_torch_shows_them, check_copies_are_equal_and_share_no_memory]


@pytest.mark.parametrize("check", CHECKS)
def test_state_dicts_are_those_of_torch(check: Any) -> None:
    run_ranks(2, check)


def test_a_modules_own_state_dict_is_taken() -> None:
    assert torch.equal(live_state_dict(Own())["mine"], torch.full((2,), 2.0))
