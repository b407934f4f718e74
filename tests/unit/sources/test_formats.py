"""Checkpoints of other programs as sources. Oracles: the safetensors library, torch.save, and the tensors."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    ShardCkptError,
)
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.reading import ReadTarget, read_targets
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.transfer.file_filler import Region, fill

TENSORS = {
    "a.weight": torch.arange(35.0).reshape(5, 7),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c.scalar": torch.tensor(3),
    "d.empty": torch.empty(0, 3),
    "e.mask": torch.tensor([True, False]),
}
INDEX = "model.safetensors.index.json"


def read(source: Source) -> dict[str, Tensor]:
    """All tensors, and a few columns of them that must be the same."""
    found = {}
    for key, spec in source.components()["model"].tensors.items():
        dtype = next(t.dtype for t in [*TENSORS.values(), torch.zeros(1)] if _name(t.dtype) == spec.dtype)
        target = ReadTarget("model", key, torch.empty(spec.shape, dtype=dtype))
        read_targets(source, [target])
        found[key] = target.tensor
    return found


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}[dtype]


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)


def opened(path: Path) -> Source:
    return open_source(str(path), StorageRouter())[0]


def in_two(folder: Path, ending: str, save: Callable[[Any, Path], None]) -> None:
    names = list(TENSORS)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    files = [f"{stem}-00001-of-00002.{ending}", f"{stem}-00002-of-00002.{ending}"]
    for file, part in zip(files, (names[:2], names[2:]), strict=True):
        save({k: TENSORS[k] for k in part}, folder / file)
    weight_map = {k: files[i > 1] for i, k in enumerate(names)}
    index = INDEX if ending == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def lightning(folder: Path) -> Path:
    torch.save({"state_dict": TENSORS, "epoch": 3, "pytorch-lightning_version": "2.6.6"}, folder / "x.ckpt")
    return folder / "x.ckpt"


def one_file(folder: Path, name: str, save: Callable[[Any, Path], None], content: Any = TENSORS) -> Path:
    save(content, folder / name)
    return folder if name in ("model.safetensors", "pytorch_model.bin") else folder / name


def safe(content: Any, path: Path) -> None:
    safetensors.torch.save_file(content, path, metadata={"format": "pt", "who": "somebody"})


MADE: dict[str, Callable[[Path], Any]] = {
    "a directory with one file": lambda p: one_file(p, "model.safetensors", safe),
    "a directory with an index": lambda p: in_two(p, "safetensors", safe),
    "a file of safetensors": lambda p: one_file(p, "w.safetensors", safe),
    "the same by another name": lambda p: one_file(p, "weights", safe),
    "an old directory": lambda p: one_file(p, "pytorch_model.bin", torch.save),
    "an old directory with an index": lambda p: in_two(p, "bin", torch.save),
    "a state dict": lambda p: one_file(p, "w.pt", torch.save),
    "a state dict called model": lambda p: one_file(p, "w.pth", torch.save, {"model": TENSORS, "optimizer": {}}),
    "a checkpoint of Lightning": lightning,
}


@pytest.mark.parametrize("kind", MADE)
def test_weights_are_read_from(kind: str, tmp_path: Path) -> None:
    source = opened(MADE[kind](tmp_path) or tmp_path)
    assert equal(read(source), TENSORS)
    file = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)  # as consolidate copies them
    region = Region(8, TENSORS["a.weight"].nbytes, ("model", "a.weight"))
    fill(file, [region], source, lambda n: None)
    os.close(file)
    assert (tmp_path / "out").read_bytes() == bytes(8) + TENSORS["a.weight"].numpy().tobytes()
    source.close()


def test_a_cache_of_links_is_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    in_two(blobs, "safetensors", safe)
    for number, name in enumerate(sorted(os.listdir(blobs))):
        (blobs / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert equal(read(opened(snapshot)), TENSORS)
    single = tmp_path / "link.safetensors"
    safe(TENSORS, blobs / "one")
    single.symlink_to(blobs / "one")
    assert equal(read(opened(single)), TENSORS)


@pytest.mark.parametrize("kind", ["file", "index", "torch"])
def test_names_of_compiled_modules_are_those_of_the_modules(kind: str, tmp_path: Path) -> None:
    """Oracle: the state of the module that has not been compiled."""
    whole = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    plain = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    state = {name.replace("1.", "1._orig_mod."): tensor for name, tensor in plain.items()}
    path = tmp_path / {"file": "x.safetensors", "index": "", "torch": "x.pt"}[kind]
    if kind == "index":
        safe(state, tmp_path / "model-1.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "model-1.safetensors")}))
    else:
        (safe if kind == "file" else torch.save)(state, path)
    assert ckpt.metadata(path).tensors.keys() == plain.keys()
    again = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    ckpt.load(path, {"model": again})
    assert equal({**again.state_dict()}, plain)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    safe({"a.w": torch.zeros(1), "a._orig_mod.w": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match=r"'a\..*' in x.* and 'a\.w' in x.* are two tensors of that name"):
        opened(tmp_path / "x.safetensors")


def test_safetensors_are_taken_before_older_files_and_not_replaced_by_them(tmp_path: Path) -> None:
    in_two(tmp_path, "safetensors", safe)
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert equal(read(opened(tmp_path)), TENSORS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptionError, match=r"file model-00002-of-00002.safetensors: the file is missing"):
        opened(tmp_path)


def test_tensors_of_any_strides_are_read(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    state = {"turned": base.t(), "overlaps": base[1:3], "every": base[:, ::2], "whole": base}
    state["wide"] = base[0].expand(3, 8)
    torch.save(state, tmp_path / "x.pt")
    assert equal(read(opened(tmp_path / "x.pt")), state)
    with ckpt.open(tmp_path / "x.pt") as checkpoint:
        assert torch.equal(checkpoint["turned"][2:5, 1:], state["turned"][2:5, 1:])


@pytest.mark.parametrize("rows", [4, 1000])
def test_an_archive_that_was_packed_again_is_equal_or_refused_by_name(rows: int, tmp_path: Path) -> None:
    state = {"w": torch.arange(rows * 4.0).view(rows, 4), "b": torch.ones(3)}
    torch.save(state, tmp_path / "x.pt")
    for name, method in (("stored", zipfile.ZIP_STORED), ("packed", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / name, "w", method) as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
        assert equal(torch.load(tmp_path / name), state)  # the oracle, which does not map the file
    assert equal(read(opened(tmp_path / "stored")), state)
    with pytest.raises(FormatError, match=r"packed' was packed again .*: 'x/data\.pkl' in it is compressed"):
        opened(tmp_path / "packed")


def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)}, path)
    source = opened(path)
    os.truncate(path, 5 << 20)
    with pytest.raises(CorruptionError, match=r"x.pt"):
        read(source)
    with pytest.raises(CorruptionError, match=r"x.pt'.* torch.load cannot read it"):
        opened(path)


def test_what_is_no_file_of_weights_says_so(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "net": {"a": [torch.zeros(1)]}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint: it has no state_dict, nor the state of a module"):
        opened(tmp_path / "x.pt")
    torch.save(TENSORS, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptionError, match=r"torch.load cannot read it: .*mmap can only be used"):
        opened(tmp_path / "old.bin")


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
    "longest": (header(b"{}", (1 << 64) - 1), "the header claims 18446744073709551615 bytes of a file of 10"),
    "no JSON": (header(b"\xff" * 20), "not valid JSON"),
    "dtype": (header(described(dtype="F4"), data=bytes(8)), "describes a tensor wrongly"),
    "other size": (header(described(data_offsets=[0, 4]), data=bytes(8)), "does not fill 4 bytes"),
    "behind the end": (header(described(shape=[200], data_offsets=[0, 800]), data=bytes(8)), "should be at bytes"),
    "hole": (header(described(data_offsets=[8, 16]), data=bytes(16)), "follows a gap"),
    "list": (header(b'{"w": [1, 2]}'), "describes a tensor wrongly"),
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
    ("index", "words"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "'../outside.safetensors' is not a file name"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd' is not a file name"),
        ({"weight_map": {"a": 3}}, "3 is not a file name"),
        ({"weight_map": {"a": "model-00001-of-00001.safetensors", "lost": "model-00001-of-00001.safetensors"}}, "lost"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "no weight_map"),
        ({"weight_map": {"a": "link.safetensors"}}, "file link.safetensors: the file is missing"),
        ({"weight_map": {"a": "directory"}}, "not a regular file"),
    ],
)
def test_a_hostile_index_is_one_clear_error(index: Any, words: str, tmp_path: Path) -> None:
    safe({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nothing")
    (tmp_path / "directory").mkdir()
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ShardCkptError, match=words):
        opened(tmp_path)
