"""One file for torch.load out of any sharded checkpoint. Oracles: the tensors before the save, torch.save, zipfile."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import zipfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate, write_export
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError
from lightning_shardckpt.export.torch_export import PlainValues
from lightning_shardckpt.export.whole_files import Options
from lightning_shardckpt.state.json_tree import Dropped
from lightning_shardckpt.system.text import size_text
from tests.support import tiny, zoo
from tests.support.faults import flip, in_small_windows, same_bits
from tests.support.pool import ROOT, run_ranks
from tests.support.warm_python import Run

TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


@pytest.mark.parametrize("mmap", [False, True])
def test_every_tensor_has_the_bits_that_it_had_before_the_save(saved: Path, tmp_path: Path, mmap: bool) -> None:
    file = consolidate(saved, tmp_path / "out.pt")
    found = torch.load(file, mmap=mmap)
    expected = zoo.whole_tensors()
    expected["tied.float64"] = expected["rows.float64"]
    assert found["state_dict"].keys() == expected.keys()
    assert [k for k, t in expected.items() if not same_bits(t, found["state_dict"][k])] == []
    moments = found["optimizer_states"][0]["state"]
    assert [k for k in moments if not same_bits(expected[k], moments[k]["exp_avg"])] == []
    assert all(m["step"].item() == 7 for m in moments.values()) and len(moments) == 4
    assert same_bits(found["callbacks"]["EMA"]["rows.large"], expected["both.large"])
    assert found["state_dict"]["tied.float64"].data_ptr() == found["state_dict"]["rows.float64"].data_ptr()


def test_the_trainer_state_is_at_the_top_level_as_lightning_has_it(saved: Path, tmp_path: Path) -> None:
    found = torch.load(consolidate(saved, tmp_path / "out.pt"))
    del found["callbacks"]["EMA"]
    assert {k: found[k] for k in zoo.TRAINER_STATE} == zoo.TRAINER_STATE
    assert found.keys() == zoo.TRAINER_STATE.keys() | {"state_dict", "optimizer_states"}
    group = found["optimizer_states"][0]["param_groups"][0]
    assert group == {"lr": 0.5, "betas": (0.9, 0.99), "params": list(found["optimizer_states"][0]["state"])}


def test_the_archive_is_aligned_and_has_the_records_of_torch_save(saved: Path, tmp_path: Path) -> None:
    file, judge = consolidate(saved, tmp_path / "out.pt"), tmp_path / "judge.pt"
    torch.save(torch.load(file), judge)
    records = list[dict[str, bytes]]()
    for path in (file, judge):
        records.append({})
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            for info in archive.infolist():
                raw.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
                raw.seek(begin := info.header_offset + 30 + name + extra)
                assert begin % 64 == 0
                records[-1][info.filename.partition("/")[2]] = raw.read(info.file_size)
    assert records[0].keys() == records[1].keys()
    assert [name for name in records[1] if name.startswith("data/") and records[0][name] != records[1][name]] == []


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


def test_nothing_moves_or_goes_without_a_word() -> None:
    gone, plain = Dropped("torch.relu", "a function"), PlainValues()
    found = plain.convert(
        {"list": [1, gone, 3], "tuple": (gone, 5), "set": {Path("a"), "a", gone}, "keys": {Path("a"): 1, "a": 2}}
    )
    assert found == {"list": [1, None, 3], "tuple": (None, 5), "set": {"a"}, "keys": {"a": 2}}
    told = "\n".join(plain.changed)
    assert "list/1: left out" in told and "tuple/0: left out" in told and told.count("left out, as it was") == 3
    assert "set: 1 of it left out, since" in told and "keys: 1 of it left out, since" in told


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


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        *((1, "auto"), (2, {})),
        *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.sweep]) for case in ((2, "ddp"), (4, TP2))),
    ],
)
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


def test_the_command_writes_next_to_the_folder_and_says_what(copy: Path, python: Run) -> None:
    done = python(["-m", "lightning_shardckpt.consolidate", f"{copy}/"], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    path = f"{copy}.consolidated"
    size = re.escape(size_text(os.path.getsize(path)))
    start = rf"{re.escape(path)}: one file for torch\.load, {size} in \d+\.\d s\."
    said = re.fullmatch(rf"{start} Load it by (torch\.load\(.*?\)).*\n", done.stdout)
    assert said is not None
    assert "state_dict" in eval(said[1], {"torch": torch})
    assert (copy.parent / "zoo.ckpt.consolidated").is_file()
    assert sorted(p.name for p in copy.parent.iterdir()) == ["zoo.ckpt", "zoo.ckpt.consolidated"]


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["consolidate"], ["consolidate", "a", "--format", "b"], [], ["other"]):
        assert main(arguments) == 2
    assert "usage: python -m lightning_shardckpt" in capsys.readouterr().err


def test_the_suffix_of_the_output_chooses_the_format(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = copy.parent / "a.safetensors", copy.parent / "chunks"
    assert main(["consolidate", str(copy), "--output_file", str(file), "--key_mapping", "complex128$=null"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: safetensors, {size_text(file.stat().st_size)} in ")
    expected = torch.load(consolidate(copy, key_mapping={"complex128$": None}))["state_dict"]
    found = load_file(file)
    assert found.keys() <= expected.keys() and all(same_bits(found[name], expected[name]) for name in found)
    arguments = ["--format", "safetensors", "--split", "chunks", "--key_mapping", "complex128$=null"]
    assert main(["consolidate", str(copy), "--output_file", str(folder), *arguments]) == 0
    total = sum(one.stat().st_size for one in folder.iterdir())
    assert f"{folder}: safetensors, {size_text(total)} in " in capsys.readouterr().out
    for name, format in (("b.safetensors", "torch"), ("b.pt", "safetensors"), ("b.ckpt", "huggingface")):
        output = str(copy.parent / name)
        assert main(["consolidate", str(copy), "--output_file", output, "--format", format]) == 2
        assert f"ends in {Path(name).suffix} is not one of format '{format}'" in capsys.readouterr().err
        with pytest.raises(ValueError, match="choose another name"):
            consolidate(copy, output, format=format)  # type: ignore[arg-type]
        assert not os.path.exists(output)


def _file_inside(copy: Path) -> Path:
    return copy / "checkpoint.index.json"


def _plain_file(copy: Path) -> Path:
    torch.save({}, copy.parent / "plain.ckpt")
    return copy.parent / "plain.ckpt"


def _unfinished(copy: Path) -> Path:
    (copy / "checkpoint.index.json").unlink()
    return copy


NOT_OURS = "Only sharded checkpoints saved with lightning-shardckpt or torch.* is not in that format"
WRONG_FOLDERS = {
    "missing": (lambda c: c.parent / "zo.ckpt", r"does not exist: .*zo\.ckpt; did you mean '.*zoo\.ckpt'\?"),
    "file inside": (_file_inside, r"must be a folder, .*; did you mean '.*zoo\.ckpt'\?"),
    "parent": (lambda c: c.parent, rf"{NOT_OURS}: .*did you mean '.*zoo\.ckpt'\?"),
    "plain file": (_plain_file, r"must be a folder, .* is a file; a sharded checkpoint is a directory"),
    "unfinished": (_unfinished, r"the rest of an unfinished save: it has no checkpoint\.index\.json"),
}


@pytest.mark.parametrize("kind", WRONG_FOLDERS)
def test_a_wrong_folder_is_explained(kind: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = WRONG_FOLDERS[kind]
    path = make(copy)
    with pytest.raises(CheckpointNotFoundError, match=message):
        consolidate(path)
    assert main(["consolidate", str(path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_an_existing_output_is_not_overwritten(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = copy.parent / "zoo.ckpt.consolidated"
    output.write_text("mine")
    assert main(["consolidate", str(copy)]) == 1
    assert "already exists. Choose a different path by providing `--output_file`" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert main(["consolidate", str(copy), "--output_file", str(copy.parent / "new" / "b.pt")]) == 0
    assert torch.load(copy.parent / "new" / "b.pt")["epoch"] == 3


@pytest.mark.parametrize("name", ["checkpoint.index.json", "new"])
def test_an_output_inside_a_checkpoint_is_refused(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where in (copy, copy / ".", shutil.copytree(copy, copy.parent / "other.ckpt")):
        before = sorted((path.name, path.read_bytes()) for path in Path(where).iterdir())
        for more in ([], ["--format", "safetensors"]):
            assert main(["consolidate", str(copy), "--output_file", f"{where}/{name}", "--overwrite", *more]) == 1
            assert "lies inside a checkpoint" in capsys.readouterr().err
        with chdir(where), pytest.raises(ValueError, match=f"'{name}' lies inside a checkpoint"):
            consolidate(copy, name, overwrite=True)
        assert sorted((path.name, path.read_bytes()) for path in Path(where).iterdir()) == before


def test_an_error_of_what_is_behind_a_url_is_a_message(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", "hdfs://bucket/a.ckpt", "--output_file", str(copy.parent / "a.pt")]) == 1
    said = capsys.readouterr().err
    assert "'hdfs://bucket/a.ckpt' can't be opened" in said and "s3://" in said and "Traceback" not in said
    assert main(["consolidate", str(copy), "--output_file", ""]) == 1
    assert "is empty" in capsys.readouterr().err


# ── several threads ───────────────────────────────────────────────────────────────────────────────────────────────


def test_windows_of_any_size_make_the_same_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = consolidate(saved, tmp_path / "a.pt").read_bytes()
    for nbytes in (700, 70_000):
        tuning = in_small_windows(monkeypatch, nbytes)
        assert write_export(saved, tmp_path / f"{nbytes}.pt", Options(), tuning=tuning).read_bytes() == expected


def test_a_flipped_bit_anywhere_is_found_whoever_reads_it(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = in_small_windows(monkeypatch, 3000)
    file = copy / "model-dist-00000-shard-00001.safetensors"
    begin, end = 8 + int.from_bytes(file.read_bytes()[:8], "little"), file.stat().st_size
    for offset in {begin, end - 1, *range(begin, end, 7919)}:
        flip(file, offset)
        with pytest.raises(CorruptionError, match=f"corrupted data of '.*' in {file.name}, written by rank"):
            write_export(copy, None, Options(), tuning=tuning)
        flip(file, offset)
    assert [p.name for p in copy.parent.iterdir()] == ["zoo.ckpt"]


@pytest.mark.parametrize("kind", ["full disk", "interrupt in a thread", "interrupt by a user"])
def test_an_error_of_any_thread_ends_all_and_leaves_nothing_behind(
    kind: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = in_small_windows(monkeypatch, 3000)
    pwrite, calls = os.pwrite, itertools.count(1)

    def failing(*arguments: Any) -> int:
        if next(calls) == 40:
            if kind == "full disk":
                raise OSError(28, "No space left on device")
            if kind == "interrupt in a thread":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)  # it reaches the main thread
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError if kind == "full disk" else KeyboardInterrupt) as raised:
        write_export(copy, None, Options(), tuning=tuning)
    assert kind != "full disk" or f"No space left on device: '{copy.parent}/.tmp-" in str(raised.value)
    assert [p.name for p in copy.parent.iterdir()] == ["zoo.ckpt"]


def test_short_writes_are_continued(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, pwrite = consolidate(saved, tmp_path / "a.pt").read_bytes(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[: len(data) // 2 + 1], offset))
    assert consolidate(saved, tmp_path / "b.pt").read_bytes() == expected


# ── cost ──────────────────────────────────────────────────────────────────────────────────────────────────────────
