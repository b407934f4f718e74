"""Parameters of other pipeline stages, as code between steps meets them; on one process, split by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.optimizers import show_all_stages, user_code
from lightning_shardckpt.parallel.pipeline.absent_parameters import (
    AbsentParameters,
    copy_without_weights,
    register_placeholders,
)
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from lightning_shardckpt.parallel.sharding.gradient_sync import GradientSync
from lightning_shardckpt.parallel.sharding.mesh import build_meshes, resolve_topology
from tests.support.pool import RankFailure, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def stage() -> nn.Module:
    """The first of two stages: the second layer and the head are elsewhere, but for the weight that is tied."""
    net, known = Net(), dict[int, Placeholder]()
    twins = {1: copy_without_weights(net.layers[1], "layers.1", torch.device("cpu"), known)}
    head = copy_without_weights(net.head, "head", torch.device("cpu"), known)
    copy_without_weights(net.embed, "embed", torch.device("cpu"), known)
    net.layers[1], net.head = twins[1], head  # type: ignore[assignment]
    for twin in (net.layers[1], net.head):
        register_placeholders(twin, {id(known[id(net.embed.weight)])})
    return net


def test_parameters_are_those_of_the_whole_module_in_its_order(stage: nn.Module) -> None:
    whole = Net()
    assert [(n, p.shape) for n, p in stage.named_parameters()] == [(n, p.shape) for n, p in whole.named_parameters()]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in stage.parameters())
    assert sum(p.numel() for p in stage.parameters()) == sum(p.numel() for p in whole.parameters())
    assert list(stage.state_dict()) == ["embed.weight", "layers.0.weight", "layers.0.bias"]


ALONE: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.mul_(0.5).clamp_(-1, 1),
    "assigned data": lambda p: setattr(p, "data", p.data * 0.5),
    "init": nn.init.normal_,
    "no gradient": lambda p: p.grad is None,
}


@torch.no_grad()
@pytest.mark.parametrize("change", ALONE)
def test_what_is_done_to_one_alone_is_done_elsewhere(change: str, stage: nn.Module) -> None:
    for parameter in stage.parameters():
        ALONE[change](parameter.requires_grad_())


JOINT: dict[str, tuple[Callable[[list[nn.Parameter]], Any], str]] = {
    "item": (lambda ps: [p.norm().item() for p in ps], r"item needs the value of layers\.1\.weight"),
    "if": (lambda ps: [p for p in ps if p.abs().max() > 1], r"__bool__ needs the value of layers\.1\.weight"),
    "clipping": (lambda ps: nn.utils.clip_grad_norm_(ps, 1.0), r"writes the gradient of layers\.1\.weight"),
    "vector": (lambda ps: nn.utils.parameters_to_vector(ps).tolist(), r"tolist needs the value"),
    "foreach": (lambda ps: torch._foreach_mul_(ps, 0.5), r"_foreach_mul_ needs the value of layers\.1\.weight"),
    "backward": (lambda ps: sum(p.sum() for p in ps).backward(), "backward needs the value"),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("use", JOINT)
def test_what_needs_values_of_other_stages_is_refused_by_name(use: str, stage: nn.Module) -> None:
    parameters = list(stage.parameters())
    for parameter in parameters:
        if isinstance(parameter, Placeholder):
            parameter.has_gradient = True
        else:
            parameter.grad = torch.ones_like(parameter)
    do, said = JOINT[use]
    with pytest.raises(UnsupportedCodeError, match=said), torch.set_grad_enabled(use == "backward"):
        do(parameters)


def reduce_with(hook: Callable[[torch.Tensor], Any] | None) -> torch.Tensor:
    """The gradient of a parameter that is averaged over replicas, after a backward in a pipeline."""
    net = nn.Linear(2, 1, bias=False)
    meshes = build_meshes(resolve_topology(2, replicate=2), "cpu")
    kept = GradientSync(net, meshes, torch.device("cpu"))
    if hook is not None:
        net.weight.register_hook(hook)
    absent = AbsentParameters([("weight", net.weight, None)])
    absent.check_hooks()
    net(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    del kept
    assert net.weight.grad is not None
    return net.weight.grad


def test_hooks_of_replicas_are_ours_and_those_of_users_are_refused() -> None:
    assert [gradient.tolist() for gradient in run_ranks(2, reduce_with, None)] == [[[1.5, 1.5]]] * 2
    with pytest.raises(RankFailure, match="weight has a hook"):
        run_ranks(2, reduce_with, torch.neg)


def test_an_optimizer_steps_with_what_is_here_and_shows_hooks_all(stage: nn.Module) -> None:
    parameters = list(stage.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.1}])
    show_all_stages(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    own = [p for p in parameters if not isinstance(p, Placeholder)]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 0]
    assert list(optimizer.state) == own
    with user_code():
        shown = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(shown, parameters, strict=True))
        lists = [group["params"] for group in optimizer.param_groups]
        for joined in (lists[0] + lists[1], [*lists[0].copy(), *lists[1]], list(lists[0]) + lists[1]):
            assert all(a is b for a, b in zip(joined, parameters, strict=True))
        assert next(reversed(lists[1])) is parameters[-1]
        assert optimizer.state[own[0]]["exp_avg"].shape == own[0].shape
        optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)


def test_memory_of_another_stage_is_noticed_at_the_next_step(stage: nn.Module) -> None:
    places = [(n, None, p) if isinstance(p, Placeholder) else (n, p, None) for n, p in stage.named_parameters()]
    absent = AbsentParameters(places)
    absent.check_data()
    vector = nn.utils.parameters_to_vector(stage.parameters())
    nn.utils.vector_to_parameters(vector, stage.parameters())
    with pytest.raises(UnsupportedCodeError, match=r"embed\.weight was given the data of a parameter"):
        absent.check_data()
