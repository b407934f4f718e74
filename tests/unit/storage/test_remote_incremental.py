"""Incremental saves to a store: what is the same is copied by the store, and passes no network. Real requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt.checkpoint.checkpoint import load_full, save
from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.incremental import SaveHistory
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.tools.verify import verify
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support.stores import IMPATIENT, Bucket, Proxy

BIG, LARGE, SMALL = 300_000, 3_000_000, 1_000  # elements of 4 bytes


class Run:
    """Saves of one process through a proxy, each to a URL of its own; ``big`` stays as it is."""

    def __init__(self, s3: Bucket, proxy: Proxy, big: int = BIG, **options: Any) -> None:
        self.s3, self.proxy = s3, proxy
        self.given = replace(s3, port=proxy.port).options | {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1}}
        self.storage = StorageRouter(storage_options=self.given, retry_policy=IMPATIENT, **options)
        self.history, self.count, self.notes = SaveHistory(), 0, list[str]()
        self.big = torch.arange(big, dtype=torch.float32)

    def save(self) -> str:
        """Save both tensors, of which ``small`` is new; return the URL."""
        self.count += 1
        self.proxy.forget()
        url = self.s3.url("run", f"{self.count}.ckpt")
        state = {"state_dict": {"big": self.big, "small": torch.full((SMALL,), float(self.count))}}
        self.notes += save(
            url, lambda: snapshot(state), ranks=Ranks.alone(), about=RunInfo(self.count),
            options=SaveOptions(1, incremental=True), storage=self.storage, history=self.history,
        )  # fmt: skip
        return url

    def check(self, url: str, step: int) -> None:
        """Compare what is loaded with what was saved, every bit."""
        found = load_full(url, storage=self.storage)["state_dict"]
        assert torch.equal(found["big"], self.big)
        assert found["small"].unique().tolist() == [step]
        assert verify(url, storage_options=self.given).findings == ()

    def copies(self) -> int:
        """The number of requests that had the store copy something."""
        return sum(asked.copies for asked in self.proxy.asked)


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    with Proxy(s3_port) as found:
        yield found


def test_the_store_copies_what_stayed_the_same(s3: Bucket, proxy: Proxy) -> None:
    run = Run(s3, proxy, LARGE)
    first = run.save()
    assert proxy.received_bytes > 4 * LARGE and run.copies() == 0
    second = run.save()
    assert proxy.received_bytes < 100_000
    assert run.copies() == 1
    run.storage.remove(first)
    run.check(second, 2)
    assert s3.uploads() == [] and run.notes == []
    with Checkpoint(run.storage, second) as checkpoint:
        assert sum(bool(file.save_id) for file in checkpoint.index("model", 0).files.values()) == 1


def test_the_bytes_are_not_downloaded_to_be_copied(s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    run = Run(s3, proxy, pre_download=tmp_path)
    run.save()
    second = run.save()
    assert run.copies() == 1 and proxy.sent_bytes < 100_000
    run.check(second, 2)


def test_a_run_that_goes_on_has_what_it_loaded_copied(s3: Bucket, proxy: Proxy) -> None:
    run = Run(s3, proxy)
    url = run.save()
    run.history = SaveHistory()
    run.history.loaded(url)
    run.check(run.save(), 2)
    assert run.copies() == 1


def test_a_base_that_is_gone_is_written_again(s3: Bucket, proxy: Proxy) -> None:
    run = Run(s3, proxy)
    run.storage.remove(run.save())
    run.check(run.save(), 2)
    assert run.copies() == 0 and run.notes == []


HARMS: dict[str, Any] = {
    "a store that can't copy": (501, "files can't be linked in"),
    "a store that doesn't permit it": (403, "does not permit it"),
    "an object that is gone": (404, ""),
    "a store that is busy for a moment": (503, ""),
}


@pytest.mark.parametrize("kind", HARMS)
def test_what_cannot_be_copied_is_written(s3: Bucket, proxy: Proxy, kind: str) -> None:
    run, (status, words) = Run(s3, proxy), HARMS[kind]
    run.save()
    proxy.harm = lambda asked: status if asked.copies and (status != 503 or asked.turn == 1) else None
    second = run.save()
    proxy.harm = lambda asked: None
    run.check(second, 2)
    assert len(run.notes) == bool(words) and all(words in note for note in run.notes)
    keys = [key for key in s3.listed() if "2.ckpt" in key]
    assert len({key.split("/")[-1][:17] for key in keys if not key.endswith(ROOT_NAME)}) == 1  # of one save
