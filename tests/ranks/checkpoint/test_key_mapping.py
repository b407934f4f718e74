"""A ckpt_path under other names. Oracles: the run that goes on without a mapping, and values kept by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from lightning_shardckpt import Pipeline, ShardCkptIO
from lightning_shardckpt.errors import MismatchError, StateError
from tests.support import tiny
from tests.support.pool import run_ranks

TP2: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}
TP2_RENAMED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "tensor_parallel_plan": {key.replace("blocks", "layers"): plan for key, plan in tiny.TP_PLAN.items()},
}


PP2: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "pipeline": Pipeline(layers=["layers"], modules={"head": "last"}),
}


class Renamed(tiny.TinyLM):
    """The same model, whose blocks are ``layers`` and whose gate is the ``sieve``."""

    def _build(self) -> None:
        super()._build()
        self.layers, self.sieve = self.blocks, self.gate
        del self.blocks, self.gate

    def __getattr__(self, name: str) -> Any:
        other, own = {"blocks": "layers", "gate": "sieve"}.get(name, name), self.__dict__
        return super().__getattr__(other if other in {**own["_modules"], **own["_parameters"]} else name)

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        for group in found["optimizer"].param_groups:
            group["params"] = [*reversed(group["params"])]  # the mapping goes by name
        return found


def renamed(name: str) -> str:
    return name.replace("blocks.", "layers.").replace("gate", "sieve")


class Look(pl.Callback):
    """Keeps the tensors that this rank has when training starts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.found = {f"model/{name}": tiny.whole(value) for name, value in pl_module.state_dict().items()}


def other_names(path: str) -> list[str]:
    expected = tiny.fit({}, 4, callbacks=[tiny.SaveAt(2, path)])["state"]
    alone = tiny.TinyLM()
    tiny.trainer(TP2).validate(alone, tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
    stored = {renamed(key): value for key, value in tiny.full_state(alone, []).items()}
    differing = []
    for way, strategy in {"fsdp": {}, "tp": TP2_RENAMED, "pp": PP2}.items():
        pl.seed_everything(7)
        module, look = Renamed(), Look()
        io = ShardCkptIO(key_mapping=renamed if way == "tp" else {r"^blocks\.": "layers.", "gate": "sieve"})
        run = tiny.trainer(strategy, max_steps=4, limit_val_batches=0, plugins=[io], callbacks=[look])
        run.fit(module, tiny.loader(2 if way == "fsdp" else 4), ckpt_path=path)  # of 4 samples on all ranks
        assert len(module.losses) == 2 and len(look.found) > 5
        differing += tiny.differences(look.found, {key: stored[key] for key in look.found})
        if way == "fsdp":
            wanted = {renamed(key): value for key, value in expected.items()}
            differing += tiny.differences(tiny.full_state(module, run.optimizers), wanted)
    return differing


def test_a_run_continues_under_other_names_on_any_topology(tmp_path: Path) -> None:
    assert run_ranks(2, other_names, str(tmp_path / "a.ckpt")) == [[], []]


def new_head(path: str) -> tuple[list[str], list[float]]:
    """Another head of the same shape, so that nothing but the mapping tells it from the old one."""
    stored = tiny.fit({}, 2, save=path)["state"]
    pl.seed_everything(7)
    module, look = tiny.TinyLM(), Look()
    module.strict_loading = False
    first = {name: tiny.whole(value) for name, value in module.state_dict().items() if "head." in name}
    io = ShardCkptIO(key_mapping={r"^head\.": None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which names the head
        run = tiny.train(module, {}, 3, resume=path, callbacks=[look], plugins=[io])
    expected = {key: value for key, value in stored.items() if key.startswith("model/")}
    expected |= {f"model/{name}": value for name, value in first.items()}
    heads = [p for name, p in module.named_parameters() if "head." in name]
    steps = [run.optimizers[0].state[p]["step"].item() for p in heads]  # one after the resume
    return tiny.differences(look.found, expected), steps


def test_a_new_head_keeps_its_values_and_gets_no_optimizer_state_of_the_old_one(tmp_path: Path) -> None:
    assert run_ranks(2, new_head, str(tmp_path / "a.ckpt")) == [([], [1.0, 1.0])] * 2


def of(state: dict[str, Any]) -> dict[str, Tensor]:
    return tiny.full_state(state["model"], [state["optimizer"]])


def wrong(path: str) -> list[str]:
    tiny.fit({}, 1, save=path)
    errors = []
    for strategy, mapping in (({}, {"haed.weight": None}), ({}, {"lm.weight": "head.weight"}), ("auto", {"^a": "b"})):
        run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0, plugins=[ShardCkptIO(key_mapping=mapping)])
        with pytest.raises((MismatchError, StateError)) as error:
            run.fit(tiny.TinyLM(), tiny.loader(), ckpt_path=path)
        errors.append(str(error.value))
    return errors


def test_mistakes_are_named(tmp_path: Path) -> None:
    ((unused, turned, other),) = run_ranks(1, wrong, str(tmp_path / "a.ckpt"))
    assert "key_mapping: 'haed.weight'  matches no name in the checkpoint" in unused
    assert "key_mapping: 'lm.weight'  matches no name in the checkpoint" in turned
    assert "key_mapping=…) is for ShardedStrategy" in other
