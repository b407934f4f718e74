"""Modules that have several names, and layers of several classes, over two stages: as in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn

import lightning_shardckpt
from tests.support.nets import full_state
from tests.support.pool import run_ranks
from tests.support.tiny import trainer
from tests.system.test_pipeline_traps import TOLERANCE, WIDTH, Layer, Plain

pytestmark = pytest.mark.slow


class TwiceAfter(Plain):
    """As N-BEATS has it."""

    def build(self) -> None:
        self.forecast = self.backcast = nn.Linear(WIDTH, WIDTH)

    def trunk(self, x: Any) -> Any:
        return self.backcast(self.forecast(super().trunk(x)))


class TwiceBefore(Plain):
    def build(self) -> None:
        layers, head = self.layers, self.head
        del self.layers, self.head
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.layers, self.head = layers, head

    def trunk(self, x: Any) -> Any:
        return super().trunk(self.second(self.first(x)))


class OnBothSides(TwiceBefore):
    def build(self) -> None:
        super().build()
        self.third = self.first

    def trunk(self, x: Any) -> Any:
        return self.third(super().trunk(x))


class OfTheList(Plain):
    def build(self) -> None:
        self.blocks = self.layers

    def trunk(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Trunk(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class OfAll(Plain):
    """Of the network, of its list, of layers and of parts of these."""

    def build(self) -> None:
        head = self.head
        del self.head
        self.net = Trunk(self.layers)
        del self.layers
        self.backbone, self.blocks, self.head = self.net, self.net.layers, head
        self.first, self.last = self.blocks[0], self.blocks[3]
        self.first_norm, self.last_linear = self.blocks[0].norm, self.blocks[3].down

    def trunk(self, x: Any) -> Any:
        return self.backbone(x)


class Steps(Plain):
    """Layers that are attributes, too, and registered as such first."""

    def build(self) -> None:
        head, (self.one, self.two, self.three, self.four) = self.head, self.layers
        del self.layers, self.head
        self.layers = nn.Sequential(self.one, self.two, nn.Tanh(), self.three, self.four)
        self.head = head


class PartsInCommon(Plain):
    """One norm in the layers of both stages, one linear in two modules after them."""

    def build(self) -> None:
        for layer in self.layers:
            layer.norm = self.layers[0].norm
        last = nn.Linear(WIDTH, WIDTH)
        self.heads, self.rest = nn.ModuleDict({"a": last, "b": last}), nn.Sequential(last, nn.Tanh(), last)

    def trunk(self, x: Any) -> Any:
        return self.rest(self.heads["a"](self.heads["b"](super().trunk(x))))


class Gated(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(x)


class Hybrid(Plain):
    def build(self) -> None:
        self.layers = nn.ModuleList(kind() for kind in (Layer, Gated, Layer, Gated))


KINDS = {
    kind.__name__: kind
    for kind in (TwiceAfter, TwiceBefore, OnBothSides, OfTheList, OfAll, Steps, PartsInCommon, Hybrid)
}


def train_all(strategy: dict[str, Any] | str, folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, kind in KINDS.items():
        pl.seed_everything(3, verbose=False)
        module = kind()
        run = trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False)
        with warnings.catch_warnings(action="ignore", category=PossibleUserWarning):  # of metrics without sync_dist
            run.fit(module)
        run.save_checkpoint(f"{folder}/{name}")
        found[name] = full_state(module)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    alone, folder = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("stages")
    (expected,) = run_ranks(1, train_all, "auto", str(alone), init_process_group=False)
    return folder, expected, run_ranks(2, train_all, {"pipeline_parallel_size": 2}, str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_names_change_nothing_over_two_stages(kind: str, trained: Any) -> None:
    folder, expected, ranks = trained
    state = {name: value for rank in ranks for name, value in rank[kind].items()}
    for rank in ranks:
        assert [name for name, value in rank[kind].items() if not torch.equal(value, state[name])] == []
    torch.testing.assert_close(state, expected[kind], rtol=0, atol=TOLERANCE)
    module = KINDS[kind]().double()
    lightning_shardckpt.load(folder / kind, {"model": module, "optimizer": module.configure_optimizers()})
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
