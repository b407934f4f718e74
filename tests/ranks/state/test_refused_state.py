"""State that no checkpoint holds is refused by name, at the save, and at the load into it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import StateError
from tests.support import tiny
from tests.support.pool import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def two() -> Any:
    return TwoTensor(torch.ones(2, 2), torch.ones(2, 2))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "made of others": (two, r"a torch\.testing.*TwoTensor is made of other tensors"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "(N|n)ested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8"),
    "on no device": (lambda: torch.ones(3, device="meta"), "meta device"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_cannot_be_stored_is_refused_by_name_wherever_it_is(kind: str, tmp_path: Path) -> None:
    build, said = REFUSED[kind]
    (module := nn.Linear(2, 2)).register_buffer("odd", build())
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters())
    optimizer.state[plain.weight]["odd"] = build()
    for state in ({"odd": build()}, {"model": module}, {"model": plain, "optimizer": optimizer}):
        with pytest.raises(StateError, match=said) as caught:
            ckpt.save(tmp_path / "c", state)
        assert "odd" in str(caught.value)


def test_a_module_of_compound_tensors_is_refused_by_a_load_too(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    ckpt.save(tmp_path / "c", {"model": module})
    module.weight = nn.Parameter(two(), requires_grad=False)
    for state in ({"model": module}, {"model": dict(module.state_dict())}):
        with pytest.raises(StateError, match=r"model.weight: a .*TwoTensor is made of other tensors"):
            ckpt.load(tmp_path / "c", state)


# ── holders of torch besides DTensors, which tell nobody what they cut ──────────────────────────────────────────────


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def refuse(said: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(StateError, match=said):
        call(*args)


def try_fsdp1(path: str, original: bool) -> None:
    """Weights alone come back; with an optimizer, save and load are refused."""
    module, other = (
        FullyShardedDataParallel(net(seed), device_id=torch.device("cpu"), use_orig_params=original) for seed in (0, 1)
    )
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    ckpt.save(path, {"model": module})
    ckpt.load(path, {"model": other})
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    state, said = {"model": module, "optimizer": optimizer}, r"'model' has FullyShardedDataParallel .*fully_shard"
    refuse(said, ckpt.save, f"{path}-all", state)
    refuse(said, ckpt.load, path, state)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "use_orig_params"])
def test_optimizer_state_of_fsdp1_is_refused_and_its_weights_are_kept(original: bool, tmp_path: Path) -> None:
    run_ranks(2, try_fsdp1, str(tmp_path / "c"), original)


def try_zero(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import makes one
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class Zero(tiny.TinyLM):
        def configure_optimizers(self) -> Any:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.1)

    optimizer: Any = ZeroRedundancyOptimizer((module := net(0)).parameters(), torch.optim.AdamW, lr=0.1)
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"model": module, "optimizer": optimizer}
    refuse("'optimizer' is a ZeroRedundancyOptimizer", ckpt.save, path, state)
    refuse("'optimizer' is a ZeroRedundancyOptimizer", ckpt.load, path, state)
    run = tiny.train(Zero(), {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}, 1)
    refuse("the optimizer is a ZeroRedundancyOptimizer", run.save_checkpoint, path)


def test_a_zero_redundancy_optimizer_is_refused(tmp_path: Path) -> None:
    run_ranks(2, try_zero, str(tmp_path / "c"))


def test_a_loader_without_a_state_is_refused_by_name(tmp_path: Path) -> None:
    loader: Any = torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type]
    for call in (ckpt.save, ckpt.load):
        refuse("'data' is a DataLoader without a state dict", call, tmp_path / "c", {"data": loader})
    assert not (tmp_path / "c").exists()
