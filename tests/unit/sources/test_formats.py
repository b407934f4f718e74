"""Checkpoints of other programs as sources. Oracles: the safetensors library, torch.save, and the tensors."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import lightning_shardckpt as ckpt
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.reading import ReadTarget, plan_reads
from lightning_shardckpt.sources.source import Source, read_windows
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny

TENSORS = {
    "a.weight": torch.arange(35.0).reshape(5, 7),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c.scalar": torch.tensor(3),
    "d.empty": torch.empty(0, 3),
    "e.mask": torch.tensor([True, False]),
}
INDEX = "model.safetensors.index.json"


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}


def read(source: Source) -> dict[str, Tensor]:
    specs = source.component("model").tensors.items()
    targets = [ReadTarget("model", key, torch.empty(spec.shape, dtype=DTYPES[spec.dtype])) for key, spec in specs]
    plan_reads(source, targets)()
    return {key: target.tensor for (key, _), target in zip(specs, targets, strict=True)}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)


def opened(path: Path) -> Source:
    return open_source(str(path), StorageRouter())[0]


def in_two(folder: Path, name: str, save: Callable[[Any, Path], None]) -> None:
    stem, _, ending = name.partition(".")
    weight_map = {key: f"{stem}-0000{1 + (i > 1)}-of-00002.{ending}" for i, key in enumerate(TENSORS)}
    for file in set(weight_map.values()):
        save({key: TENSORS[key] for key in TENSORS if weight_map[key] == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def one_file(folder: Path, name: str, save: Callable[[Any, Path], None], content: Any = TENSORS) -> Path:
    save(content, folder / name)
    return folder if name in ("model.safetensors", "pytorch_model.bin") else folder / name


def safe(content: Any, path: Path) -> None:
    safetensors.torch.save_file(content, path, metadata={"format": "pt", "who": "somebody"})


LIGHTNING = {"state_dict": TENSORS, "epoch": 3, "pytorch-lightning_version": "2.6.6"}
MADE: dict[str, Callable[[Path], Any]] = {
    "a directory with one file": lambda p: one_file(p, "model.safetensors", safe),
    "a directory with an index": lambda p: in_two(p, "model.safetensors", safe),
    "the same by another name": lambda p: one_file(p, "weights", safe),
    "an old directory with an index": lambda p: in_two(p, "pytorch_model.bin", torch.save),
    "a state dict": lambda p: one_file(p, "w.pt", torch.save),
    "a state dict called model": lambda p: one_file(p, "w.pth", torch.save, {"model": TENSORS, "optimizer": {}}),
    "a checkpoint of Lightning": lambda p: one_file(p, "x.ckpt", torch.save, LIGHTNING),
}


@pytest.mark.parametrize("kind", MADE)
def test_weights_are_read_from(kind: str, tmp_path: Path) -> None:
    source = opened(MADE[kind](tmp_path) or tmp_path)
    assert equal(read(source), TENSORS)
    windows = read_windows(source, [("model", "a.weight", None)], 20)  # as consolidate copies them
    assert b"".join(bytes(data) for _, data in windows) == TENSORS["a.weight"].numpy().tobytes()
    source.close()


def test_a_cache_of_links_is_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    in_two(blobs, "model.safetensors", safe)
    for number, name in enumerate(sorted(os.listdir(blobs))):
        (blobs / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert equal(read(opened(snapshot)), TENSORS)


def test_names_of_compiled_modules_are_those_of_the_modules(tmp_path: Path) -> None:
    """Oracle: the state of the module that has not been compiled."""
    whole, again = (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)) for _ in range(2))
    plain = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    safe({name.replace("1.", "1._orig_mod."): tensor for name, tensor in plain.items()}, tmp_path / "x.safetensors")
    ckpt.load(tmp_path / "x.safetensors", {"model": again})
    assert equal({**again.state_dict()}, plain)
    safe({"a.w": torch.zeros(1), "a._orig_mod.w": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(FormatError, match=r"y\.safetensors': two tensors are called 'a\.w'"):
        opened(tmp_path / "y.safetensors")


def test_safetensors_are_taken_before_older_files_and_not_replaced_by_them(tmp_path: Path) -> None:
    in_two(tmp_path, "model.safetensors", safe)
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert equal(read(opened(tmp_path)), TENSORS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"file model-00002-of-00002.safetensors: the file is missing"):
        opened(tmp_path)


def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)}, path)
    source = opened(path)
    os.truncate(path, 5 << 20)
    with pytest.raises(CorruptionError, match=r"x.pt"):
        read(source)
    with pytest.raises(CorruptionError, match=r"x.pt'.* torch.load cannot read it"):
        opened(path)


def test_a_pickle_in_a_file_of_weights_is_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": Evil()}}, tmp_path / "x.ckpt")
    with pytest.raises(Exception, match="Weights only load failed"):
        opened(tmp_path / "x.ckpt")
    assert not (tmp_path / "run").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("run",)


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def described(**entry: Any) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors file"),
    "cut off": (header(b"{}", 100), "the header claims 100 bytes of a file of 10"),
    "dtype": (header(described(dtype="F4"), data=bytes(8)), "describes a tensor wrongly"),
    "other size": (header(described(data_offsets=[0, 4]), data=bytes(8)), "does not fill 4 bytes"),
    "behind the end": (header(described(shape=[200], data_offsets=[0, 800]), data=bytes(8)), "should be at bytes"),
    "hole": (header(described(data_offsets=[8, 16]), data=bytes(16)), "follows a gap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_one_clear_error(case: str, tmp_path: Path) -> None:
    content, words = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises((FormatError, CorruptionError), match=words) as error:
        opened(tmp_path)
    assert "model.safetensors" in str(error.value) or repr(str(tmp_path)) in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../outside.safetensors"}, "'../outside.safetensors' is not a file name"),
        ({"a": "a.safetensors", "lost": "a.safetensors"}, "lost"),
        ({}, "no weight_map"),
        ({"a": "directory"}, "not a regular file"),
    ],
)
def test_a_hostile_index_is_one_clear_error(weight_map: Any, words: str, tmp_path: Path) -> None:
    safe({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / "directory").mkdir()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ShardCkptError, match=words):
        opened(tmp_path)


FOLDERS = {
    "DeepSpeed": ["zero_to_fp32.py", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "Megatron-LM": ["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"],
    "an unfinished step": ["__0_0.distcp"],
    "shards without an index": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
}

Door = Callable[[str], Any]
LOAD: Door = lambda path: ckpt.load(path, {"model": torch.nn.Linear(4, 2)})  # noqa: E731
FUNCTIONS: list[Door] = [LOAD, ckpt.metadata, ckpt.open, verify, inspect]
LOCAL_ONLY: list[Door] = [
    consolidate,
    lambda path: ckpt.load_from_checkpoint(tiny.TinyLM, path),
    lambda path: tiny.trainer({"pretrained": path}, max_steps=1).fit(tiny.TinyLM(), tiny.loader()),
    lambda path: tiny.trainer({}, max_steps=1).fit(tiny.TinyLM(), tiny.loader(), ckpt_path=path),
]


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Trainers run in the process of the tests here, and leave the default process group to its end."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_no_door_reads_is_named(kind: str, tmp_path: Path) -> None:
    fs, path, url = fsspec.filesystem("memory"), tmp_path / "run", f"memory:/{tmp_path}/run"
    for name in FOLDERS[kind]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
        fs.pipe_file(f"{url}/{name}", b"")
    for door in [*FUNCTIONS, *(LOCAL_ONLY if kind == "shards without an index" else [])]:
        with pytest.raises(CheckpointNotFoundError, match=rf"{re.escape(str(path))}.*it has no {ROOT_NAME}"):
            door(str(path))
    for door in FUNCTIONS:
        with pytest.raises(CheckpointNotFoundError, match=rf"{re.escape(url)}' is not a complete checkpoint"):
            door(url)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_door_can_read_is_suggested(tmp_path: Path) -> None:
    for step in (10, 20):
        dcp.save({"weight": torch.ones(2, 4)}, checkpoint_id=tmp_path / f"run/checkpoint/step-{step}", no_dist=True)
    for folder in ("run", "run/checkpoint"):
        for door in (*FUNCTIONS[:3], consolidate, *LOCAL_ONLY[2:]):
            with pytest.raises(CheckpointNotFoundError, match=r"did you mean '.*step-10' or '.*step-20'\?"):
                door(str(tmp_path / folder))
    assert ckpt.metadata(tmp_path / "run/checkpoint/step-10").tensors["weight"].shape == (2, 4)


def test_a_file_of_a_checkpoint_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """A shard file is one of safetensors, but its tensors are slices: half a tensor must not pass for all of it."""
    path = tmp_path / "a.ckpt"
    ckpt.save(path, {"model": torch.nn.Linear(4, 2), "step": 1})
    expected = r"(part of a sharded|is not a complete|path must be a folder).*did you mean '.*a\.ckpt'\?"
    for file in sorted(path.iterdir()):
        for door in [*FUNCTIONS, consolidate]:
            with pytest.raises(CheckpointNotFoundError, match=expected):
                door(str(file))
    save_file({"weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    assert ckpt.metadata(tmp_path / "model.safetensors").tensors.keys() == {"weight"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_slices_that_torch_wrote_to_safetensors_are_not_taken_for_whole_tensors(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=HuggingFaceStorageWriter(tmp_path, save_distributed=True))
    (file,) = tmp_path.iterdir()
    with pytest.raises(FormatError, match=rf"{file.name}: it has one rank's slices of tensors"):
        ckpt.load(file)
    with pytest.raises(CheckpointNotFoundError, match=f"it has no {ROOT_NAME}"):
        ckpt.load(tmp_path)
