"""Directories that OLMo-core itself wrote are read. Oracle: the live objects, put down beside when they were saved.

``golden/olmo-core-3.0.zip`` was made once, by ``golden/make_olmo_core.py``, and is never made again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_shardckpt import load
from tests.support import tiny
from tests.support.pool import ROOT, run_ranks

PACKED = ROOT / "tests" / "golden" / "olmo-core-3.0.zip"
MADE = "3c689a1fc8869872279c4b2e75c45e73f10ef250e30bb4bee4e5af3886bd81b7"
LAYOUTS = ["step2", "step2-flat", "step2/model_and_optim"]
Tensors = dict[str, Tensor]


class Net(pl.LightningModule):
    """As ``golden/make_olmo_core.py`` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(self, 0.0), lr=7.0)


def groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    named = dict(net.named_parameters())
    bias = named.pop("head.bias")
    return [{"params": [bias], "weight_decay": decay}, {"params": [*named.values()]}]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert hashlib.sha256(PACKED.read_bytes()).hexdigest() == MADE
    folder = tmp_path_factory.mktemp("olmo")
    with zipfile.ZipFile(PACKED) as archive:
        archive.extractall(folder)
    return folder


def expected(golden: Path) -> tuple[Tensors, Tensors, list[dict[str, Any]]]:
    """The model's tensors, those of the optimizer as <parameter>/<state>, and its param groups."""
    found = safetensors.torch.load_file(golden / "expected.safetensors")
    model, optimizer = (
        {name.removeprefix(kind): tensor for name, tensor in found.items() if name.startswith(kind)}
        for kind in ("model/", "optimizer/")
    )
    return model, optimizer, json.loads((golden / "expected.json").read_text())


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def flat(state: dict[str, dict[str, Tensor]]) -> Tensors:
    return {f"{name}/{key}": value for name, entry in state.items() for key, value in entry.items()}


def live(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, Tensors]:
    """Whole tensors of both, as in ``expected``."""
    names = {id(param): name for name, param in net.named_parameters()}
    state = {names[id(param)]: entry for param, entry in optimizer.state.items()}
    model, found = {k: v.detach() for k, v in net.state_dict().items()}, flat(state)
    return tuple({k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in t.items()} for t in (model, found))


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_of_it_is_returned(golden: Path, name: str) -> None:
    model, optimizer, settings = expected(golden)
    found = load(golden / name)
    (state,) = found["optimizer_states"]
    assert same(found["state_dict"], model) and same(flat(state["state"]), optimizer)
    as_text = [sorted(json.dumps(g, sort_keys=True) for g in groups) for groups in (state["param_groups"], settings)]
    assert as_text[0] == as_text[1]


def begin(path: str, strategy: dict[str, Any]) -> tuple[Tensors, Tensors]:
    """Start a Trainer's run from it, before the first step."""
    net, trainer = Net(), tiny.trainer(strategy, max_steps=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not of Lightning's Trainer")
        trainer.fit(net, DataLoader(list(range(4)), batch_size=2), ckpt_path=path)
    return live(net, trainer.optimizers[0])


@pytest.mark.parametrize(("name", "world"), [("step2-flat", 2), ("step2", 3)])
def test_a_trainers_run_begins_with_it_on_any_number_of_ranks(golden: Path, name: str, world: int) -> None:
    model, optimizer, _ = expected(golden)
    for found, states in run_ranks(world, begin, str(golden / name), {}):
        assert same(found, model) and same(states, optimizer)
