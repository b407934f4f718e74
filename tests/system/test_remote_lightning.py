"""Training with Lightning saves to a store and resumes from there, against a server that speaks S3."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shardckpt import ShardCkptIO, lazy
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.from_checkpoint import load_from_checkpoint
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.pool import ROOT, run_ranks
from tests.support.stores import Bucket, Proxy
from tests.support.warm_python import Run

FSDP2, TP2 = {"data_parallel_shard_size": 2}, {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


def keeping(url: str, **more: Any) -> ModelCheckpoint:
    about: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 1, "save_last": True}
    return ModelCheckpoint(url, filename="{step}", every_n_train_steps=1, save_on_train_epoch_end=True, **about, **more)


def fit(strategy: Any, steps: int, url: str, resume: str | None = None, **io: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"callbacks": [keeping(url)], "enable_checkpointing": True}
    return tiny.fit(strategy, steps, resume=resume, plugins=[ShardCkptIO(**io)], **options)


def failing(url: str, port: int) -> str:
    """Save once; then fail, since rank 1 may not write its shard."""
    tiny.fit(FSDP2, 1, save=url, plugins=[ShardCkptIO(storage_options=Bucket("", port).options)])
    with pytest.raises(PermissionError) as raised:
        tiny.fit(FSDP2, 1, save=url, plugins=[ShardCkptIO(storage_options=Bucket("", port).options)])
    return str(raised.value)


def test_a_rank_that_may_not_write_fails_the_save_on_all_ranks(s3: Bucket, s3_port: int) -> None:
    name = "model-dist-00001-shard-00001.safetensors"
    with Proxy(s3_port) as proxy:
        proxy.harm = lambda asked: 403 if asked.method == "PUT" and name in asked.path and proxy.passed(name) else None
        messages = run_ranks(2, failing, s3.url("a.ckpt"), proxy.port)
    assert all("rank 1" in message and name in message for message in messages)
    saves = {key.split("/")[1][:16] for key in s3.listed() if not key.endswith(ROOT_NAME)}
    assert len(saves) == 1  # the first one's
    assert lazy.metadata(s3.url("a.ckpt"), storage_options=s3.options).step == 1
    assert s3.uploads() == []


LEAVE = """
import sys, torch
from lightning_shardckpt import ShardCkptIO
io = ShardCkptIO(use_async=True, storage_options={"endpoint_url": sys.argv[2], "key": "test", "secret": "test"})
io.save_checkpoint({"state_dict": {"a": torch.zeros(8_000_000)}, "global_step": 1}, sys.argv[1])
"""


@pytest.mark.slow
def test_a_save_in_the_background_is_completed_when_the_interpreter_leaves(s3: Bucket, python: Run) -> None:
    command = ["-c", LEAVE, s3.url("a.ckpt"), s3.options["endpoint_url"]]
    done = python(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout_s=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"a.ckpt/{ROOT_NAME}" in s3.listed()


def saved_and_resumed(url: str, cache: str) -> dict[str, Any]:
    """Straight, then stopped and resumed in several ways; by what each is called."""
    straight = tiny.fit(FSDP2, 3)
    for harmless in ("Be aware that when using `ckpt_path`", "resuming after"):
        warnings.filterwarnings("ignore", harmless)  # this process ends soon
    first = fit(FSDP2, 2, url, use_async=True)
    again = fit(FSDP2, 3, url, resume="last", storage_options={"throttle_uploads": True})
    same = {"batch_size": 4}  # the global batch of two ranks
    other = tiny.fit(TP2, 4, resume=f"{url}/last.ckpt", plugins=[ShardCkptIO(pre_download=cache)], data=same)
    return {"straight": straight, "first": first, "again": again, "other": other}


@pytest.mark.slow
def test_a_run_saves_to_s3_and_goes_on_from_there(s3: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = s3.url("runs", "a")
    ranks = run_ranks(2, saved_and_resumed, url, str(tmp_path), timeout_s=240)
    for runs in ranks:
        assert runs["first"]["losses"] == runs["straight"]["losses"][:2]
        assert runs["again"]["losses"] == runs["straight"]["losses"][2:]
        assert tiny.differences(runs["straight"]["state"], runs["again"]["state"]) == []
        assert runs["other"]["step"] == 4
    folders = {key.split("/")[2] for key in s3.listed() if key.startswith("runs/a/")}
    assert folders == {"step=3.ckpt", "last.ckpt"}  # the best and the last; others were removed
    assert s3.uploads() == []
    assert len(os.listdir(tmp_path)) == 1  # the cache of the one checkpoint that was read through it

    checkpoint = f"{url}/last.ckpt"
    assert (inspect(checkpoint)["step"], lazy.metadata(checkpoint).step) == (3, 3)
    assert verify(checkpoint).findings == ()
    module = load_from_checkpoint(tiny.TinyLM, checkpoint)
    expected = {k.removeprefix("model/"): v for k, v in ranks[0]["straight"]["state"].items() if k.startswith("model/")}
    assert tiny.differences(module.state_dict(), expected) == []
    ((_, tensor),) = lazy.load_keys(checkpoint, ["head.weight"])
    assert tensor.equal(expected["head.weight"])
    assert sum(key.endswith(ROOT_NAME) for key in s3.listed()) == 2
