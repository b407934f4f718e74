"""A hostile directory of torch.distributed.checkpoint can make a load fail, and nothing else."""

from __future__ import annotations

import collections
import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import lightning_shardckpt as ckpt
from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CorruptionError, FormatError
from tests.support import tiny

MODEL = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
OPTIMIZER = {
    "state": {name: {"step": torch.tensor(3.0), "exp_avg": tensor * 2} for name, tensor in MODEL.items()},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(MODEL)}],
}


def save(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is not distributed here
        dcp.save(state, checkpoint_id=path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "a", {"model": MODEL, "optim": OPTIMIZER, "notes": {"x": [1, "b"]}})


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "a"))


def rewrite(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Let ``change`` edit the metadata, or return another."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


class Bad:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/executed",)


class Innocent:
    pass


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", [Bad(), Innocent(), print, collections.Counter("a"), torch.nn.Linear, type])
def test_a_name_that_is_not_known_is_refused_by_name(value: Any, protocol: int, copy: Path) -> None:
    (copy / ".metadata").write_bytes(pickle.dumps(value, protocol))
    with pytest.raises(FormatError, match=r"names '(posix|os|tests|builtins|__builtin__|collections|torch)[\w.]*'"):
        load_full(str(copy))
    assert not os.path.exists("/tmp/executed")


HOSTILE = {
    "a memo of gigabytes": b"\x80\x04Nr\xff\xff\xff\xff.",
    "text that is longer than the file": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a call of data": b"\x80\x04K\x01)R.",
    "nothing": b"",
    "nesting": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_at_once_and_in_little_memory(name: str, copy: Path) -> None:
    (copy / ".metadata").write_bytes(HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=r"\.metadata"):
        load_full(str(copy))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


BASE = torch.arange(48.0)
TENSORS = {
    "plain": BASE.view(6, 8),
    "channels last": BASE.view(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "transposed": BASE.view(6, 8).t(),
    "expanded": BASE[:6].view(6, 1).expand(6, 5),
    "conjugate": torch.complex(BASE, -BASE).view(6, 8).conj(),
    "negative": torch.complex(BASE, BASE + 1).conj().imag,
    "part": BASE[5:17],
    "bfloat16": BASE.to(torch.bfloat16),
    "zero dims": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "large and transposed": torch.arange(100_000.0).view(1000, 100).t(),
    "large and conjugate": torch.complex(torch.arange(50_000.0), torch.ones(50_000)).conj(),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("odd") / "a", dict(TENSORS))


def test_a_tensor_of_any_strides_is_read(odd: Path, tmp_path: Path) -> None:
    expected = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is not distributed here
        dcp.load(expected, checkpoint_id=odd)  # the oracle
    assert tiny.differences({k: v.resolve_conj().resolve_neg() for k, v in TENSORS.items()}, expected) == []
    assert tiny.differences(expected, load_full(str(odd))["state_dict"]) == []
    with ckpt.open(odd) as checkpoint:
        assert torch.equal(checkpoint["channels last"][0, :, 1], expected["channels last"][0, :, 1])
    consolidate(odd, tmp_path / "whole.pt")
    assert tiny.differences(expected, torch.load(tmp_path / "whole.pt")["state_dict"]) == []


WEIGHT = MetadataIndex("model.a.weight", [0, 0])


def _place(metadata: Metadata, index: MetadataIndex = WEIGHT, **changes: Any) -> None:
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)


def _chunks(metadata: Metadata, *chunks: tuple[list[int], list[int]]) -> None:
    found = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in chunks]
    metadata.state_dict_metadata["model.a.weight"].chunks = found
    for chunk in found:
        place = metadata.storage_data[MetadataIndex("model.a.weight", [0, 0])]
        metadata.storage_data[MetadataIndex("model.a.weight", chunk.offsets)] = place


def _groups(metadata: Metadata) -> None:
    """Let one value take the place of all that is stored of param groups."""
    metadata.planner_data = {k: old for k, old in metadata.planner_data.items() if old[1] != "param_groups"}
    metadata.planner_data["notes.x"] = ("optim", "param_groups", 0, "lr")


def _size(metadata: Metadata, size: list[int]) -> None:
    metadata.state_dict_metadata["model.a.weight"].size = torch.Size(size)


CHANGES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "absolute": (lambda m: _place(m, relative_path="/etc/passwd"), "is not a file name"),
    "missing file": (lambda m: _place(m, relative_path="__9_0.distcp"), r"file __9_0\.distcp: the file is missing"),
    "too short": (lambda m: _place(m, length=5), "torch.load does not read it"),
    "transformed": (lambda m: _place(m, transform_descriptors=["zstd"]), "stored through"),
    "a gap": (lambda m: _chunks(m, ([0, 0], [1, 3])), r"3 of 6 elements are covered"),
    "an overlap": (lambda m: _chunks(m, ([0, 0], [2, 3]), ([1, 0], [2, 3])), "lies outside|overlap"),
    "a huge shape": (lambda m: _size(m, [1 << 40, 1 << 40]), r"more than 2\^63 bytes"),
    "no place": (lambda m: m.storage_data.pop(WEIGHT) and None, "no storage info of the chunk"),
    "a class": (lambda m: replace(m, planner_data=Innocent()), r"names 'tests\..*test_dcp_hostile\.Innocent'"),
    "executed": (lambda m: replace(m, planner_data=Bad()), r"names '(posix|os)\.system'"),
    "no metadata": (lambda m: {"a": 1}, "where a Metadata is expected"),
    "a group without parameters": (_groups, "not laid out as a checkpoint of torch.*params"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lies_is_one_error_that_says_where(copy: Path, name: str) -> None:
    change, message = CHANGES[name]
    rewrite(copy, change)
    with pytest.raises((FormatError, CorruptionError), match=message) as error:
        load_full(str(copy))
    assert repr(str(copy)) in str(error.value)


def _linked(copy: Path) -> None:
    shutil.move(copy / "__0_0.distcp", copy.parent / "elsewhere")
    (copy / "__0_0.distcp").symlink_to(copy.parent / "elsewhere")


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a link": (_linked, "is not a regular file"),
    "a pipe": (lambda c: os.unlink(c / "__0_0.distcp") or os.mkfifo(c / "__0_0.distcp"), "not a regular file"),
    "truncated": (lambda c: os.truncate(c / "__0_0.distcp", 4000), r"__0_0\.distcp, bytes \d+ to \d+ are wanted"),
    "empty": (lambda c: (c / ".metadata").write_bytes(b""), r"\.metadata"),
    "meta is executed": (lambda c: (c / "meta.pt").write_bytes(pickle.dumps(Bad())), r"meta\.pt.*not read it"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_not_what_they_should_be_are_named(copy: Path, name: str) -> None:
    change, message = FILES[name]
    change(copy)
    with pytest.raises((FormatError, CorruptionError), match=message):
        load_full(str(copy))
