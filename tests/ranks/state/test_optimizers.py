"""Optimizer state survives save and load whatever the optimizer and its groups. Oracle: the state before the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_shardckpt as ckpt
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.optimizer import optimizer_state
from tests.support import tiny
from tests.support.pool import run_ranks


class Groups(tiny.TinyLM):
    """Uneven groups, an empty one, a parameter without gradient, two optimizers, hyper-parameters of odd types."""

    def __init__(self) -> None:
        super().__init__(frozen=False)
        self.automatic_optimization = False
        self.unused = nn.Parameter(torch.randn(5, 3))

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW(
            [
                {"params": [self.unused, *self.blocks.parameters()], "lr": 3e-3, "note": ("any", {"thing": 1})},
                {"params": [], "lr": 7.0},
                {"params": [self.gate], "betas": (0.5, 0.6)},
            ],
            lr=1e-2,
        )
        rest = [*self.embed.parameters(), *self.head.parameters(), self.scale]
        return [body, torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    def training_step(self, batch: Any, index: int) -> None:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


def train_groups(steps: int, save: str | None, resume: str | None) -> dict[str, Any]:
    pl.seed_everything(4 if resume is None else 5)
    run = tiny.trainer({}, max_steps=steps, limit_val_batches=0)
    run.fit(module := Groups(), tiny.loader(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return tiny.full_state(module, run.optimizers)


def test_two_optimizers_with_uneven_and_empty_groups(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(3, train_groups, 4, path, None)[0]  # Lightning counts a step per optimizer
    assert not any("unused/state" in key for key in expected)
    for found in run_ranks(2, train_groups, 4, None, path):
        assert tiny.differences(expected, found) == []


def save_before_the_first_step(path: str, optimizer: str) -> dict[str, Any]:
    run = tiny.trainer({}, max_steps=0, limit_val_batches=0)
    pl.seed_everything(4)
    run.fit(module := tiny.TinyLM(optimizer), tiny.loader())
    run.save_checkpoint(path)
    return tiny.full_state(module, run.optimizers)


def test_saving_before_the_first_step_takes_no_step(tmp_path: Path) -> None:
    for found in run_ranks(2, save_before_the_first_step, str(tmp_path / "a.ckpt"), "adamw"):
        assert found and not any("/state/" in key for key in found)


class Unfrozen(tiny.TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def train_unfrozen(frozen: bool, strict: bool, save: str | None, resume: str | None) -> dict[str, Any]:
    pl.seed_everything(4)
    run = tiny.trainer({}, max_steps=2, limit_val_batches=0)
    module = Unfrozen(frozen=frozen)
    module.strict_loading = strict
    with pytest.warns(UserWarning, match="blocks.0.up.weight") if resume and run.is_global_zero else _nothing():
        run.fit(module, tiny.loader(), ckpt_path=resume)
    if save:
        run.save_checkpoint(save)
    return tiny.full_state(module, run.optimizers)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_changed_set_of_trainable_parameters(tmp_path: Path) -> None:
    """Without strict loading, what was trained before keeps its state, and what is new begins without one."""
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(2, train_unfrozen, True, True, path, None)[0]
    for found in run_ranks(3, train_unfrozen, False, False, None, path):
        kept = {k: v for k, v in found.items() if "blocks.0.up" not in k or k.startswith("model/")}
        assert tiny.differences(expected, kept) == []
        assert not any("blocks.0.up" in k and "/state/" in k for k in found)


class Adafactored(tiny.TinyLM):
    """torch's Adafactor keeps a row and a column per matrix; it does not run on DTensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def train_adafactor(steps: int, save: str | None, resume: str | None) -> dict[str, Any]:
    pl.seed_everything(4 if resume is None else 5)
    run = tiny.trainer("ddp", max_steps=steps, limit_val_batches=0)
    run.fit(module := Adafactored(frozen=False), tiny.loader(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return tiny.full_state(module, run.optimizers)


def test_state_that_is_not_shaped_like_its_parameter(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(2, train_adafactor, 2, path, None)[0]
    assert any(k.endswith("state/row_var") for k in expected)
    for found in run_ranks(2, train_adafactor, 2, None, path):
        assert tiny.differences(expected, found) == []


def reload_into_live_state(path: str) -> None:
    ranks = Ranks.of_default_group(60)
    model = nn.Sequential(*(nn.Linear(5, 7) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks.world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    io = ShardCkptIO()
    io.attach(ranks, model, {})

    def stepped() -> dict[str, torch.Tensor]:
        """The local moments after a step."""
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().normal_()
        optimizer.step()
        found = {f"{names[id(p)]}.{k}": v for p, values in optimizer.state.items() for k, v in values.items()}
        return {name: value.to_local() for name, value in found.items() if value.ndim}

    saved = {name: local.clone() for name, local in stepped().items()}
    io.save_checkpoint(
        {"state_dict": model.state_dict(), "optimizer_states": [optimizer_state(optimizer, names)]}, path
    )
    live = stepped()
    gone, shared, turned, double = (layer.weight for layer in model)
    del optimizer.state[gone]
    optimizer.state[shared]["exp_avg_sq"] = optimizer.state[shared]["exp_avg"]
    columns_first = torch.empty(5, len(turned.to_local())).t()
    about = {"shape": turned.shape, "stride": turned.stride()}
    optimizer.state[turned]["exp_avg"] = DTensor.from_local(
        columns_first, turned.device_mesh, turned.placements, **about
    )
    optimizer.state[double]["exp_avg"] = optimizer.state[double]["exp_avg"].double()
    anew = {f"{i}.weight.{name}" for i in (0, 1) for name in ("exp_avg", "exp_avg_sq")}
    anew |= {"2.weight.exp_avg", "3.weight.exp_avg"}

    io.load_into(path, LoadTargets.of_module(model, model.state_dict(), io.names, [optimizer]), strict=True)
    for parameter, values in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            name, found = f"{names[id(parameter)]}.{key}", values[key].to_local()
            assert torch.equal(found, saved[name]) and found.dtype == torch.float32, name
            assert (found.data_ptr() == live[name].data_ptr()) == (name not in anew), name


def test_optimizer_state_that_is_there_is_filled_where_it_is(tmp_path: Path) -> None:
    """What is not there, cannot take the stored state or is shared gets memory of its own."""
    run_ranks(2, reload_into_live_state, str(tmp_path / "a.ckpt"))


class Halves(nn.Module):
    """Two layers whose weights are one parameter, or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight


def test_what_was_tied_and_is_not_any_more_has_state_of_its_own(tmp_path: Path) -> None:
    path, saved, found = str(tmp_path / "a.ckpt"), Halves(tied=True), Halves(tied=False)
    before, after = torch.optim.AdamW(saved.parameters()), torch.optim.AdamW(found.parameters())
    for _ in range(3):
        saved.second(saved.first(torch.ones(2, 4))).sum().backward()
        before.step()
    names = {id(parameter): name for name, parameter in saved.named_parameters()}
    checkpoint = {"state_dict": saved.state_dict(), "optimizer_states": [optimizer_state(before, names)]}
    io = ShardCkptIO()
    io.attach(Ranks.alone(), saved, {})
    io.save_checkpoint(checkpoint, path)
    io.attach(Ranks.alone(), found, {})
    for _ in range(2):  # into new memory, then into what is there
        io.load_into(path, LoadTargets.of_module(found, found.state_dict(), io.names, [after]), strict=True)
        first, second = (after.state[layer.weight] for layer in (found.first, found.second))
        for key, value in before.state[saved.first.weight].items():
            assert torch.equal(first[key], value) and torch.equal(second[key], value)
            assert first[key].data_ptr() != second[key].data_ptr(), key
        found.second(found.first(torch.ones(2, 4))).sum().backward()
        after.step()
        assert first["step"] == second["step"] == 4


class Sliced(torch.optim.SGD):
    """Keeps every third element of each parameter, as Prodigy does with ``slice_p=3``: one, of a bias of three."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slice"] = parameter.detach().flatten()[::3]
        return loss


def keep_slices(path: str) -> bool:
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    optimizer = Sliced(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[module.bias]["slice"].stride() == (3,)
    ckpt.save(path, {"model": module, "optimizer": optimizer})
    twin = nn.Linear(3, 3)
    loaded = Sliced(twin.parameters(), lr=0.1)
    ckpt.load(path, {"model": twin, "optimizer": loaded})
    return all(
        torch.equal(loaded.state[there]["slice"], here.detach().flatten()[::3])
        for here, there in zip(module.parameters(), twin.parameters(), strict=True)
    )


def test_state_of_one_element_is_saved_whatever_its_stride(tmp_path: Path) -> None:
    assert run_ranks(2, keep_slices, str(tmp_path / "a.ckpt")) == [True, True]
