"""Exports to stores. The oracle is the local export of the same checkpoint: every file must have the same bytes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.export.peft_export import CONFIG, WEIGHTS, export_adapters
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.system.tuning import Tuning
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.ranks.export import test_huggingface_out as hugging_face
from tests.ranks.export.test_consolidate import flip, in_small_windows
from tests.support import zoo
from tests.support.pool import ROOT, run_ranks
from tests.support.stores import IMPATIENT, Bucket, Proxy
from tests.system.test_lora_checkpoints import base, fit

__all__ = ["base"]  # a fixture
NO_C128 = {"exclude": "*.complex128"}
CHUNKS = {"format": "safetensors", "split": "chunks", "size_per_shard": 0.05, **NO_C128}
FILE = {"format": "safetensors", **NO_C128}
FORMATS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch converted": {"dtype": "bfloat16"},
    "one file": FILE,
    "chunks with optimizer": {**CHUNKS, "exclude": "*.complex*", "optimizer": True},
    "file per tensor": {"format": "safetensors", "split": "one_file_per_tensor", "include": "rows.*f*"},
    "huggingface": {"format": "huggingface", "size_per_shard": 0.05, "dtype": "float16", **NO_C128},
}


LARGE_BYTES = 12_000_000  # three parts


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
    """What fails for good fails soon; and large objects go in parts that are small: S3's least."""
    give_routers(monkeypatch, Tuning(upload_part_bytes=5 << 20))


def give_routers(monkeypatch: pytest.MonkeyPatch, tuning: Tuning) -> None:
    for module in ("consolidate", "export.peft_export"):
        router = partial(StorageRouter, retry_policy=IMPATIENT, tuning=tuning)
        monkeypatch.setattr(f"lightning_shardckpt.{module}.StorageRouter", router)


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    with Proxy(s3_port) as found:
        yield found


@pytest.fixture(params=["s3", "memory", "another"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A URL of a place that nobody else has, and its options."""
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("s3")
        return bucket.url("some", "place"), bucket.options
    return f"{request.param}:/{tmp_path}", {}


def content(place: str | Path, options: dict[str, Any] | None = None) -> dict[str, bytes]:
    """Of all files at a path or a URL, by name relative to it."""
    fs, root = fsspec.core.url_to_fs(str(place), **{"use_listings_cache": False, **(options or {})})
    fs.invalidate_cache()
    return {key.removeprefix(root): fs.cat_file(key) for key in fs.find(root)}


# ── the same bytes ──────────────────────────────────────────────────────────────────────────────────────────────────


SWEPT = [pytest.mark.slow, pytest.mark.sweep]
ON_S3 = {"one file": [], "huggingface": [], "torch": [pytest.mark.slow], "chunks with optimizer": [pytest.mark.slow]}


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        pytest.param(store, kind, id=f"{kind}-{store}", marks=ON_S3.get(kind, SWEPT) if store == "s3" else SWEPT)
        for store in ("s3", "memory", "another")
        for kind in FORMATS
    ],
    indirect=["store"],
)
def test_a_store_gets_the_bytes_of_the_local_export(
    kind: str, store: tuple[str, dict[str, Any]], saved: Path, tmp_path: Path
) -> None:
    url, options = store
    expected = content(consolidate(saved, tmp_path / "out", **FORMATS[kind]))
    assert consolidate(saved, f"{url}/out", **FORMATS[kind], storage_options=options) == f"{url}/out"
    assert content(f"{url}/out", options) == expected
    assert content(url, options).keys() == {f"/out{name}" for name in expected}


QUICK_WINDOWS = {("torch", 3000), ("chunks with optimizer", 70_000)}


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        pytest.param(kind, nbytes, marks=[] if (kind, nbytes) in QUICK_WINDOWS else SWEPT)
        for kind in ("torch", "torch converted", "chunks with optimizer")
        for nbytes in (400, 3000, 70_000)
    ],
)
def test_threads_take_turns_in_windows_of_any_size(
    kind: str, nbytes: int, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"exclude": "*complex*", **FORMATS[kind]}  # conversions of NaNs depend on where torch's vectors begin
    options = {**options, "include": "*.[lfb]*"} if "converted" in kind else options
    tuning = in_small_windows(monkeypatch, nbytes)
    options = {**options, "dtype": None, "tuning": tuning}
    expected = content(consolidate(saved, tmp_path / "out", **options))
    assert content(consolidate(saved, f"memory:/{tmp_path}/out", **options)) == expected


@pytest.mark.slow
def test_parts_are_as_large_as_the_size_of_the_object_asks(
    large: Path, tmp_path: Path, s3: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(consolidate(large, tmp_path / "out.pt"))
    # as an object of terabytes would need it
    give_routers(monkeypatch, Tuning(upload_part_bytes=5 << 20, upload_max_parts=2))
    options = replace(s3, port=proxy.port).options
    assert content(consolidate(large, s3.url("out.pt"), storage_options=options), s3.options) == expected
    assert 2 <= sum(asked.is_part for asked in proxy.asked) <= 3


def test_experts_are_cut_apart_for_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hugging_face.saved(hugging_face.Wrapped(hugging_face.built("mixtral")), tmp_path / "a.ckpt")
    tuning = in_small_windows(monkeypatch, 200)
    for number, more in enumerate(({}, {"size_per_shard": 0.005}, {"dtype": "float64"})):
        options: dict[str, Any] = {"format": "huggingface", **more}
        expected = content(consolidate(path, tmp_path / f"out{number}", **options, tuning=tuning))
        assert any("experts.2." in str(one) for one in expected.values())
        assert content(consolidate(path, f"memory:/{tmp_path}/out{number}", **options, tuning=tuning)) == expected


def test_a_damaged_part_of_an_expert_is_found(tmp_path: Path) -> None:
    path = hugging_face.saved(hugging_face.Wrapped(hugging_face.built("mixtral")), tmp_path / "a.ckpt")
    (victim,) = path.glob("model-dist-00000-shard-*.safetensors")
    with Checkpoint(LocalStorage(), str(path)) as stored:
        shards = stored.index("model", 0).shards
    name = next(name for name in shards if "experts" in name)
    at = shards[name][0].begin
    flip(victim, at + 200)
    with pytest.raises(CorruptionError, match=rf"corrupted data of '{name}' in {victim.name}"):
        consolidate(path, f"memory:/{tmp_path}/out", format="huggingface")
    assert content(f"memory:/{tmp_path}") == {}


@pytest.mark.slow
def test_adapters_for_peft(base: str, tmp_path: Path, s3: Bucket) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(1, fit, {}, {"base": base, "save": str(path)})
    expected = content(consolidate(path, tmp_path / "out", format="peft"))
    assert sorted(expected) == [f"/{CONFIG}", f"/{WEIGHTS}"]
    for url, options in ((s3.url("out"), s3.options), (f"memory:/{tmp_path}/out", {})):
        assert consolidate(path, url, format="peft", storage_options=options) == url
        assert content(url, options) == expected
        with pytest.raises(FileExistsError, match="does not exist yet or is empty"):
            export_adapters(path, url, storage_options=options)
    (victim,) = path.glob("model-dist-00000-shard-*.safetensors")
    flip(victim, victim.stat().st_size - 1)
    with pytest.raises(CorruptionError):
        export_adapters(path, s3.url("other"), storage_options=s3.options)
    assert s3.listed() == [f"out/{CONFIG}", f"out/{WEIGHTS}"]


def test_a_url_of_a_file_is_a_path(saved: Path, tmp_path: Path) -> None:
    assert consolidate(saved, f"file://{tmp_path}/out.pt") == tmp_path / "out.pt"
    with pytest.raises(ValueError, match="was a URL before it became a Path"):
        consolidate(saved, Path("s3://bucket/out.pt"))


# ── what is there already ───────────────────────────────────────────────────────────────────────────────────────────


REPLACED = {"file": FILE, "folder": CHUNKS, "torch": {}}
QUICK_PAIRS = {("s3", "folder"), ("memory", "file"), ("another", "torch")}


@pytest.mark.parametrize(
    ("store", "options"),
    [
        pytest.param(store, REPLACED[kind], id=f"{store}-{kind}", marks=[] if pair in QUICK_PAIRS else SWEPT)
        for pair in itertools.product(("s3", "memory", "another"), REPLACED)
        for store, kind in [pair]
    ],
    indirect=["store"],
)
def test_only_what_an_export_wrote_is_replaced(
    options: dict[str, Any], store: tuple[str, dict[str, Any]], saved: Path, tmp_path: Path
) -> None:
    place, storage_options = store
    url = f"{place}/out"
    consolidate(saved, url, **options, storage_options=storage_options)
    before = content(url, storage_options)
    with pytest.raises(FileExistsError, match=r"already exists.*/out"):
        consolidate(saved, url, **options, storage_options=storage_options)
    assert content(url, storage_options) == before
    other = {**options, "exclude": "*.[cb]*"}
    consolidate(saved, url, **other, overwrite=True, storage_options=storage_options)
    expected = content(consolidate(saved, tmp_path / "out", **other))
    assert content(url, storage_options) == expected != before

    fs, _ = fsspec.core.url_to_fs(place, **storage_options)
    foreign = "/notes.md" if options is CHUNKS else "/folder/thesis.tex"
    fs.pipe_file(f"{url}{foreign}" if options is CHUNKS else f"{place}/mine{foreign}", b"mine")
    target = url if options is CHUNKS else f"{place}/mine"
    with pytest.raises(FileExistsError, match="is not replaced"):
        consolidate(saved, target, **options, overwrite=True, storage_options=storage_options)
    kept = expected if options is CHUNKS else {}
    assert content(target, storage_options) == {**kept, foreign: b"mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_object_and_a_checkpoint_are_in_the_way_of_a_directory(
    overwrite: bool, saved: Path, s3: Bucket
) -> None:
    s3.put("a/out", b"mine")
    s3.put(f"b.ckpt/{ROOT_NAME}", b"{}")
    for url in (s3.url("a/out"), s3.url("b.ckpt")):
        with pytest.raises(FileExistsError, match=r"already exists|is not replaced"):
            consolidate(saved, url, **CHUNKS, overwrite=overwrite, storage_options=s3.options)
    assert s3.listed() == ["a/out", f"b.ckpt/{ROOT_NAME}"]


@pytest.mark.slow
def test_an_object_that_appears_meanwhile_is_not_replaced(large: Path, s3: Bucket, proxy: Proxy) -> None:
    options = replace(s3, port=proxy.port).options
    chunks = {"format": "safetensors", "split": "chunks", "size_per_shard": 6}
    for place, key, more in (("a.pt", "a.pt", {}), ("out", "out/model.safetensors.index.json", chunks)):

        def harm(asked: Any, key: str = key) -> None:
            if asked.method == "POST" and "uploads" in asked.path:  # the first object is begun
                s3.put(key, b"mine")

        proxy.harm = harm
        with pytest.raises(FileExistsError, match="another object is at"):
            consolidate(large, s3.url(place), **more, storage_options=options)  # type: ignore[arg-type]
        assert [one for one in s3.listed() if one.startswith(place)] == [key]
    assert s3.uploads() == []


# ── what goes wrong ─────────────────────────────────────────────────────────────────────────────────────────────────

LASTING: dict[str, Callable[[Any], Any]] = {
    "a part is never taken": lambda asked: 503 if "partNumber=2" in asked.path else None,
    "a part always ends in a reset": lambda asked: "reset" if "partNumber=3" in asked.path else None,
    "writing is not permitted": lambda asked: 403 if asked.method == "PUT" else None,
    "it is never completed": lambda asked: 500 if asked.method == "POST" and "uploadId" in asked.path else None,
}


def lasting() -> Iterator[Any]:
    """What fails, and what was there before; a sample of these with nothing."""
    for kind in LASTING:
        yield pytest.param(kind, "something", marks=[pytest.mark.slow] if "reset" in kind else [])
        yield pytest.param(kind, "nothing", marks=[pytest.mark.slow] if "completed" in kind else SWEPT)


@pytest.mark.parametrize(("kind", "before"), [*lasting()])
def test_a_failure_leaves_what_was_there_and_no_upload(
    kind: str, before: str, large: Path, s3: Bucket, proxy: Proxy
) -> None:
    if before == "something":
        s3.put("out.pt", b"old")
    proxy.harm = LASTING[kind]
    options = replace(s3, port=proxy.port).options
    with pytest.raises(OSError, match="permit" if "permitted" in kind else r"s3://.*out\.pt: failed 4 times"):
        consolidate(large, s3.url("out.pt"), overwrite=before == "something", storage_options=options)
    assert s3.uploads() == []
    assert content(s3.url("out.pt"), s3.options) == ({"": b"old"} if before == "something" else {})


@pytest.mark.slow
def test_a_failure_of_a_later_file_deletes_the_earlier_ones(large: Path, s3: Bucket, proxy: Proxy) -> None:
    proxy.harm = lambda asked: 500 if asked.method == "PUT" and "index.json" in asked.path else None
    options = replace(s3, port=proxy.port).options
    chunks: dict[str, Any] = {"format": "safetensors", "split": "chunks", "size_per_shard": 6}
    with pytest.raises(OSError, match=r"index\.json: failed 4 times"):
        consolidate(large, s3.url("out"), **chunks, storage_options=options)
    assert any("out/model-00002-of-00002.safetensors" in asked.path for asked in proxy.asked)
    assert s3.uploads() == s3.listed() == []


@pytest.mark.slow
def test_what_passes_is_survived(large: Path, s3: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    expected = content(consolidate(large, tmp_path / "out.pt"))
    for number, harm in enumerate((503, "reset", "lose")):
        proxy.forget()
        proxy.harm = lambda asked, harm=harm: harm if asked.turn == 1 else None  # type: ignore[misc]
        options = replace(s3, port=proxy.port).options
        url = consolidate(large, s3.url(f"{number}.pt"), storage_options=options)
        assert content(url, s3.options) == expected
    assert s3.uploads() == []


@pytest.mark.parametrize("number", [2, 90])
@pytest.mark.parametrize("kind", ["full", "interrupt by a user"])
def test_an_error_of_a_stream_ends_all_threads(
    kind: str, number: int, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = in_small_windows(monkeypatch, 3000)
    write, calls = MemoryFile.write, itertools.count(1)

    def failing(file: MemoryFile, data: Any) -> int:
        if next(calls) == number:
            if kind == "full":
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), signal.SIGINT)  # it reaches the main thread
        return int(write(file, data))

    monkeypatch.setattr(MemoryFile, "write", failing)
    with pytest.raises(OSError if kind == "full" else KeyboardInterrupt):
        consolidate(saved, f"memory:/{tmp_path}/out", tuning=tuning)
    assert content(f"memory:/{tmp_path}") == {}


def test_damage_is_found_and_leaves_nothing(large: Path, tmp_path: Path, s3: Bucket) -> None:
    copy = Path(shutil.copytree(large, tmp_path / "a.ckpt"))
    for victim in sorted(copy.glob("model-dist-*.safetensors")):
        flip(victim, victim.stat().st_size - 1)
        with pytest.raises(CorruptionError, match=f"corrupted data of 'dim.' in {victim.name}"):
            consolidate(copy, s3.url("out"), storage_options=s3.options)
        with pytest.raises(CorruptionError):
            consolidate(copy, f"memory:/{tmp_path}/out")
        flip(victim, victim.stat().st_size - 1)
    assert s3.uploads() == s3.listed() == []
    assert content(f"memory:/{tmp_path}/out") == {}


@pytest.mark.slow
def test_what_makes_a_directory_whole_comes_last(tmp_path: Path, s3: Bucket, proxy: Proxy) -> None:
    path = hugging_face.saved(hugging_face.Wrapped(hugging_face.built("tied llama")), tmp_path / "a.ckpt")
    options = replace(s3, port=proxy.port).options
    more: dict[str, Any] = {"format": "huggingface", "size_per_shard": 0.01, "storage_options": options}
    consolidate(path, s3.url("out"), **more)
    put = [asked.path.partition("?")[0].rpartition("/")[2] for asked in proxy.asked if asked.method == "PUT"]
    assert put[-2:] == ["model.safetensors.index.json", "config.json"]
    assert put[0].startswith("model-00001-of-")
    proxy.forget()
    consolidate(path, s3.url("out"), **more, overwrite=True)
    kinds = [(a.method, "delete" in a.path) for a in proxy.asked if a.method == "PUT" or "delete" in a.path]
    assert kinds[:2] == [("POST", True)] * 2 and all(kind == ("PUT", False) for kind in kinds[2:])


# ── cost ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_MEASURED = """
import sys
from lightning_shardckpt.consolidate import consolidate
from tests.support.limits import grown_mib
small, large, place, port, kind = sys.argv[1:]
storage_options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "test", "secret": "test"}
options = {"format": kind, "storage_options": storage_options}
consolidate(small, f"{place}/small", exclude="*.complex128", **options)  # imports, and the client's connections
print(grown_mib(lambda: consolidate(large, f"{place}/large", **options), at_most=1024))
"""


def save_rows_and_columns(path: str, rows: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)
    state = {f"dim{d}": distribute_tensor(whole, mesh, [Shard(d)], src_data_rank=None) for d in (0, 1)}
    io = zoo.ShardCkptIO(size_per_shard=64)
    io.attach(zoo.Ranks.of_default_group(60), torch.nn.Module(), {})
    io.save_checkpoint({"state_dict": state, "global_step": 0, "epoch": 0}, path)


@pytest.mark.slow
@pytest.mark.sweep
def test_memory_does_not_grow_with_what_is_uploaded(saved: Path, s3: Bucket, tmp_path: Path) -> None:
    kind: Any = "torch"
    rows = 40 * 1024  # 160 MiB per tensor, of which there are two
    path = str(tmp_path / "a.ckpt")
    run_ranks(2, save_rows_and_columns, path, rows)
    command = [sys.executable, "-c", _MEASURED, str(saved), path, s3.url(kind), str(s3.port), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
    expected = consolidate(path, tmp_path / "out", format=kind)
    fs, key = fsspec.core.url_to_fs(s3.url(kind, "large"), **s3.options)
    assert fs.info(key)["size"] == os.path.getsize(expected)
    assert fs.checksum(key) is not None
    with fs.open(key, "rb") as found, open(expected, "rb") as judge:
        while block := judge.read(16 << 20):
            assert found.read(len(block)) == block


@pytest.mark.slow
def test_columns_are_read_once_and_what_is_summed_twice(
    large: Path, s3: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    fs, root = fsspec.core.url_to_fs(s3.url("a.ckpt"), **s3.options)
    for file in large.iterdir():
        fs.put_file(str(file), f"{root}/{file.name}")
    options = replace(s3, port=proxy.port).options
    for format, most in (("safetensors", 1.05), ("torch", 2.05)):
        proxy.forget()
        consolidate(s3.url("a.ckpt"), s3.url(format), format=format, storage_options=options)  # type: ignore[arg-type]
        assert proxy.sent_bytes <= most * LARGE_BYTES
        expected = content(consolidate(large, tmp_path / format, format=format))  # type: ignore[arg-type]
        assert content(s3.url(format), s3.options) == expected
