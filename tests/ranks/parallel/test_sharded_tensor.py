"""What sharded parameters do that one process has no twin for: errors, copies, files, references from before."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt import full_state_dict
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from tests.support import tiny
from tests.support.pool import run_each, run_ranks
from tests.sweeps.twins.base import Natural

pytestmark = pytest.mark.slow


class Does(Natural):
    """Calls a function after the first batch."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.kept = next(self.net.parameters())  # a reference from before it is sharded

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            self.function(self)


def under_fsdp(function: Callable[[Any], Any]) -> None:
    pl.seed_everything(0, verbose=False)
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true", "use_distributed_sampler": False}
    tiny.trainer({"timeout_s": 20}, **options).fit(Does(function))


def read_on_one_rank(module: Any) -> None:
    if dist.get_rank() == 0:
        module.net.head.weight.norm().item()
    else:
        module.net.scale.sum().item()


def write_what_differs(module: Any) -> None:
    with torch.no_grad():
        module.net.head.weight.copy_(torch.full((5, 8), float(dist.get_rank()), dtype=torch.float64))


def ask_for_memory(module: Any) -> None:
    module.net.head.weight.data_ptr()


def assign_another_shape(module: Any) -> None:
    module.net.head.weight.data = torch.zeros(3, 8, dtype=torch.float64)


def set_storage(module: Any) -> None:
    module.net.head.weight.set_(torch.zeros(40, dtype=torch.float64).untyped_storage())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (read_on_one_rank, "rank 0: norm of net.head.weight of shape (5, 8) ("),
        (write_what_differs, "its values differ between the ranks"),
        (ask_for_memory, "data_ptr asks for the memory of a sharded tensor of shape (5, 8)"),
        (set_storage, "set_ replaces the memory of a sharded tensor of shape (5, 8)"),
        (assign_another_shape, "a sharded tensor keeps its shape"),
    ],
)
def test_what_ranks_cannot_do_apart_is_refused(function: Callable[[Any], Any], said: str) -> None:
    for outcome in run_ranks(2, under_fsdp, function, expect_errors=True, timeout_s=90, grace_s=30):
        assert outcome.error is not None
        assert outcome.error.type == "UnsupportedCodeError"
        assert said in outcome.error.message


def keep(module: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save(module.net.head.state_dict(), io.BytesIO())
    assert any("full_state_dict" in str(w.message) for w in caught)
    whole, copied = full_state_dict(module.net), copy.deepcopy(module.net.head)
    x = torch.ones(2, 8, dtype=torch.float64)
    assert {type(value) for value in whole.values()} == {Tensor}
    with torch.no_grad():
        copied.weight.zero_()
    assert abs((copied(x).sum() - 2 * copied.bias.sum()).item()) < 1e-12
    plain = nn.Linear(8, 5, dtype=torch.float64)
    plain.load_state_dict({"weight": whole["head.weight"], "bias": whole["head.bias"]})
    assert torch.equal(plain(x), module.net.head(x))


def test_outside_of_steps_a_sharded_parameter_is_the_whole_one() -> None:
    functions = keep, use_views, read_in_a_loss
    run_each({function: (2, under_fsdp, function) for function in functions})


def use_views(module: Any) -> None:
    """Views, and references from before it was sharded, change the shards."""
    weight, other = module.net.head.weight, module.net.embed.weight
    expected = weight.full_tensor().detach().clone()
    with torch.no_grad():
        row = weight[1]
        row.mul_(2)
        weight.view(-1)[:3] = 7
        weight.data[4].zero_()
        old = other.view(other.shape)
        other.mul_(3)
        other.sub_(old)  # the view is as new as what it is of
        assert other.abs().max().item() == 0
        torch._foreach_mul_([other, row], 0.5)
        module.kept.fill_(3)  # what took its place
    expected.view(-1)[:3] = 7
    expected[4] = 0
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight[0] = 1
    assert torch.equal(weight.full_tensor(), expected)
    assert next(module.net.parameters()).mean().item() == 3 and type(weight) is ShardedTensor


def read_in_a_loss(module: Any) -> None:
    """The gradient of a weight that is read outside of its module is that of the mean loss."""
    weight, x = module.net.head.weight, torch.arange(16, dtype=torch.float64).view(2, 8) / 16
    module.zero_grad()
    hooked = list[bool]()
    handle = weight.register_hook(lambda gradient: hooked.append(gradient.shape == weight.shape))
    ((x + dist.get_rank()) @ weight.t()).pow(3).mean().backward()
    handle.remove()
    whole = weight.full_tensor().detach().requires_grad_()
    mean = sum(((x + rank) @ whole.t()).pow(3).mean() for rank in range(2)) / 2
    (expected,) = torch.autograd.grad(mean, whole)
    torch.testing.assert_close(weight.grad.full_tensor(), expected, rtol=1e-12, atol=0)
    assert hooked == [True]
    module.zero_grad()
