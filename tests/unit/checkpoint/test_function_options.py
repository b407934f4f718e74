"""Options of the plain functions that ``ShardCkptIO`` has, too. Oracles: the values at the call, torch's own locks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from lightning_shardckpt import ShardCkptIO, load, save, save_async, wait
from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.storage.local.locks import one_per_machine
from tests.ranks.checkpoint.test_overlap import Gate
from tests.support.stores import Bucket

State = dict[str, Any]


def state_of(seed: int) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_an_overlapped_save_has_the_values_of_the_call_and_a_step_waits_for_its_copy(tmp_path: Path) -> None:
    state, gate = state_of(1), Gate()
    before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    with gate.shut():
        saving = save_async(tmp_path / "a", state, overlap_copy=True)
        assert gate.copied == 0 and not saving.done()  # it returned before anything was copied
        watcher = gate.open_when_waited_for(Background.wait_for_copies)
        state["optimizer"].step()
        watcher.join()
        assert gate.copied == 1
        saving.result()
    assert not torch.equal(state["model"].weight, before["weight"])
    stored = load(tmp_path / "a")["model"]
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())


def test_what_changes_a_parameter_before_it_is_copied_fails_the_save(tmp_path: Path) -> None:
    state, gate = state_of(1), Gate()
    with gate.shut():
        save_async(tmp_path / "a", state, overlap_copy=True)
        with torch.no_grad():
            state["model"].weight.add_(1)
        gate.open.set()
        with pytest.raises(StateError, match="weight"):
            wait()


def test_as_many_saves_wait_as_were_allowed(tmp_path: Path) -> None:
    state, gate = state_of(1), Gate()
    with gate.shut():  # the first is being written, and is held there
        saving = [save_async(tmp_path / str(n), state, overlap_copy=n == 0, max_pending=2) for n in range(3)]
        assert not any(one.done() for one in saving)
        opened = gate.open_when_waited_for(Background.settle)
        save_async(tmp_path / "3", state, max_pending=2).result()
        opened.join()
    assert all(one.done() for one in saving[:2])
    with pytest.raises(ValueError, match="max_pending is a number of saves"):
        ShardCkptIO(max_pending=-1)
    with pytest.raises(ValueError, match="max_pending is a number of saves and can't be negative, got -1"):
        save_async(tmp_path / "4", state, max_pending=-1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_throttled_uploads_take_turns_on_a_machine(asynchronous: bool) -> None:
    state, url = state_of(1), "memory://throttled/a.ckpt"
    done = threading.Event()

    def upload() -> None:
        if asynchronous:
            save_async(url, state, overwrite=True, throttle_uploads=True).result()
        else:
            save(url, state, overwrite=True, throttle_uploads=True)
        done.set()

    thread = threading.Thread(target=upload)
    fs = fsspec.filesystem("memory")
    try:
        with one_per_machine():
            save("memory://throttled/free.ckpt", state)  # without it, there are no turns
            thread.start()
            assert not done.wait(0.2)
            assert not any(name.endswith(".safetensors") for name in fs.find("/throttled/a.ckpt"))
        thread.join()
        assert done.is_set() and load(url).keys() == {"model", "optimizer"}
    finally:
        fs.store.clear()


def test_files_of_a_load_are_kept_in_a_local_folder(s3: Bucket, tmp_path: Path) -> None:
    stored, live = state_of(1), state_of(2)
    save(s3.url("a"), stored, storage_options=s3.options)
    load(s3.url("a"), live, storage_options=s3.options, pre_download=tmp_path / "cache")
    assert torch.equal(live["model"].weight, stored["model"].weight)
    assert [*tmp_path.glob("cache/*/*model-dist-00000-shard-00001.safetensors")]


@pytest.mark.parametrize(
    ("mapping", "named"),
    [({"weight": "weight", "wieght": "x"}, "'wieght'"), ({"^w": "w", r"^layers\.": "h."}, r"'\^layers")],
    ids=["names", "rules"],
)
def test_a_key_mapping_that_is_about_nothing_is_a_difference(mapping: Any, named: str, tmp_path: Path) -> None:
    stored, live = state_of(1), state_of(2)
    before = live["model"].weight.clone()
    save(tmp_path / "a", stored)
    with pytest.raises(MismatchError, match=f"key_mapping: {named}.*is about no name in the checkpoint"):
        load(tmp_path / "a", {"model": live["model"]}, key_mapping=mapping)
    assert torch.equal(live["model"].weight, before)
    with pytest.warns(UserWarning, match="is about no name in the checkpoint"):
        load(tmp_path / "a", {"model": live["model"]}, key_mapping=mapping, strict=False)
    assert torch.equal(live["model"].weight, stored["model"].weight)


@pytest.mark.parametrize("option", ["verify", "use_async", "also", "max_pending"])
def test_an_option_that_is_set_later_is_refused_since_nothing_would_look_at_it(option: str) -> None:
    with pytest.raises(AttributeError, match=f"{option} is an option of ShardCkptIO"):
        setattr(ShardCkptIO(), option, None)
