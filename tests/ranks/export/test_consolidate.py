"""One file for torch.load out of any sharded checkpoint. Oracles: the tensors before the save, torch.save, zipfile."""

from __future__ import annotations

import itertools
import os
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError
from tests.support import tiny, zoo
from tests.support.exports import in_windows
from tests.support.faults import flip, same_bits
from tests.support.pool import ROOT, run_ranks
from tests.support.stores import Bucket, Proxy
from tests.support.warm_python import Run

TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


def test_every_tensor_has_the_bits_that_it_had_before_the_save(saved: Path, tmp_path: Path) -> None:
    expected = zoo.whole_tensors()
    expected["tied.float64"] = expected["rows.float64"]
    for mmap in (False, True):
        found = torch.load(consolidate(saved, tmp_path / f"{mmap}.pt"), mmap=mmap)
        average = found["callbacks"].pop("EMA")
        assert {k: found[k] for k in zoo.TRAINER_STATE} == zoo.TRAINER_STATE
        assert found.keys() == zoo.TRAINER_STATE.keys() | {"state_dict", "optimizer_states"}
        assert found["state_dict"].keys() == expected.keys()
        assert [k for k, t in expected.items() if not same_bits(t, found["state_dict"][k])] == []
        (optimizer,) = found["optimizer_states"]
        assert [k for k, m in optimizer["state"].items() if not same_bits(expected[k], m["exp_avg"])] == []
        assert all(m["step"].item() == 7 for m in optimizer["state"].values()) and len(optimizer["state"]) == 4
        assert optimizer["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.99), "params": list(optimizer["state"])}]
        assert same_bits(average["rows.large"], expected["both.large"])
        assert found["state_dict"]["tied.float64"].data_ptr() == found["state_dict"]["rows.float64"].data_ptr()


def test_values_that_torch_load_refuses_become_plain_and_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(UserWarning, match="made_by"):
        zoo.save(str(tmp_path / "a.ckpt"), zoo.odd_values())
    found = torch.load(consolidate(tmp_path / "a.ckpt"))["hyper_parameters"]
    assert torch.equal(found.pop("array"), torch.arange(3))
    assert found == {
        "width": 3,
        "folder": "/data/x",
        "when": "2024-01-02",
        "frozen": {1, 2},
        "queue": [1, 2],
        "span": "range(0, 3)",
        "scale": 0.5,
        "dtype": torch.bfloat16,
    }
    changed = [name for name in zoo.odd_values()["hyper_parameters"] if f"hyper_parameters/{name}: " in caplog.text]
    assert changed == ["folder", "when", "frozen", "queue", "span", "array", "made_by"]


# ── what the file is good for ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A consolidated checkpoint of 2 steps on TP2, and the whole state that it must have."""
    path = str(tmp_path_factory.mktemp("training") / "a.ckpt")
    expected = run_ranks(2, trained, path)[0]
    return str(consolidate(path)), expected


def trained(path: str) -> dict[str, Any]:
    found: dict[str, Any] = tiny.fit(TP2, 2, save=path)["state"]
    return found


def resumed(path: str, strategy: Any) -> dict[str, Any]:
    plugins = {"plugins": []} if isinstance(strategy, str) else {}
    return tiny.fit(strategy, 2, resume=path, seed=7, **plugins)


@pytest.mark.parametrize(("world", "strategy"), [(1, "auto"), (2, {})])
def test_training_resumes_from_it(training: tuple[str, dict[str, Any]], world: int, strategy: Any) -> None:
    file, expected = training
    for found in run_ranks(world, resumed, file, strategy):
        assert tiny.differences(expected, found["state"]) == [] and found["step"] == 2


def test_a_module_loads_from_it(training: tuple[str, dict[str, Any]]) -> None:
    file, expected = training
    module = tiny.TinyLM.load_from_checkpoint(file)
    weights = {f"model/{k}": v for k, v in module.state_dict().items()}
    assert tiny.differences(weights, {k: v for k, v in expected.items() if k.startswith("model/")}) == []
    assert module.hparams == {"optimizer": "adamw", "build_late": False, "frozen": True}


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_writes_next_to_the_folder_and_says_so(copy: Path, python: Run) -> None:
    done = python(["-m", "lightning_shardckpt.consolidate", f"{copy}/"], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    path = f"{copy}.consolidated"
    assert done.stdout == f"{path} is written\n" and "state_dict" in torch.load(path)
    assert sorted(p.name for p in copy.parent.iterdir()) == ["zoo.ckpt", "zoo.ckpt.consolidated"]


def test_the_suffix_of_the_output_chooses_the_format(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy.parent / "a.safetensors"
    assert main(["consolidate", str(copy), "--output_file", str(file), "--key_mapping", "complex128$=null"]) == 0
    assert capsys.readouterr().out == f"{file} is written\n"
    assert "rows.float64" in load_file(file)


def _unfinished(copy: Path) -> Path:
    (copy / "checkpoint.index.json").unlink()
    return copy


WRONG_FOLDERS = {
    "missing": (lambda c: c.parent / "zo.ckpt", r"zo\.ckpt': there is nothing .*; did you mean '.*zoo\.ckpt'\?"),
    "file inside": (lambda c: c / "checkpoint.index.json", r"is a part of .*; did you mean '.*zoo\.ckpt'\?"),
    "parent": (lambda c: c.parent, r"is not a complete checkpoint.*did you mean '.*zoo\.ckpt'\?"),
    "unfinished": (_unfinished, r"it has no checkpoint\.index\.json"),
}


@pytest.mark.parametrize("kind", WRONG_FOLDERS)
def test_a_wrong_folder_is_explained(kind: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = WRONG_FOLDERS[kind]
    path = make(copy)
    with pytest.raises(CheckpointNotFoundError, match=message):
        consolidate(path, copy.parent / "out")
    assert main(["consolidate", str(path), "--output_file", str(copy.parent / "out")]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_an_existing_output_is_not_overwritten(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = copy.parent / "zoo.ckpt.consolidated"
    output.write_text("mine")
    assert main(["consolidate", str(copy)]) == 1
    assert "already exists. Choose a different path by providing `--output_file`" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert main(["consolidate", str(copy), "--output_file", str(copy.parent / "new" / "b.pt")]) == 0
    assert torch.load(copy.parent / "new" / "b.pt")["epoch"] == 3


def test_an_output_inside_a_checkpoint_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((path.name, path.read_bytes()) for path in copy.iterdir())
    for name, more in itertools.product(("checkpoint.index.json", "new"), ([], ["--format", "safetensors"])):
        assert main(["consolidate", str(copy), "--output_file", f"{copy}/{name}", "--overwrite", *more]) == 1
        assert "lies inside a checkpoint" in capsys.readouterr().err
        with chdir(copy), pytest.raises(ValueError, match=f"'{name}' lies inside a checkpoint"):
            consolidate(copy, name, overwrite=True)
    assert sorted((path.name, path.read_bytes()) for path in copy.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_checkpoint_in_a_store_is_exported_with_the_same_bytes_and_read_once(
    format: Any, s3: Bucket, s3_port: int, tmp_path: Path
) -> None:
    rows, url = 3 << 10, s3.url("a.ckpt")
    run_ranks(2, zoo.save_large, str(tmp_path / "a.ckpt"), rows)
    expected = consolidate(tmp_path / "a.ckpt", tmp_path / "a", format=format)
    store, root = fsspec.core.url_to_fs(url, **s3.options)
    for file in (tmp_path / "a.ckpt").iterdir():
        store.put_file(str(file), f"{root}/{file.name}")
    with Proxy(s3_port) as proxy:
        options = replace(s3, port=proxy.port).options
        found = consolidate(url, tmp_path / "b", format=format, storage_options=options)
        assert proxy.sent_bytes <= 1.05 * expected.stat().st_size
    assert found.read_bytes() == expected.read_bytes()


def test_a_flipped_bit_anywhere_is_found_in_windows_of_any_size(copy: Path) -> None:
    file = copy / "model-dist-00000-shard-00001.safetensors"
    begin, end = 8 + int.from_bytes(file.read_bytes()[:8], "little"), file.stat().st_size
    for offset in {begin, end - 1, *range(begin, end, 7919)}:
        flip(file, offset)
        with pytest.raises(CorruptionError, match=f"corrupted data of '.*' in {file.name}, written by rank"):
            in_windows(copy, copy.parent / "out", 3000)
        flip(file, offset)
    assert [p.name for p in copy.parent.iterdir()] == ["zoo.ckpt"]
