"""Safetensors and filtered, renamed, converted files out of any checkpoint. Oracles: the safetensors library, torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.export.torch_export import sort_by_layer
from tests.support import pipes as pipelines
from tests.support import tiny, zoo
from tests.support.exports import in_windows
from tests.support.faults import same_bits
from tests.support.pool import ROOT, run_ranks

NO_C128 = {"key_mapping": {r"\.complex128$": None}}
CHUNKS = {"format": "safetensors", "split": "chunks", "size_per_shard": 0.05, **NO_C128}


def expected_tensors() -> dict[str, torch.Tensor]:
    return {k: t for k, t in zoo.whole_tensors().items() if not k.endswith("complex128")}


def wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names under which something is missing, too much or has other bits."""
    return sorted(
        k
        for k in found.keys() | expected.keys()
        if k not in found or k not in expected or not same_bits(found[k], expected[k])
    )


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit but for NaNs: which of their bits survive a conversion depends on where torch's vectors begin."""
    if same_bits(a, b) or not a.is_floating_point() or (a.dtype, a.shape) != (b.dtype, b.shape):
        return same_bits(a, b)
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0))


def in_directory(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """All tensors of the files that the index names, each from the file that it says."""
    index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    found = {tensor: files[name][tensor] for tensor, name in index["weight_map"].items()}
    assert sum(map(len, files.values())) == len(found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


# ── safetensors ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_file_of_safetensors_has_every_bit_and_loads_with_the_library(saved: Path, tmp_path: Path) -> None:
    file = consolidate(saved, tmp_path / "out.safetensors", format="safetensors", **NO_C128)
    assert wrong(load_file(file), expected_tensors()) == []
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "writer": "lightning-shardckpt", "tied.float64": "rows.float64"}
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begins = {name: one["data_offsets"][0] for name, one in header.items() if name != "__metadata__"}
    assert (8 + length) % 64 == 0
    assert [n for n, t in expected_tensors().items() if begins[n] % t.element_size()] == []


def test_chunks_keep_their_limit_and_have_an_index(saved: Path, tmp_path: Path) -> None:
    folder = consolidate(saved, tmp_path / "out", **CHUNKS)
    assert wrong(in_directory(folder), expected_tensors()) == []
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    limit = 0.05 * (1 << 20)
    for name in names:
        found = load_file(folder / name)
        assert sum(t.nbytes for t in found.values()) <= limit or len(found) == 1
    assert len(names) > 5


def test_one_file_per_tensor_and_names_that_differ_in_punctuation_only(saved: Path, tmp_path: Path) -> None:
    rules = {r"\.complex128$": None, r"^rows\.(b.*)": r"x.\1-c", r"^columns\.(b.*)": r"x.\1.c"}
    rules |= {r"^both\.(b.*)": r"X.\1-c"}
    folder = consolidate(saved, tmp_path / "out", format="safetensors", split="one_file_per_tensor", key_mapping=rules)
    found = in_directory(folder)
    assert {"x.bfloat16-c", "x.bfloat16.c", "X.bfloat16-c"} <= found.keys()
    assert len(list(folder.glob("*.safetensors"))) == len(found) == len(expected_tensors())
    assert same_bits(found["X.bfloat16-c"], zoo.whole_tensors()["both.bfloat16"])


def test_windows_of_any_size_make_the_same_files(saved: Path, tmp_path: Path) -> None:
    whole = [consolidate(saved, tmp_path / "a.pt")]
    parts = [in_windows(saved, tmp_path / "b.pt", 3000)]
    whole += sorted(consolidate(saved, tmp_path / "a", **CHUNKS).iterdir())
    parts += sorted(in_windows(saved, tmp_path / "b", 3000, **CHUNKS).iterdir())
    assert [file.read_bytes() for file in whole] == [file.read_bytes() for file in parts]
    converted = in_directory(consolidate(saved, tmp_path / "c", **CHUNKS, dtype="bfloat16"))
    found = in_directory(in_windows(saved, tmp_path / "d", 3000, **CHUNKS, dtype="bfloat16"))
    assert found.keys() == converted.keys()
    assert [k for k, t in converted.items() if not same_numbers(t, found[k])] == []


# ── the optimizer ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of 2 steps of AdamW on FSDP2, and the whole state that it must have."""
    path = tmp_path_factory.mktemp("trained") / "a.ckpt"
    return path, run_ranks(2, trained_state, str(path))[0]


def trained_state(path: str) -> dict[str, Any]:
    found: dict[str, Any] = tiny.fit({}, 2, save=path)["state"]
    return found


def test_the_optimizer_is_tensors_and_json(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, expected = trained
    folder = consolidate(path, tmp_path / "out", format="safetensors", optimizer=True)
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "optimizer.json", "optimizer.safetensors"]
    found = load_file(folder / "optimizer.safetensors")
    moments = {k.replace("/state/", "/"): v for k, v in expected.items() if k.endswith(("/exp_avg", "/exp_avg_sq"))}
    document = json.loads((folder / "optimizer.json").read_text())["0"]
    in_json = {f"0/{p}/{n}" for n, one in document["values"].items() for item in one for p in item["params"]}
    assert wrong(found, {k: v for k, v in moments.items() if k not in in_json}) == []
    assert [group["hyper"]["weight_decay"] for group in document["groups"].values()] == [0.1, 0.0]


def test_names_of_an_optimizer_follow_those_of_the_model(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = trained
    options: dict[str, Any] = {"key_mapping": {"embed.weight": "m.wte", r"^head\.": None, "^": "m."}}
    folder = consolidate(path, tmp_path / "out", format="safetensors", optimizer=True, **options)
    found = torch.load(consolidate(path, tmp_path / "out.pt", **options))
    names, (state,) = load_file(folder / "model.safetensors").keys(), found["optimizer_states"]
    assert "m.wte" in names and names == found["state_dict"].keys() and not any("head" in name for name in names)
    params = [p for group in state["param_groups"] for p in group["params"]]
    groups = json.loads((folder / "optimizer.json").read_text())["0"]["groups"].values()
    assert [p for group in groups for p in group["params"]] == params
    assert {k.split("/")[1] for k in load_file(folder / "optimizer.safetensors")} <= state["state"].keys() <= {*params}
    assert {*params} <= names


def test_a_plain_torch_optimizer_loads_the_file_and_goes_on(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, expected = trained
    found = torch.load(consolidate(path, tmp_path / "out.pt"))
    module = tiny.TinyLM()
    module.load_state_dict(found["state_dict"])
    optimizer = module.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert tiny.differences(expected, tiny.full_state(module, [optimizer])) == []


def test_an_optimizer_whose_order_is_not_known_is_refused_by_name() -> None:
    stored = ["embed.w", "layers.0.w", "layers.1.w", "head.w", "layers.2.w", "layers.3.w"]  # head: made first
    with pytest.raises(StateError, match=r"'head\.w' is stored between the layers .*--optimizer false"):
        sort_by_layer(stored)


@pytest.mark.slow
def test_parameters_are_in_the_order_of_the_model_where_each_stage_has_every_other_layer(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    states = run_ranks(2, pipelines.train, pipelines.LOOPED, 2, path, None, "adamw", 1)
    found = torch.load(consolidate(path))
    module = pipelines.Deep("adamw")
    module.load_state_dict(found["state_dict"])
    optimizer = module.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(found["optimizer_states"][0])
    assert tiny.differences(pipelines.union(states), tiny.full_state(module, [optimizer])) == []


# ── dtypes and names ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_conversion_rounds_as_torch_does(saved: Path, tmp_path: Path) -> None:
    file = consolidate(saved, tmp_path / "out.safetensors", format="safetensors", dtype="bfloat16", **NO_C128)
    other = torch.load(consolidate(saved, tmp_path / "out.pt", dtype="bfloat16"))
    expected = {k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in expected_tensors().items()}
    moments = other["optimizer_states"][0]["state"]
    assert [k for k in moments if not same_bits(zoo.whole_tensors()[k], moments[k]["exp_avg"])] == []
    for found in (load_file(file), other["state_dict"]):
        assert [k for k, t in expected.items() if not same_numbers(t, found[k])] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key_mapping": {"rows.few": "columns.large"}}, "several times\n  columns.large  of columns.large, rows.few"),
        ({"key_mapping": {"rows.fewer": None}}, "key_mapping: 'rows.fewer'  matches no name in the checkpoint"),
        ({"key_mapping": {"^": None}, "format": "safetensors"}, "no tensor of the model is left"),
        ({"format": "safetensors"}, r"'rows\.complex128' is complex128, which safetensors lacks"),
    ],
)
def test_names_that_make_no_sense_are_errors(options: Any, words: str, copy: Path) -> None:
    for format in ("torch", "safetensors"):
        if options.get("format", format) == format:
            with pytest.raises((ValueError, MismatchError), match=words):
                consolidate(copy, **{"format": format, **options})
    assert [p.name for p in copy.parent.iterdir()] == ["zoo.ckpt"]


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────


WRONG = ("--split chunks", "--format safetensors --size_per_shard 5", "--key_mapping (=x", "--key_mapping nothing")
WRONG += ("--format huggingface --optimizer true", "--format peft --dtype float32", "--dtype int8")


@pytest.mark.parametrize("arguments", WRONG)
def test_options_that_do_not_go_together_are_refused(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", str(tmp_path / "not even there"), *arguments.split()]) == 1
    assert "not even there" not in capsys.readouterr().err


def test_the_command_takes_what_the_function_takes(saved: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    arguments = ["--format", "safetensors", "--split", "chunks", "--size_per_shard", "0.05", "--optimizer", "true"]
    arguments += ["--dtype", "float32", "--output_file", out]
    for rule in (r"^(?!rows|columns)=null", r"\.complex=null", r"^rows\.=m.r.", "^=m."):
        arguments += ["--key_mapping", rule]
    assert main(["consolidate", str(saved), *arguments]) == 0
    expected = {k: t for k, t in expected_tensors().items() if k.startswith(("rows", "columns")) and "complex" not in k}
    found = in_directory(Path(out))
    assert found.keys() == {"m." + k.replace("rows.", "r.") for k in expected}
    assert {t.dtype for t in found.values()} == {torch.float32, torch.bool, torch.uint16}


@pytest.mark.parametrize("options", [CHUNKS, {}], ids=["folder", "torch"])
def test_overwriting_replaces_what_an_earlier_call_wrote_and_nothing_else(options: Any, copy: Path) -> None:
    copy = copy.rename(copy.parent / "zoo")  # a name that any format may have
    out = consolidate(copy, copy.parent / "out", **options)
    with pytest.raises(FileExistsError, match="already exists"):
        consolidate(copy, out, **options)
    content = out if out.is_file() else out / "model.safetensors.index.json"
    before = content.read_bytes()
    mapping = {**options.get("key_mapping", {}), "rows.bool": None}
    consolidate(copy, out, **{**options, "key_mapping": mapping}, overwrite=True)
    assert content.read_bytes() != before and sorted(p.name for p in copy.parent.iterdir()) == ["out", "zoo"]
    mine = out / "notes.md" if out.is_dir() else copy.parent / "mine" / "notes.md"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    for target in (copy, mine.parent):
        with pytest.raises(FileExistsError, match="is not replaced"):
            consolidate(copy, target, **options, overwrite=True)
    assert mine.read_text() == "mine"


# ── cost ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_MEASURED = """
import sys
from lightning_shardckpt.cli import main
from tests.support.faults import grown_mib
if "--dtype" in sys.argv or "torch" in sys.argv:
    import lightning_shardckpt.export.torch_export
if "torch" in sys.argv:
    lightning_shardckpt.export.torch_export.fake_tensors()  # imports 70 MiB, whatever the checkpoint
status = []
grown = grown_mib(lambda: status.append(main(["consolidate", *sys.argv[1:]])))
print(grown, "torch" in sys.modules, *status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_memory_does_not_grow_and_torch_is_imported_where_it_is_needed(kind: str, tmp_path: Path) -> None:
    rows, out = 32 * 1024, tmp_path / f"out.{kind}"  # 128 MiB per tensor
    run_ranks(2, zoo.save_large, str(tmp_path / "a.ckpt"), rows)
    more = ["--format", kind, *(["--dtype", "bfloat16"] if kind == "torch" else [])]
    command = [sys.executable, "-c", _MEASURED, str(tmp_path / "a.ckpt"), "--output_file", str(out), *more]
    # A thread that finds malloc's arenas busy reserves 64 MiB of addresses for one more, which is no memory.
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    done = run.stdout.splitlines()[-1].split()
    assert int(done[0]) < 160 and done[1:] == [str(kind == "torch"), "0"]  # four threads with three windows each
    found = load_file(out) if kind == "safetensors" else torch.load(out, mmap=True)["state_dict"]
    expected = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)
    assert all(torch.equal(tensor, expected.to(tensor.dtype)) for tensor in found.values())
