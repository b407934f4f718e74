"""What the Trainer and Fabric keep to themselves still means what we take it for."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import SumMetric

from lightning_shardckpt.compat import lightning_runs as compat
from lightning_shardckpt.compat.torch_modules import fabric_original, loader_of_fabric, replace_attributes
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support.boring import Asks, trainer
from tests.support.pool import run_ranks


@pytest.mark.parametrize("asked", [True, False])
def test_a_strategy_knows_whether_batch_norms_are_to_be_synchronized(asked: bool) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="ddp", sync_batchnorm=asked, logger=False)
    assert isinstance(trainer.strategy, ParallelStrategy)
    assert compat.syncs_batch_norms(trainer.strategy) is asked


@pytest.mark.parametrize("sampler", [None, [3, 1, 2, 0], RandomSampler(range(4))])
def test_lightning_shuffles_in_training_only_what_is_shuffled(sampler: Any) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="ddp", logger=False)
    loader: DataLoader[Any] = DataLoader(range(4), sampler=sampler)  # type: ignore[arg-type]  # a list is one
    of_lightning: Any = trainer._data_connector._prepare_dataloader(loader, True, RunningStage.TRAINING)
    undo = compat.keep_order_of_training(trainer)
    kept: Any = trainer._data_connector._prepare_dataloader(loader, True, RunningStage.TRAINING)
    undo()
    assert "_prepare_dataloader" not in vars(trainer._data_connector)
    assert of_lightning.sampler.shuffle and kept.sampler.shuffle is isinstance(sampler, RandomSampler)
    assert list(kept.sampler) == (sampler if isinstance(sampler, list) else list(kept.sampler))


def test_a_random_sampler_shuffles_also_beside_an_argument_that_says_no() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="ddp", logger=False)
    compat.keep_order_of_training(trainer)
    with _replace_dunder_methods(DataLoader, "dataset"):  # as within train_dataloader
        loader: DataLoader[Any] = DataLoader(range(4), shuffle=False, sampler=RandomSampler(range(4)))  # type: ignore[arg-type]
    kept: Any = trainer._data_connector._prepare_dataloader(loader, True, RunningStage.TRAINING)
    assert kept.sampler.shuffle


@pytest.fixture
def saved(tmp_path: Path) -> str:
    run = trainer(tmp_path)
    run.fit(BoringModel())
    run.save_checkpoint(tmp_path / "a.ckpt")
    return str(tmp_path / "a.ckpt")


def test_the_path_of_a_run_is_resolved_before_lightning_chooses_and_its_choice_is_seen(
    tmp_path: Path, saved: str
) -> None:
    asked, kept = list[Any](), list[Any]()

    def choose(path: Any, select: Any) -> Any:
        asked.append(path)
        kept.append(select(saved if path == "last" else path))
        return kept[-1]

    for path, assigned in (("last", None), (None, saved), (None, None)):
        run = trainer(tmp_path, max_steps=2)
        if assigned is not None:
            run.ckpt_path = assigned
        undo = compat.intercept_ckpt_path(run, choose)
        run.test(BoringModel(), ckpt_path=path, verbose=False)
        undo()
    run.test(BoringModel(), verbose=False)
    assert (asked, kept) == (["last", None, None], [saved, saved, None])


def test_a_trainer_is_given_another_directory(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    compat.set_default_root_dir(run, str(tmp_path / "other"))
    assert run.default_root_dir == run.log_dir == str(tmp_path / "other")


def test_a_sigterm_ends_the_run_after_the_batch(tmp_path: Path) -> None:
    run = trainer(tmp_path, Asks("on_train_batch_start", compat.receive_sigterm), max_steps=5)
    with pytest.raises(SystemExit):
        run.fit(BoringModel())
    assert run.global_step == 1


def test_a_module_says_its_device_and_mesh() -> None:
    module = BoringModel()
    compat.set_device(module, torch.device("meta"))
    assert module.device == torch.device("meta") and module.layer.weight.device.type == "cpu"
    mesh = object.__new__(DeviceMesh)
    compat.set_device_mesh(module, mesh)
    assert module.device_mesh is mesh


def test_actions_run_in_a_context_that_is_told_of_hooks_and_callbacks_until_it_is_undone(tmp_path: Path) -> None:
    inside, step = list[bool](), list[list[bool]]()

    @contextmanager
    def around(is_hook: bool) -> Iterator[None]:
        inside.append(is_hook)
        yield
        inside.pop()

    class Sees(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step.append([*inside])
            return super().training_step(batch, batch_idx)

    callback = Asks("on_train_start", lambda run: [*inside])
    run = trainer(tmp_path, callback, max_steps=1)
    undo = compat.wrap_actions(run.profiler, around)
    run.fit(Sees())
    assert callback.found[0][-1] and not step[0][-1]  # which the strategy runs
    undo()
    run.fit_loop.epoch_loop.max_steps = 2
    run.fit(Sees())
    assert callback.found[1] == step[1] == []


def test_each_fit_and_its_arguments_are_seen_before_it_begins(tmp_path: Path) -> None:
    found: list[Any] = []
    undo = compat.intercept_fit(lambda run, arguments: found.append((run, [*arguments])))
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    try:
        run.fit(BoringModel())
    finally:
        undo()
    run.fit(BoringModel())
    assert found == [(run, ["self", "model"])]


def sums() -> list[float]:
    def total(metric: SumMetric) -> float:
        metric.reset()
        metric.update(float(dist.get_rank() + 1))
        return metric.compute().item()

    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    own = SumMetric(dist_sync_fn=lambda result, group=None: [result, result, result])
    module = torch.nn.ModuleDict({"sum": SumMetric(), "own": own})
    undo = compat.gather_metrics_over(halves[dist.get_rank() // 2], module)
    found = [*map(total, (module["sum"], copy.deepcopy(module["sum"]), module["own"], SumMetric()))]  # type: ignore[arg-type]
    undo_inner = compat.gather_metrics_over(dist.group.WORLD, torch.nn.ModuleDict())  # of a run inside of this
    found.append(total(SumMetric()))
    undo_inner()
    found.append(total(SumMetric()))
    undo()
    return [*found, total(module["sum"]), total(SumMetric())]  # type: ignore[arg-type]


def test_each_group_sums_its_own_values_until_the_undo() -> None:
    rest = [3, 6, 3, 3, 6]
    assert run_ranks(3, sums) == [[3, 3, 3, *rest], [3, 3, 6, *rest], [3, 3, 9, *rest]]


class WithSize(BoringModel):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_module_is_constructed_with_hyper_parameters_and_weights() -> None:
    weights = {"layer.weight": torch.full((2, 32), 3.0), "layer.bias": torch.zeros(2)}
    checkpoint = {"state_dict": weights, "hyper_parameters": {"size": 5}, "hparams_name": "kwargs"}
    found = compat.construct_module(WithSize, checkpoint, strict=True)
    assert found.hparams["size"] == 5 and torch.equal(found.layer.weight, weights["layer.weight"])
    with pytest.raises(RuntimeError, match=r"layer\.bias"):
        compat.construct_module(WithSize, {**checkpoint, "state_dict": {}}, strict=True)


def test_modules_and_callbacks_are_restored(tmp_path: Path, saved: str) -> None:
    stored = torch.load(saved, weights_only=True)["state_dict"]
    same = Asks("on_fit_start", lambda run: torch.equal(run.lightning_module.layer.weight, stored["layer.weight"]))

    def restore(run: pl.Trainer) -> None:
        run.strategy.model = run.lightning_module
        compat.restore_modules_and_callbacks(run, saved)

    trainer(tmp_path, Asks("setup", restore), same, max_steps=1).fit(BoringModel())
    assert same.found == [True]


def group_made(before: dict[str, str]) -> tuple[set[str], dict[str, str]]:
    names = ("MASTER_ADDR", "MASTER_PORT")
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)
    found = set()
    for _ in range(2):
        compat.init_process_group(LightningEnvironment(), torch.device("cpu"), timeout_s=30)
        found.add(f"{dist.get_backend()} {id(dist.group.WORLD)}")
    return found, {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("before", [{}, {"MASTER_ADDR": "127.0.0.1"}], ids=["nothing", "an address"])
def test_a_process_group_is_made_once_and_the_environment_of_a_process_alone_stays(before: dict[str, str]) -> None:
    ((groups, after),) = run_ranks(1, group_made, before, init_process_group=False)
    assert len(groups) == 1 and groups.pop().startswith("gloo") and after == before


def test_optimizer_state_moves_but_for_the_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    compat.optimizer_to_device(optimizer, torch.device("meta"))
    state = optimizer.state[weight]
    assert state["exp_avg"].device.type == "meta" and weight.device.type == "cpu"


class OwnBackward(SingleDeviceStrategy):
    """Fabric lets backward passes run anywhere under strategies that have no backward of their own."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        super().backward(*args, **kwargs)


def test_a_backward_is_allowed_only_within() -> None:
    model = Fabric(accelerator="cpu", devices=1, strategy=OwnBackward()).setup_module(torch.nn.Linear(2, 1))
    with compat.disable_backward_guard():
        assert compat.is_in_backward()
        model(torch.ones(1, 2)).sum().backward()
    assert not compat.is_in_backward()
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        model(torch.ones(1, 2)).sum().backward()


def test_fabric_is_what_it_was_when_the_last_strategy_is_gone() -> None:
    before, first, second = Fabric._setup_dataloader, ShardedStrategy(), ShardedStrategy()
    compat.keep_samplers_of(first)
    compat.keep_samplers_of(second)
    del first
    gc.collect()
    assert Fabric._setup_dataloader is not before
    del second
    gc.collect()
    assert Fabric._setup_dataloader is before


# ── attributes of Lightning's objects are where `compat.torch_modules` looks for them ──────────────────────────


def test_what_fabric_returns_leads_to_what_it_was_given() -> None:
    fabric, module, loader = Fabric(accelerator="cpu", devices=1), nn.Linear(2, 2), DataLoader([1, 2])  # type: ignore[arg-type]
    assert fabric_original(fabric.setup(module)) is module and fabric_original(module) is None
    found = fabric.setup_dataloaders(loader)
    assert found is not loader and loader_of_fabric(found) is loader and loader_of_fabric(loader) is loader


def test_a_trainer_clips_as_it_is_told_until_the_undo(tmp_path: Path) -> None:
    for name in ("norm", "value"):
        clipped: list[Any] = []
        run = trainer(tmp_path, max_steps=1, gradient_clip_val=0.5, gradient_clip_algorithm=name)
        clip = {f"clip_grad_by_{name}": lambda *args, c=clipped: c.append(args[1])}
        undo = replace_attributes(run.precision_plugin, **clip)
        run.fit(BoringModel())
        undo()
        undo()
        assert clipped == [0.5] and not vars(run.precision_plugin).keys() & clip.keys()
