"""Which stored tensor is which, through every door. Oracles: the state before the save, and torch's own files."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt import load, save
from lightning_shardckpt.errors import MismatchError
from tests.support import tiny
from tests.support.fabrics import fabric_of
from tests.support.pool import run_each
from tests.support.whole_state import differing, whole

State = dict[str, Any]


class Tied(pl.LightningModule):
    """The input and output embeddings are one tensor; which one is registered first is to be of no consequence."""

    def __init__(self, first: str = "wte") -> None:
        super().__init__()
        for name in ("wte", "lm_head") if first == "wte" else ("lm_head", "wte"):
            self.add_module(name, nn.Embedding(7, 4) if name == "wte" else nn.Linear(4, 7, bias=False))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.lm_head(x)

    def training_step(self, batch: Any, index: int = 0) -> Tensor:
        tokens = batch[0] % 7 if isinstance(batch, list | tuple) else batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, -2), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def tied(first: str, seed: int, steps: int = 2, fabric: Any = None) -> State:
    torch.manual_seed(seed)
    model: Any = Tied(first)
    optimizer = model.configure_optimizers()
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        model.mark_forward_method("training_step")
    for _ in range(steps):
        loss = model.training_step(torch.arange(6))
        fabric.backward(loss) if fabric is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def of_names(state: State) -> State:
    """Whole tensors and the optimizer's state by any order of registration: by layer, and the tied weight's."""
    module = getattr(state["model"], "module", state["model"])
    optimizer = getattr(state["optimizer"], "optimizer", state["optimizer"])
    parameters = {"tied": module.wte.weight, **{f"layers.{k}": p for k, p in module.layers.named_parameters()}}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    values = {name: [whole(p), whole(dict(optimizer.state[p]))] for name, p in parameters.items()}
    return {"parameters": values, "groups": groups}


# ── ties ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_tied(folder: str) -> None:
    """Functions and Fabric, in both orders."""
    fabric = fabric_of("32-true")
    for before, now in (("wte", "lm_head"), ("lm_head", "wte")):
        saved = tied(before, 1, fabric=fabric)
        expected, path = of_names(saved), f"{folder}/{before}-{now}"
        save(path, saved)
        fabric.save(path + "-fabric", saved)
        for number, door in enumerate((load, load, lambda path, state: fabric.load(path + "-fabric", state))):
            state = tied(now, 2, steps=number % 2, fabric=fabric)
            door(path, state)
            assert differing(of_names(state), expected) == []
        lone = tied(now, 4, steps=0, fabric=fabric)
        fabric.load(path, {"optimizer": lone["optimizer"]})
        load(path, {"model": lone["model"]})
        assert differing(of_names(lone), expected) == []


def of_a_trainer(folder: str) -> None:
    for name, strategy in (("sharded", {}), ("file", "ddp")):
        path = f"{folder}/{name}"
        run = tiny.train(module := Tied(), strategy, 2, save=path)
        expected = of_names({"model": module, "optimizer": run.optimizers[0]})
        for first in ("wte", "lm_head"):
            state = tied(first, 3, steps=0)
            load(path, {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]})
            assert differing(of_names(state), expected) == []
        again = tiny.trainer({}, max_steps=3)
        with pytest.raises(MismatchError, match=r"optimizer 0  is of another class .* SGD has dampening, momentum"):
            again.fit(OfSgd(), tiny.loader(), ckpt_path=path)
        assert again.global_step == 0


class OfSgd(Tied):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_tie_whose_optimizer_state_was_stored_apart_is_refused_by_name(tmp_path: Path) -> None:
    apart = tied("wte", 1)
    model, optimizer = apart["model"], apart["optimizer"]
    own = nn.Parameter(model.wte.weight.detach().clone())
    optimizer.state[own] = deepcopy(optimizer.state[model.wte.weight])
    optimizer.add_param_group({"params": [own]})
    model.lm_head.weight = own
    save(tmp_path / "apart", apart)
    with pytest.raises(MismatchError, match=r"tied to \w+\.weight in the model, with state of its own in the checkp"):
        load(tmp_path / "apart", tied("lm_head", 2, steps=0))
    load(tmp_path / "apart", {"model": tied("lm_head", 2, steps=0)["model"]})


# ── optimizers of other classes ───────────────────────────────────────────────────────────────────────────────────


def test_settings_of_an_optimizer_of_another_class_are_not_taken(tmp_path: Path) -> None:
    saved = tied("wte", 1)
    save(tmp_path / "a", saved)
    model = tied("wte", 2, steps=0)["model"]
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    before = whole(state)
    told = r"1 difference\n  optimizer 0  is of another class .* amsgrad.* SGD has"
    with pytest.raises(MismatchError, match=told):
        load(tmp_path / "a", state)
    assert differing(whole(state), before) == []
    with pytest.warns(UserWarning, match="left as they are: 1 difference"):
        load(tmp_path / "a", state, strict=False)
    assert differing(whole(state), {"model": whole(saved["model"]), "optimizer": before["optimizer"]}) == []


def test_an_optimizer_of_another_version_of_torch_goes_on(tmp_path: Path) -> None:
    """Settings that torch added, and of the user, make no other class of it."""
    saved = tied("wte", 1)
    expected = whole(saved["optimizer"])
    group = saved["optimizer"].param_groups[0]
    del group["decoupled_weight_decay"], group["fused"]
    group["named"] = "all"
    save(tmp_path / "a", saved)
    stored = {k: v for k, v in whole(saved["optimizer"])["param_groups"][0].items() if k != "params"}
    state = tied("wte", 2, steps=0)
    with pytest.warns(UserWarning, match=r"kept as configured: \['fused', 'decoupled_weight_decay'\]"):
        load(tmp_path / "a", state)
    found = whole(state["optimizer"])
    assert {k: found["param_groups"][0][k] for k in stored} == stored
    assert differing(found["state"], expected["state"]) == []


# ── state dicts and objects ───────────────────────────────────────────────────────────────────────────────────────


def as_dicts(state: State) -> State:
    return {key: value.state_dict() for key, value in state.items()}


def state_dicts(folder: str) -> None:
    """A state dict and a module load into a state dict, and a state dict into no object."""
    fabric = fabric_of("32-true")
    state, other = tied("wte", 1, fabric=fabric), tied("wte", 2, fabric=fabric)
    dicts, expected = as_dicts(other), whole(as_dicts(state))
    save(f"{folder}/dicts", {**as_dicts(state), "step": 2})
    assert load(f"{folder}/dicts", dicts) == {"step": 2}
    assert differing(whole(dicts), expected) == []
    save(f"{folder}/alone", state["model"].state_dict())
    load(f"{folder}/alone", found := tied("wte", 3, fabric=fabric)["model"].state_dict())
    assert differing(whole(found), expected["model"]) == []
    save(f"{folder}/objects", objects := {key: getattr(value, "optimizer", value) for key, value in state.items()})
    load(f"{folder}/objects", {"model": dicts["model"]})
    assert differing(whole(dicts["model"]), expected["model"]) == []
    before = whole(objects)
    with pytest.raises(MismatchError, match=r"not have modules 'model', optimizers .* it has values 'model'"):
        load(f"{folder}/dicts", objects)
    assert differing(whole(objects), before) == []


def test_stored_tensors_are_found_by_their_names_on_two_ranks(tmp_path: Path) -> None:
    """Each function asserts what it loads, in a folder of its own."""
    functions = (load_tied, of_a_trainer, state_dicts)
    for fn in functions:
        (tmp_path / fn.__name__).mkdir()
    run_each({fn.__name__: (2, fn, str(tmp_path / fn.__name__)) for fn in functions})
