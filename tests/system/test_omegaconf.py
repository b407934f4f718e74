"""Hyper-parameters of OmegaConf, as Hydra gives them, come back as such. It is in the extra test."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shardckpt import load_from_checkpoint
from lightning_shardckpt.state.json_tree import decode_small, encode_small
from tests.support import tiny

omegaconf: Any = pytest.importorskip("omegaconf")


class Configured(BoringModel):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)


class WithConfig(BoringModel):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_containers_keep_interpolations_and_missing_values() -> None:
    made = omegaconf.OmegaConf.create({"a": {"b": [1, "${a.c}"], "c": 2}, "later": "???"})
    found = decode_small(encode_small(made, "x"))
    assert type(found) is type(made) and found == made and found.a.b[1] == 2
    assert omegaconf.OmegaConf.is_missing(found, "later")


class Phase(enum.Enum):
    WARMUP = 1


def test_members_of_an_enum_are_names_as_in_yaml() -> None:
    made = omegaconf.OmegaConf.create({"phase": Phase.WARMUP})
    found = decode_small(encode_small(made, "x"))
    assert found == omegaconf.OmegaConf.create(omegaconf.OmegaConf.to_yaml(made)) == {"phase": "WARMUP"}


@pytest.mark.parametrize("kind", [Configured, WithConfig])
def test_a_module_is_constructed_with_its_config(kind: Any, tmp_path: Path) -> None:
    cfg = omegaconf.OmegaConf.create({"net": {"sizes": [1, 2]}, "lr": 0.1})
    run = tiny.trainer("auto", devices=1, max_steps=1, limit_val_batches=0)
    run.fit(module := kind(cfg))
    run.save_checkpoint(tmp_path / "a.ckpt")
    found = load_from_checkpoint(kind, tmp_path / "a.ckpt")
    assert found.hparams == module.hparams and type(found.hparams) is type(module.hparams)
    config = found.hparams if kind is Configured else found.hparams.cfg
    assert type(config) is type(cfg) and config.net.sizes == [1, 2]
