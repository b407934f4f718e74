"""Options of the plain functions that ``ShardCkptIO`` has, too. Oracles: the values at the call, torch's own locks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import CodeType
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from lightning_shardckpt import load, save, save_async, wait
from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.storage.object_store import machine_upload_lock
from tests.support.stores import Bucket

State = dict[str, Any]

THROTTLED = {"throttle_uploads": True}


def state_of(seed: int) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_save_waits_for_the_pending_one() -> None:
    state, fs, turn = state_of(1), fsspec.filesystem("memory"), ExitStack()
    main = threading.get_ident()

    def end_turn_when_waited_for() -> None:
        while Background.settle.__code__ not in _codes_of(main):
            time.sleep(0.001)
        turn.close()

    watcher = threading.Thread(target=end_turn_when_waited_for)
    try:
        with turn:
            turn.enter_context(machine_upload_lock())  # the first is being written, and is held there
            first = save_async("memory://pending/1.ckpt", state, storage_options=THROTTLED)
            assert not first.done()
            watcher.start()
            with pytest.raises(FileExistsError):  # the first, which was not there when this call began
                save_async("memory://pending/1.ckpt", state, storage_options=THROTTLED)
            assert first.done()
            save_async("memory://pending/2.ckpt", state, storage_options=THROTTLED).result()
            watcher.join()
    finally:
        wait()
        fs.store.clear()


def _codes_of(thread: int) -> Iterator[CodeType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@pytest.mark.parametrize("asynchronous", [False, True])
def test_throttled_uploads_take_turns_on_a_machine(asynchronous: bool) -> None:
    state, url = state_of(1), "memory://throttled/a.ckpt"
    done = threading.Event()

    def upload() -> None:
        if asynchronous:
            save_async(url, state, overwrite=True, storage_options=THROTTLED).result()
        else:
            save(url, state, overwrite=True, storage_options=THROTTLED)
        done.set()

    thread = threading.Thread(target=upload)
    fs = fsspec.filesystem("memory")
    try:
        with machine_upload_lock():
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
    with pytest.raises(MismatchError, match=f"key_mapping: {named}.*matches no name in the checkpoint"):
        load(tmp_path / "a", {"model": live["model"]}, key_mapping=mapping)
    assert torch.equal(live["model"].weight, before)
    with pytest.warns(UserWarning, match="matches no name in the checkpoint"):
        load(tmp_path / "a", {"model": live["model"]}, key_mapping=mapping, strict=False)
    assert torch.equal(live["model"].weight, stored["model"].weight)


@pytest.mark.parametrize("protocol", ["http", "https"])
def test_a_url_of_the_web_is_refused_for_saves(protocol: str) -> None:
    with pytest.raises(ValueError, match="can be read, but not written: save to a path or to an object store"):
        save(f"{protocol}://127.0.0.1:1/a.ckpt", {"model": nn.Linear(2, 2)})


def test_a_lazy_module_is_told_to_see_a_batch_first(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    save(tmp_path / "a", {"model": nn.Linear(4, 2)})
    for name, call in (("a", load), ("b", save)):
        with pytest.raises(StateError, match="model/weight: the lazy module has not seen a batch yet"):
            call(tmp_path / name, {"model": lazy})
    lazy(torch.ones(1, 4))
    load(tmp_path / "a", {"model": lazy})
