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

from lightning_shardckpt import ShardCkptIO, ShardedStrategy, full_state_dict
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from tests.support.pool import run_each, run_ranks
from tests.sweeps.twins.base import Natural

pytestmark = pytest.mark.slow


class Does(Natural):
    """Calls a function after the first batch."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function, self.found = function, None
        self.kept = next(self.net.parameters())  # a reference from before it is sharded

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            self.found = self.function(self)


def under_fsdp(function: Callable[[Any], Any], **options: Any) -> Any:
    pl.seed_everything(0, verbose=False)
    module = Does(function)
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardedStrategy(timeout_s=20),
        plugins=[ShardCkptIO()],
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(module)
    return module.found


Found = dict[Callable[[Any], Any], list[Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each function found on each rank."""
    functions = keep, use_views, read_in_a_loss, combine_with_unknown, norms_in_double
    return run_each({function: (2, under_fsdp, function) for function in functions})


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


def keep(module: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save(module.net.head.state_dict(), io.BytesIO())
    told = [str(w.message) for w in caught if "full_state_dict" in str(w.message)]
    whole, copied = full_state_dict(module.net), copy.deepcopy(module.net.head)
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    same = torch.equal(torch.load(file)["head.weight"], module.net.head.weight)
    with torch.no_grad():
        copied.weight.zero_()
    output = copied(torch.ones(2, 8, dtype=torch.float64))
    plain = nn.Linear(8, 5, dtype=torch.float64)
    plain.load_state_dict({"weight": whole["head.weight"], "bias": whole["head.bias"]})
    x = torch.ones(2, 8, dtype=torch.float64)
    return (
        len(told),
        same,
        {type(v) for v in whole.values()},
        (output.sum() - 2 * copied.bias.sum()).item(),
        torch.equal(plain(x), module.net.head(x)),
    )


def test_modules_can_be_copied_called_and_kept_whole_outside_of_steps(found: Found) -> None:
    for told, same, kinds, difference, called in found[keep]:
        assert (told > 0, same, kinds, called) == (True, True, {Tensor}, True)
        assert abs(difference) < 1e-12


def use_views(module: Any) -> Any:
    weight = module.net.head.weight
    with torch.no_grad():
        before = weight.full_tensor().clone()
        row = weight[1]
        row.mul_(2)
        weight.view(-1)[:3] = 7
        weight.data[4].zero_()
        other = module.net.embed.weight
        old = other.view(other.shape)
        other.mul_(3)
        other.sub_(old)  # the view is as new as what it is of
        zeros = other.abs().max().item()
        torch._foreach_mul_([other, row], 0.5)
        module.kept.fill_(3)  # what took its place
    expected = before
    expected[1] *= 2
    expected.view(-1)[:3] = 7
    expected[4] = 0
    expected[1] *= 0.5
    assert zeros == 0
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight[0] = 1
    return torch.equal(weight.full_tensor(), expected), next(module.net.parameters()).mean().item(), type(weight)


def test_views_and_references_from_before_change_the_shards(found: Found) -> None:
    assert found[use_views] == [(True, 3.0, ShardedTensor)] * 2


def read_in_a_loss(module: Any) -> tuple[float, list[bool]]:
    """How far the gradient of a weight that is read outside of its module is off the gradient of the mean loss."""
    weight, x = module.net.head.weight, torch.arange(16, dtype=torch.float64).view(2, 8) / 16
    module.zero_grad()
    hooked = list[bool]()
    handle = weight.register_hook(lambda gradient: hooked.append(gradient.shape == weight.shape))
    ((x + dist.get_rank()) @ weight.t()).pow(3).mean().backward()
    handle.remove()
    whole = weight.full_tensor().detach().requires_grad_()
    mean = sum(((x + rank) @ whole.t()).pow(3).mean() for rank in range(2)) / 2
    (expected,) = torch.autograd.grad(mean, whole)
    off = (weight.grad.full_tensor() - expected).abs().max() / expected.abs().max()
    module.zero_grad()
    return off.item(), hooked


def test_a_weight_that_a_loss_reads_gets_the_gradient_of_the_mean_loss(found: Found) -> None:
    for off, hooked in found[read_in_a_loss]:
        assert off < 1e-12
        assert hooked == [True]


def train_with_batch_norm() -> None:
    module = Natural()
    module.net.add_module("batch_norm", nn.BatchNorm1d(4))
    strategy = ShardedStrategy()
    pl.Trainer(accelerator="cpu", strategy=strategy, sync_batchnorm=True, logger=False, max_epochs=1).fit(module)


def test_batch_norms_that_cannot_be_synchronized_are_refused() -> None:
    (outcome,) = run_ranks(1, train_with_batch_norm, expect_errors=True)
    assert outcome.error.type == "TopologyError"
    assert "would replace net.batch_norm, does not run on CPUs" in outcome.error.message


def combine_with_unknown(module: Any) -> tuple[list[bool], list[str], bool]:
    weight = next(p for p in module.net.parameters() if isinstance(p, ShardedTensor) and p.ndim == 2).detach().clone()
    row = weight[0]
    unknown = Placeholder.of(torch.empty((), device="meta", dtype=weight.dtype), "a gradient", weight.device)
    made = [weight * unknown, unknown * weight, torch.add(weight, unknown), row * unknown, unknown - row]
    writes: list[Callable[[], Any]] = [
        lambda: weight.mul_(unknown),
        lambda: torch._foreach_mul_([weight], unknown),
        lambda: row.add_(unknown),
        lambda: weight.copy_(unknown),
    ]
    said = []
    for write in writes:
        try:
            write()
        except UnsupportedCodeError as error:
            said.append(str(error))
    return [isinstance(one, Placeholder) for one in made], said, bool(weight.isfinite().all())


def test_what_is_made_with_a_value_of_another_stage_is_unknown_and_written_nowhere(found: Found) -> None:
    for unknown, said, finite in found[combine_with_unknown]:
        assert unknown == [True] * 5 and finite
        assert len(said) == 4 and all("writes a gradient, whose value this pipeline stage" in one for one in said)


def norms_in_double(module: Any) -> list[bool]:
    rows = module.net.head.weight.detach().float()
    norms = [
        lambda w: torch._foreach_norm([w], 2.0, torch.float64)[0],
        lambda w: torch._foreach_norm([w], dtype=torch.float64)[0],
        lambda w: torch.linalg.vector_norm(w, 3, dtype=torch.float64),
        lambda w: torch.norm(w, dtype=torch.float64),
    ]
    pairs = [(norm(rows), norm(rows.full_tensor())) for norm in norms]
    return [found.dtype == expected.dtype and torch.equal(found, expected) for found, expected in pairs]


def test_norms_in_another_dtype_are_computed_in_it(found: Found) -> None:
    assert found[norms_in_double] == [[True] * 4] * 2
