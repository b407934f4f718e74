"""``overlap_copy``: the copy goes on after the save returned, is done before an optimizer steps, and is never torn.

Nothing here looks at a clock: the copying thread is held at a gate.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint import staging
from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.checkpoint.staging import BackgroundCopies
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from tests.ranks.checkpoint.test_async import complete, raised, same
from tests.support import tiny
from tests.support.pool import run_ranks

TIMEOUT_S = 20.0


class Gate:
    """Holds the copying thread before it copies."""

    def __init__(self) -> None:
        self.open, self.copied = threading.Event(), 0

    @contextmanager
    def shut(self) -> Iterator[Gate]:
        copy_all = staging.copy_all

        def held(tensors: Any, copies: Any) -> None:
            assert self.open.wait(TIMEOUT_S), "nobody opened the gate"
            copy_all(tensors, copies)
            self.copied += 1

        staging.copy_all = held  # save_job has its own name for it, and copies the rest at once
        try:
            yield self
        finally:
            self.open.set()
            staging.copy_all = copy_all

    def open_when_waited_for(self, function: FunctionType) -> threading.Thread:
        """Open when the calling thread is seen in ``function``."""
        main = threading.get_ident()

        def watch() -> None:
            deadline = time.monotonic() + 2 * TIMEOUT_S
            while not self.open.wait(0.001) and time.monotonic() < deadline:
                frame = sys._current_frames().get(main)
                while frame is not None and frame.f_code is not function.__code__:
                    frame = frame.f_back
                if frame is not None:
                    self.open.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        return watcher


def copies_of(tensors: dict[str, torch.Tensor]) -> tuple[BackgroundCopies, list[torch.Tensor]]:
    copies = [torch.empty_like(tensor) for tensor in tensors.values()]
    copying = BackgroundCopies(list(tensors.values()), copies, list(tensors.items()))
    copying.start()
    return copying, copies


def test_a_tensor_that_changes_before_it_is_copied_is_an_error_that_names_it() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    with Gate().shut() as gate:
        copying, _ = copies_of({"a": a, "b": b})
        b.add_(1)
        gate.open.set()
        with pytest.raises(StateError, match=r"\['b'\] changed while being copied"):
            copying.check()
        copying.wait()
        with pytest.raises(StateError, match=r"\['b'\]"):
            copying.check()


def test_a_change_that_ends_after_the_copy_is_found_before_the_tensors_may_change() -> None:
    a = torch.zeros(3)
    copying, copies = copies_of({"a": a})
    copying.check()
    a.add_(1)  # an operation that was under way when the copy was made counts up only now
    copying.wait()
    with pytest.raises(StateError, match=r"\['a'\]"):
        copying.check()
    assert copies[0].tolist() == [0, 0, 0]


def test_a_tensor_may_change_after_the_wait() -> None:
    a = torch.zeros(3)
    copying, copies = copies_of({"a": a})
    copying.wait()
    a.add_(1)
    copying.check()
    assert copies[0].tolist() == [0, 0, 0]
    copying.forget()
    copying.check()


def test_a_tensor_that_changes_before_the_copying_begins_is_an_error_that_names_it() -> None:
    a = torch.zeros(3)
    copying = BackgroundCopies([a], [torch.empty_like(a)], [("a", a)])
    a.add_(1)
    copying.start()
    with pytest.raises(StateError, match=r"\['a'\]"):
        copying.check()


def test_without_another_thread_the_copies_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    a = torch.tensor([1.0, 2.0, 3.0])
    copying, copies = copies_of({"a": a})
    assert copies[0].tolist() == [1, 2, 3]
    copying.wait()
    a.add_(1)
    copying.check()


def test_what_fails_in_the_copying_thread_is_raised_where_it_is_asked_for() -> None:
    copying = BackgroundCopies([torch.zeros(3)], [torch.zeros(4)], [])
    copying.start()
    copying.wait()
    with pytest.raises(RuntimeError, match="size of tensor"):
        copying.check()


def test_it_is_about_asynchronous_saves_only() -> None:
    with pytest.raises(ValueError, match="use_async=True"):
        ShardCkptIO(overlap_copy=True)


def checkpoint_of(module: nn.Module, *owned: str) -> dict[str, Any]:
    """Lightning's dict, with an optimizer that has these parameters."""
    states = [{"state": {}, "param_groups": [{"lr": 1.0, "params": list(owned)}]}]
    return {"state_dict": module.state_dict(), "optimizer_states": states, "global_step": 1}


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_of_an_optimizer_that_lightning_knows_nothing_of_waits_too(with_closure: bool, tmp_path: Path) -> None:
    module, gate = nn.Linear(3, 3), Gate()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, foreach=True)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    io = ShardCkptIO(use_async=True, overlap_copy=True)
    io.attach(Ranks.alone(), module, {})
    io.async_saves.enable(Ranks.alone())
    with gate.shut():
        module(torch.ones(1, 3)).sum().backward()
        watcher = gate.open_when_waited_for(BackgroundCopies.wait)
        io.save_checkpoint(checkpoint_of(module, "weight", "bias"), tmp_path / "a.ckpt")
        assert not gate.open.is_set()
        optimizer.step(*([lambda: 0.0] if with_closure else []))
        watcher.join()
    io.teardown()
    optimizer.step()  # nobody listens any more
    assert same(load_full(str(tmp_path / "a.ckpt"))["state_dict"], before)
    assert not same(module.state_dict(), before)


def test_a_step_inside_the_closure_of_another_optimizers_step_waits(tmp_path: Path) -> None:
    module, gate = nn.Linear(3, 3), Gate()
    inner = torch.optim.SGD([module.bias], lr=1.0, foreach=True)
    outer = torch.optim.SGD([module.weight], lr=1.0, foreach=True)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    io = ShardCkptIO(use_async=True, overlap_copy=True)
    io.attach(Ranks.alone(), module, {})
    io.async_saves.enable(Ranks.alone())

    def closure() -> float:
        module(torch.ones(1, 3)).sum().backward()
        inner.step()
        return 0.0

    with gate.shut():
        watcher = gate.open_when_waited_for(BackgroundCopies.wait)
        io.save_checkpoint(checkpoint_of(module, "bias", "weight"), tmp_path / "a.ckpt")
        with io.async_saves.around_step(outer, closure) as gradients:
            outer.step(gradients)
        gate.open.set()
        watcher.join()
    io.teardown()
    assert same(load_full(str(tmp_path / "a.ckpt"))["state_dict"], before)


def test_what_interrupts_the_wait_does_not_make_the_copies_complete() -> None:
    a, found = torch.ones(3), list[float]()
    with Gate().shut() as gate:
        copying, copies = copies_of({"a": a})
        copies[0].zero_()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                copying.wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        writer = threading.Thread(target=lambda: (copying.check(), found.extend(copies[0].tolist())))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive() and found == []
        gate.open.set()
        writer.join()
        copying.wait()
    assert found == [1, 1, 1]


def test_parameters_that_no_optimizer_has_are_copied_at_once(tmp_path: Path) -> None:
    module, gate = nn.Linear(3, 3), Gate()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    io = ShardCkptIO(use_async=True, overlap_copy=True)
    io.attach(Ranks.alone(), module, {})
    io.async_saves.enable(Ranks.alone())
    with gate.shut():
        io.save_checkpoint(checkpoint_of(module, "weight"), tmp_path / "a.ckpt")
        with torch.no_grad():
            module.bias.add_(1)  # as an average of the weights is, by whoever keeps it
        gate.open.set()
        io.wait()
    io.teardown()
    assert same(load_full(str(tmp_path / "a.ckpt"))["state_dict"], before)


# --- with a Trainer ---


class Statistics(tiny.TinyLM):
    """Its next forward changes buffers; counts forwards that begin while a copy is under way."""

    holds: Gate | None = None
    during: tuple[int, ...] = ()

    def training_step(self, batch: Any, index: int) -> Any:
        if self.holds is not None and self.global_step == 1:
            assert not self.holds.open.is_set()
            self.during += (self.global_step,)
        loss = super().training_step(batch, index)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


def overlapped(topology: dict[str, int], directory: str, manual: bool) -> list[Any]:
    """The first copy is held until the optimizer wants to step; the same run saves synchronously, too."""
    found: list[Any] = []
    gate = Gate()
    ios = {"sync": ShardCkptIO(), "async": ShardCkptIO(use_async=True, max_pending=3, overlap_copy=True)}
    for name, io in ios.items():
        saves = [tiny.SaveAt(step, f"{directory}/{name}{step}.ckpt") for step in (1, 2, 3)]
        pl.seed_everything(1)
        module = Statistics()
        module.automatic_optimization = not manual
        run = tiny.trainer(topology, max_steps=4, plugins=[io], callbacks=saves)
        if name == "sync":
            run.fit(module, tiny.loader())
            continue
        with gate.shut():
            module.holds = gate
            watcher = gate.open_when_waited_for(BackgroundCopies.wait)
            run.fit(module, tiny.loader())
            watcher.join()
        found.append(module.during)
        found.append(gate.copied)
    found += [same(*(load_full(f"{directory}/{name}{step}.ckpt") for name in ios)) for step in (1, 2, 3)]
    return found


@pytest.mark.parametrize(
    ("topology", "world", "manual"),
    [({}, 2, False), ({}, 1, True), ({"pipeline_parallel_size": 2}, 2, False)],
    ids=["fsdp2", "manual", "pp2"],
)
def test_forward_and_backward_run_while_it_copies_and_the_checkpoints_are_those_of_synchronous_saves(
    topology: dict[str, int], world: int, manual: bool, tmp_path: Path
) -> None:
    assert run_ranks(world, overlapped, topology, str(tmp_path), manual) == [[(1,), 3, True, True, True]] * world


class Meddles(tiny.TinyLM):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.global_step == 2 and self.global_rank == self.trainer.world_size - 1:
            with torch.no_grad():
                self.head.weight.to_local().mul_(0.5)  # type: ignore[operator]  # of the whole, all ranks would notice


def meddled(directory: str) -> list[Any]:
    """One rank changes a weight before it is copied, and before the optimizer steps."""
    gate = Gate()
    io = ShardCkptIO(use_async=True, overlap_copy=True)
    tiny.fit({}, 1, save=f"{directory}/1.ckpt", plugins=[io])
    run = tiny.trainer({}, max_steps=3, plugins=[io], callbacks=[tiny.SaveAt(2, f"{directory}/2.ckpt")])
    with gate.shut():
        watcher = gate.open_when_waited_for(BackgroundCopies.wait)
        error = raised(lambda: run.fit(Meddles(), tiny.loader()))
        watcher.join()
    dist.barrier()
    found = [*error, complete(directory)]
    tiny.fit({}, 2, save=f"{directory}/more.ckpt", plugins=[io])
    io.wait()
    dist.barrier()
    return [*found, complete(directory), os.listdir(directory)]


def test_a_weight_that_something_else_changes_fails_the_save_on_all_ranks_and_nothing_is_torn(tmp_path: Path) -> None:
    for kind, message, before, after, names in run_ranks(2, meddled, str(tmp_path)):
        assert kind == "StateError"
        assert "rank 1 failed while saving" in message and "['head.weight'] changed while being copied" in message
        assert before == {"1.ckpt"} and after == {"1.ckpt", "more.ckpt"} == set(names)


def stock(directory: str) -> bool:
    """Lightning's own strategy tells nobody when the optimizer steps."""
    ios = {"sync": ShardCkptIO(), "async": ShardCkptIO(use_async=True, overlap_copy=True)}
    for name, io in ios.items():
        tiny.fit("auto", 3, callbacks=[tiny.SaveAt(1, f"{directory}/{name}.ckpt")], plugins=[io])
    return same(*(load_full(f"{directory}/{name}.ckpt") for name in ios))


def test_with_lightnings_own_strategy_the_copy_is_made_before_the_save_returns(tmp_path: Path) -> None:
    with Gate().shut():
        assert run_ranks(1, stock, str(tmp_path)) == [True]
