"""Exports of checkpoints in stores. The oracle is the export of the same checkpoint on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt import export_adapters
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.ranks.export import test_huggingface_out as hugging_face
from tests.support import zoo
from tests.support.faults import flip
from tests.support.pool import run_ranks
from tests.support.stores import IMPATIENT, Bucket, Proxy

LARGE_BYTES = 12_000_000


def save_large(path: str) -> None:
    """Two tensors of 6 MB, one in rows and one in columns of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(LARGE_BYTES // 8, dtype=torch.float32).view(-1, 1000)
    state = {f"dim{d}": distribute_tensor(whole + d, mesh, [Shard(d)], src_data_rank=None) for d in (0, 1)}
    io = zoo.ShardCkptIO(size_per_shard=4)
    io.attach(zoo.Ranks.of_default_group(60), torch.nn.Module(), {})
    io.save_checkpoint({"state_dict": state, "global_step": 0, "epoch": 0}, path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "a.ckpt"
    run_ranks(2, save_large, str(path))
    return path


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails for good fails soon."""
    monkeypatch.setattr("lightning_shardckpt.storage.router.StorageRouter", partial(StorageRouter, tuning=IMPATIENT))


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    with Proxy(s3_port) as found:
        yield found


def put(checkpoint: Path, s3: Bucket) -> str:
    url = s3.url("a.ckpt")
    fs, root = fsspec.core.url_to_fs(url, **s3.options)
    for file in checkpoint.iterdir():
        fs.put_file(str(file), f"{root}/{file.name}")
    return url


@pytest.mark.slow
def test_a_checkpoint_in_a_store_is_exported_with_the_same_bytes_and_read_once(
    large: Path, s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    url, options = put(large, s3), replace(s3, port=proxy.port).options
    for format in ("safetensors", "torch"):
        proxy.forget()
        found = consolidate(url, tmp_path / format, format=format, storage_options=options)  # type: ignore[arg-type]
        assert proxy.sent_bytes <= 1.05 * LARGE_BYTES
        expected = consolidate(large, tmp_path / f"{format} of a disk", format=format)  # type: ignore[arg-type]
        assert found.read_bytes() == expected.read_bytes()


def test_a_damaged_part_of_an_expert_is_found(tmp_path: Path) -> None:
    path = hugging_face.saved(hugging_face.Wrapped(hugging_face.built("mixtral")), tmp_path / "a.ckpt")
    (victim,) = path.glob("model-dist-00000-shard-*.safetensors")
    with Checkpoint(LocalStorage(), str(path)) as stored:
        shards = stored.index("model", 0).shards
    name = next(name for name in shards if "experts" in name)
    flip(victim, shards[name][0].begin + 200)
    with pytest.raises(CorruptionError, match=rf"corrupted data of '{name}' in {victim.name}"):
        consolidate(path, tmp_path / "out", format="huggingface")
    assert not (tmp_path / "out").exists()


def test_an_output_is_on_a_file_system(tmp_path: Path) -> None:
    zoo.save(str(tmp_path / "a.ckpt"))
    assert consolidate(tmp_path / "a.ckpt", f"file://{tmp_path}/out.pt") == tmp_path / "out.pt"
    with pytest.raises(ValueError, match="was a URL before it became a Path"):
        consolidate(tmp_path / "a.ckpt", Path("s3://bucket/out.pt"))
    for export in (consolidate, export_adapters):
        with pytest.raises(ValueError, match="is a URL, but exports need a file system"):
            export(tmp_path / "a.ckpt", "s3://bucket/out.pt")
