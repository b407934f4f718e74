"""Every kind of state: dtypes, ties, extra state, wrappers, tensors under other keys; written once, never gathered."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shardckpt import ShardCkptIO, load, metadata, save
from lightning_shardckpt.checkpoint.checkpoint import load_full
from tests.support import tiny
from tests.support.pool import run_each, run_ranks
from tests.sweeps import state_trees

TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


class Odd(nn.Module):
    """Buffers of every dtype, views, empties, ties, extra state."""

    def __init__(self) -> None:
        super().__init__()
        ints = torch.arange(24).reshape(4, 6)
        fields = {
            "int64": ints,
            "int8": ints.to(torch.int8),
            "bool": ints % 3 == 0,
            "complex64": torch.complex(ints.float(), -ints.float()),
            "complex128": torch.complex(ints.double(), -ints.double()),
            "bf16": ints.to(torch.bfloat16),
            "fp8": (ints / 4).to(torch.float8_e4m3fn),
            "fp64": ints.double() / 7,
            "scalar": torch.tensor(2.5, dtype=torch.float16),
            "empty": torch.empty(0, 5),
            "transposed": ints.float().t(),
            "view": torch.arange(100.0)[10:90:3],
            "conjugated": torch.complex(ints.float(), ints.float()).conj(),
        }
        for name, value in fields.items():
            self.register_buffer(name, value)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.tied = self.weight
        self.extra: dict[str, Any] = {"steps": (1, 2), "table": torch.arange(3), "inf": float("inf")}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class OddModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.odd.weight

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.head(torch.ones(2, 4)).square().mean() + self.odd.tied.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_odd(path: str | None, resume: str | None) -> dict[str, Any]:
    pl.seed_everything(1)
    module = OddModule()
    if resume is not None:
        for buffer in module.odd.buffers():
            buffer.zero_() if buffer.numel() else None
        module.odd.extra = {}
    run = tiny.train(module, {}, 1, save=path, resume=resume)
    assert module.head.weight is module.odd.weight is module.odd.tied
    state = tiny.full_state(module, run.optimizers)
    state["model/odd.fp8"] = state["model/odd.fp8"].view(torch.uint8)  # pickle can't return fp8 to the test
    return state | {"extra": json.dumps({k: str(v) for k, v in module.odd.extra.items()})}


def test_every_dtype_tie_view_and_extra_state_comes_back(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(2, train_odd, path, None)[0]
    assert expected["extra"].startswith('{"steps"')
    for found in run_ranks(3, train_odd, None, path):
        assert tiny.differences(expected, found) == []
    root = json.loads((tmp_path / "a.ckpt" / "checkpoint.index.json").read_text())
    aliases = root["components"]["model"]["aliases"]
    assert set(aliases) | set(aliases.values()) == {"head.weight", "odd.tied", "odd.weight"} and len(aliases) == 2
    stored = [key for file in Path(path).glob("model-*.safetensors") for key in load_file(file)]
    assert not set(stored) & set(aliases)


class NoFullTensor(TorchDispatchMode):
    """Notes the bytes of the largest plain tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                nbytes = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())  # a stand-in
                self.largest = max(self.largest, nbytes)
        return result


class Wide(tiny.TinyLM):
    def _build(self) -> None:
        super()._build()
        self.wide = nn.Linear(1000, 64, bias=False)


def save_and_load_watched(path: str, strategy: dict[str, Any], use_async: bool) -> tuple[int, int, int]:
    def gathering(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a DTensor was gathered")

    io = ShardCkptIO(use_async=use_async)
    run = tiny.train(module := Wide(), strategy, 1, plugins=[io])
    checkpoint = run._checkpoint_connector.dump_checkpoint()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("full_tensor", "redistribute"):
            patch.setattr(DTensor, name, gathering)
        with NoFullTensor() as saving:
            run.strategy.save_checkpoint(checkpoint, path)
            io.wait()
        with NoFullTensor() as loading:
            run.strategy.load_checkpoint(path)
    return saving.largest, loading.largest, module.wide.weight.numel() * module.wide.weight.element_size()


WATCHED: dict[str, tuple[dict[str, Any], bool, int]] = {
    "fsdp": ({}, False, 4),
    "tensor": (TP2, False, 2),
    "pipeline": ({"pipeline_parallel_size": 2}, True, 2),
}
"""Strategy, whether it is an asynchronous save, and how many parts a tensor has."""


def test_no_rank_holds_a_full_tensor_while_saving_or_loading(tmp_path: Path) -> None:
    calls = {
        name: (4, save_and_load_watched, str(tmp_path / name), strategy, use_async)
        for name, (strategy, use_async, _) in WATCHED.items()
    }
    for name, ranks in run_each(calls).items():
        for saving, loading, full in ranks:
            assert max(saving, loading) <= full // WATCHED[name][2], name


@pytest.mark.slow
def test_ranks_write_balanced_shares_and_split_files_and_the_next_save_leaves_none(tmp_path: Path) -> None:
    ways = {"sharded": {}, "replicas": {"data_parallel_replicate_size": 4}}
    run_each({name: (4, save_wide, strategy, str(tmp_path / name)) for name, strategy in ways.items()})
    for path in (tmp_path / name for name in ways):
        sizes = [sum(f.stat().st_size for f in path.glob(f"*-dist-{rank:05d}-shard-*")) for rank in range(4)]
        assert max(sizes) <= 1.3 * min(sizes)
        assert max(sizes) <= 1.2 * sum(sizes) / 4
        assert len(list(path.glob("model-dist-00000-shard-*"))) > 1  # 0.05 MB each
    run_ranks(2, save_wide, {}, str(path))
    assert not list(path.glob("*-dist-00002*")) and sorted(p.name for p in tmp_path.iterdir()) == sorted(ways)
    moved = tmp_path / "elsewhere" / "b"
    moved.parent.mkdir()
    path.rename(moved)
    assert load_full(str(moved))["global_step"] == 1


def save_wide(strategy: Any, path: str) -> None:
    tiny.train(Wide(), strategy, 1, save=path, plugins=[ShardCkptIO(size_per_shard=0.05)])


def wrapped(compiled: bool, recomputed: bool) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    net[1] = checkpoint_wrapper(net[1]) if recomputed else net[1]
    net[0] = torch.compile(net[0], backend="eager") if compiled else net[0]
    return nn.ModuleDict({"net": torch.compile(net, backend="eager") if compiled else net})


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    for number, source in enumerate(wrapped(*ways) for ways in itertools.product((False, True), repeat=2)):
        save(path := tmp_path / str(number), {"model": source})
        assert sorted(metadata(path).tensors) == ["net.0.bias", "net.0.weight", "net.1.bias", "net.1.weight"]
        for other in (wrapped(*ways) for ways in itertools.product((False, True), repeat=2)):
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            load(path, {"model": other})
            pairs = zip(source.state_dict().values(), other.state_dict().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "trees"), [(1, 200), (3, 40)])
def test_every_tree_comes_back_equal_or_is_refused(world: int, trees: int, tmp_path: Path) -> None:
    """``python -m tests.sweeps.state_trees`` tries many more."""
    numbers = list(range(trees))
    found = run_ranks(world, state_trees.run, numbers, str(tmp_path), init_process_group=world > 1, timeout_s=200)
    assert all(rank == found[0] for rank in found)
    assert found[0]["equal"] > trees // 2 and found[0]["refused"] > 0
    assert found[0].total() == trees
