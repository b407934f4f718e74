"""A module that rank 0 builds, and whose values it sends, equals the same code run on one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_flatten_with_path

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support import hub
from tests.support.pool import run_ranks

Build = Callable[[], nn.Module]


# ── what is built ───────────────────────────────────────────────────────────────────────────────────────────────────


class Slices(nn.Module):
    """Writes through views, aliases, ``.data`` and copies, before and after registration."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(6, 4)
        self.w = nn.Parameter(w)
        w[0].fill_(7.0)  # an alias that the parameter shares memory with
        self.w.data[1:3, ::2].normal_(1.0, 2.0)
        with torch.no_grad():
            self.w[5].copy_(self.w[4])
            self.w[self.w > 1.5] = -1.0
            self.w.t()[2].exponential_()
        self.v = nn.Parameter(self.w.detach().clone() * torch.rand(4))
        self.u = nn.Parameter(torch.empty(4, 6))
        self.u.data = self.w.data.t().contiguous()
        self.w.data.add_(1)
        self.x = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64).t())
        self.x.data.uniform_(-1, 1)
        self.register_buffer("w0", self.w.detach().clone())
        self.plain = self.v.detach() + 1
        self.qk = nn.Parameter(torch.cat([torch.randn(4, 4), torch.randn(4, 4).flip(0)]))
        self.parts = nn.ParameterList(self.qk.detach().chunk(2))


class Generators(nn.Module):
    """Explicit generators, reseeding, and operations whose use of random numbers depends on values."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.a = nn.Parameter(torch.randn(30, generator=generator))
        self.b = nn.Parameter(torch.empty(30).normal_(generator=generator))
        self.c = nn.Parameter(torch.poisson(self.a.detach().exp()))
        self.d = nn.Parameter(torch.bernoulli(torch.rand(40)))
        torch.manual_seed(99)
        self.h = nn.Parameter(nn.functional.dropout(torch.rand(50), 0.3))
        with torch.random.fork_rng(devices=[]):
            self.i = nn.Parameter(torch.rand(3))
        self.j = nn.Parameter(torch.rand(3).geometric_(0.3))


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(4, 4)
        self.to_half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.to_half[1].weight = self.to_half[0].weight
        self.to_half.to(torch.bfloat16)
        torch.set_default_dtype(torch.float64)
        try:
            self.wide = nn.Linear(3, 3)
            self.promoted = nn.Parameter(torch.arange(3) / 2)
        finally:
            torch.set_default_dtype(torch.float32)
        self.double().float()


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        self.net(torch.randn(3, 5))
        self.skipped = nn.utils.skip_init(nn.Linear, 4, 4)
        nn.init.kaiming_normal_(self.skipped.weight)
        nn.init.zeros_(self.skipped.bias)


class Anchored(nn.Linear):
    """Copies of its weights in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("initial", self.weight.clone())
        self.norm = self.weight.detach().norm()


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), parametrizations.orthogonal(nn.Linear(5, 5)))


def llama() -> nn.Module:
    return hub.llama(tie_word_embeddings=True)


BUILDS: dict[str, Build] = {
    "slices": Slices, "generators": Generators, "casts": Casts, "lazy": Lazy, "anchored": Anchored, "normed": normed,
    "llama": llama,
}  # fmt: skip
READ = ("normed",)
"""Builds that read values of parameters: all ranks must have them."""
REAL = ("lazy",)
"""Builds whose parameters get memory after they are registered, which all ranks have then."""


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────────


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for prefix, module in model.named_modules():
        containers = {name: x for name, x in vars(module).items() if not isinstance(x, nn.Module) and name[0] != "_"}
        yield from ((f"{prefix}.{path}", x) for path, x in tree_flatten_with_path(containers)[0] if type(x) is Tensor)


def differences(model: nn.Module, oracle: nn.Module) -> list[str]:
    found, expected = dict(named(model)), dict(named(oracle))
    if list(found) != list(expected):
        return ["names"]
    wrong = [name for name in expected if not same_bits(found[name], expected[name])]
    wrong += [name for name in expected if found[name].requires_grad != expected[name].requires_grad]
    first, of_oracle = ({id(x): name for name, x in reversed(tensors.items())} for tensors in (found, expected))
    return wrong + [n for n in expected if first[id(found[n])] != of_oracle[id(expected[n])]]


def build_all(names: list[str], empty_init: bool) -> dict[str, list[str]]:
    """What differs from the oracle, by build: tensors, ties and random numbers, or the error."""
    strategy = ShardedStrategy(data_parallel_shard_size=1, data_parallel_replicate_size=2)
    (fabric := Fabric(accelerator="cpu", devices=2, strategy=strategy)).launch()
    found = {}
    for name in names:
        torch.manual_seed(1234)
        oracle = BUILDS[name]()
        state = torch.get_rng_state()
        torch.manual_seed(1234)
        try:
            with fabric.init_module(empty_init=empty_init):
                model = BUILDS[name]()
            without = dist.get_rank() > 0 and empty_init and name not in REAL
            wrong = [] if any(p.is_meta for p in model.parameters()) == without else ["memory"]
            wrong += [] if torch.equal(torch.get_rng_state(), state) else ["random numbers"]
            fabric.setup_module(model)
            found[name] = wrong + differences(model, oracle)
        except UnsupportedCodeError as error:
            found[name] = [str(error)]
    return found


@pytest.mark.filterwarnings("default")
def test_modules_that_rank_0_builds_are_those_of_one_process() -> None:
    names = [name for name in BUILDS if name not in READ]
    assert run_ranks(2, build_all, names, True) == [{name: [] for name in names}] * 2


@pytest.mark.filterwarnings("default")
def test_code_that_reads_values_while_it_builds_is_refused_with_the_remedy() -> None:
    for found in run_ranks(2, build_all, list(READ), True):
        assert [name for name, texts in found.items() if "init_module(empty_init=False)" not in "".join(texts)] == []
    assert run_ranks(2, build_all, list(READ), False) == [{name: [] for name in READ}] * 2
