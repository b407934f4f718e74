"""Whatever happens to a checkpoint's files is found and named. Oracle: what the test itself has changed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import ROOT_NAME, FileInfo
from lightning_shardckpt.format.index_json import root_from_json, root_to_json
from lightning_shardckpt.storage.local.posix import EXCHANGE, rename_with_flag
from lightning_shardckpt.tools.verify import verify
from tests.support import zoo
from tests.support.pool import run_ranks

DATA = "model-dist-00003-shard-00001.safetensors"
INDEX = "model-meta-dist-00001.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 ranks, and beside it another save of the same state; tests must not change them."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(4, save_twice, str(folder / "zoo.ckpt"), str(folder / "other.ckpt"))
    return folder / "zoo.ckpt"


def save_twice(first: str, second: str) -> None:
    zoo.save(first)
    zoo.save(second)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "zoo.ckpt"))


def found(path: Path, quick: bool = False) -> list[str]:
    return [str(finding) for finding in verify(path, quick=quick).findings]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("quick", [False, True])
def test_a_whole_checkpoint_gives_one_line_and_status_0(
    saved: Path, quick: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(saved)] + ["--quick"] * quick) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and f"is {'complete' if quick else 'whole'}: {len(list(saved.iterdir()))} files" in out
    assert verify(saved).nbytes == sum(p.stat().st_size for p in saved.glob("*.safetensors"))


@pytest.mark.parametrize("damage", [None, "truncated", "missing"])
def test_the_progress_ends_at_the_bytes_that_were_expected(copy: Path, damage: str | None) -> None:
    expected = sum(p.stat().st_size for p in copy.glob("*.safetensors"))
    if damage == "truncated":
        os.truncate(copy / DATA, 100)
    elif damage == "missing":
        (copy / DATA).unlink()
    told, announced = list[int](), list[int]()
    report = verify(copy, advance=told.append, expect=announced.append)
    assert bool(report.findings) == (damage is not None)
    assert announced == [sum(told)] == [expected] and min(told) >= 0
    assert len(told) > len(list(copy.glob("*.safetensors")))


EXTRA = "model-dist-00009-shard-00001.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "deleted": (
        lambda copy: (copy / DATA).unlink(),
        f"{DATA} (rank 3): the file is missing; it held data of 'both.bfloat16', ",
    ),
    "index deleted": (lambda copy: (copy / INDEX).unlink(), f"{INDEX} (rank 1): the file is missing"),
    "document deleted": (
        lambda copy: (copy / "trainer-state.json").unlink(),
        "trainer-state.json: the file is missing",
    ),
    "extra": (
        lambda copy: (copy / EXTRA).write_bytes(b"x"),
        f"{EXTRA}: extra: no index of this checkpoint names it",
    ),
    "extra directory": (lambda copy: (copy / "notes").mkdir(), "notes: extra: "),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_a_file_is_one_finding_even_quickly(kind: str, saved: Path, copy: Path) -> None:
    damage, expected = DAMAGE[kind]
    damage(copy)
    for quick in (False, True):
        (line,) = found(copy, quick)
        assert line.startswith(expected)
    if "extra" not in kind:  # which no load would look at
        with pytest.raises(ShardCkptError):
            consolidate(copy)


def test_all_findings_are_collected(saved: Path, copy: Path) -> None:
    for kind in ("deleted", "extra", "index deleted", "document deleted"):
        DAMAGE[kind][0](copy)
    flip(copy / "optimizer-dist-00002-shard-00001.safetensors", -1)
    assert len(found(copy)) == 5 and len(found(copy, quick=True)) == 4


# ── indexes that someone has edited, with all checksums made right ────────────────────────────────────────────────


def edit_index(path: Path, edit: Callable[[dict[str, Any]], None], name: str = INDEX) -> None:
    """Change the JSON of a rank index, and what the root index says of that file."""
    value = json.loads((path / name).read_text())
    edit(value)
    content = json.dumps(value).encode()
    (path / name).write_bytes(content)
    root = root_from_json((path / ROOT_NAME).read_bytes(), "root")
    component, _, rest = name.partition("-meta-dist-")
    root.components[component].indexes[int(rest[:5])] = FileInfo(name, len(content), checksum(content))
    (path / ROOT_NAME).write_bytes(root_to_json(root))


def shifted(value: dict[str, Any]) -> None:
    value["metadata"]["both.float64"]["offsets"][1] -= 1


def without(value: dict[str, Any]) -> None:
    del value["metadata"]["both.float64"]


def retyped(value: dict[str, Any]) -> None:
    value["metadata"]["both.float64"]["dtype"] = "I64"


def reshaped(value: dict[str, Any]) -> None:
    value["metadata"]["both.float64"]["global_shape"] = [14, 7]


def moved(value: dict[str, Any]) -> None:
    value["metadata"]["both.float64"]["begin"] -= 8


def misplaced_twin(value: dict[str, Any]) -> None:
    value["metadata"]["both.float64"]["more"] = [dict(value["metadata"]["both.float64"])]


def of_another_rank(value: dict[str, Any]) -> None:
    value["rank"] = 2


def of_another_save(value: dict[str, Any]) -> None:
    value["save_id"] = "0" * 32


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], list[str]]] = {
    "overlap or gap": (shifted, ["has no box (0, 4)..(7, 7) of 'both.float64', F64 (13, 7)"]),
    "gap": (without, ["has no box (0, 4)..(7, 7)", "in the header of the file, None in the index of rank 1"]),
    "dtype": (retyped, ["has no box (0, 4)..(7, 7) of 'both.float64', F64 (13, 7)", "dtype='F64'"]),
    "shape": (reshaped, ["has no box (0, 4)..(7, 7) of 'both.float64', F64 (13, 7)"]),
    "position": (moved, ["in the header of the file, HeaderTensor(", "corrupted data"]),
    "twice": (misplaced_twin, ["several boxes of one tensor"]),
    "rank": (of_another_rank, ["this is the index of rank 2 for 'model'"]),
    "save": (of_another_save, ["belongs to save 00000000"]),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_index_with_right_checksums_is_found(kind: str, copy: Path) -> None:
    edit, expected = EDITS[kind]
    edit_index(copy, edit)
    lines = found(copy)
    for text in expected:
        assert any(text in line for line in lines), (text, lines)
    assert kind in ("rank", "save", "twice") or all("both.float64" in line for line in lines), lines


@pytest.mark.parametrize("kind", [kind for kind in EDITS if kind != "twice"])
def test_an_edited_index_with_right_checksums_is_refused_by_consolidate(kind: str, copy: Path) -> None:
    edit_index(copy, EDITS[kind][0])
    with pytest.raises(ShardCkptError, match=r"both\.float64|" + INDEX):
        consolidate(copy)
    assert [p.name for p in copy.parent.iterdir()] == ["zoo.ckpt"]


def test_a_layout_that_leaves_a_gap_is_found_and_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = root_from_json((copy / ROOT_NAME).read_bytes(), "root")
    tensors = root.components["model"].tensors
    tensors["rows.few"] = dataclasses.replace(tensors["rows.few"], shape=(4, 5))
    tensors["both.float64"] = dataclasses.replace(tensors["both.float64"], holders=((0, 2),))
    (copy / ROOT_NAME).write_bytes(root_to_json(root))
    lines = found(copy)
    assert any("both.float64" in line and "do not tile it" in line for line in lines)
    assert any("rows.few" in line for line in lines)
    assert main(["consolidate", str(copy)]) == 1
    assert "both.float64" in capsys.readouterr().err


def test_a_tensor_that_the_trainer_state_refers_to_must_be_stored(copy: Path) -> None:
    root = root_from_json((copy / ROOT_NAME).read_bytes(), "root")
    content = (copy / "trainer-state.json").read_bytes().replace(b"EMA/rows.large", b"EMA/lost")
    (copy / "trainer-state.json").write_bytes(content)
    root.documents["trainer-state.json"] = FileInfo("trainer-state.json", len(content), checksum(content))
    (copy / ROOT_NAME).write_bytes(root_to_json(root))
    (line,) = found(copy)
    assert line.startswith("trainer-state.json: 'callbacks/EMA/lost': is referred to, but not stored")


def test_a_checkpoint_that_is_replaced_meanwhile_is_verified_to_its_end(saved: Path, copy: Path) -> None:
    """The other one waits beside it, to be exchanged with it when the first file has been read."""
    other = copy.with_name("other.ckpt")
    shutil.copytree(saved.with_name("other.ckpt"), other)
    replaced: list[int] = []

    def replace(nbytes: int) -> None:
        if not replaced:
            assert rename_with_flag(str(copy), str(other), EXCHANGE)
        replaced.append(nbytes)

    assert verify(copy, advance=replace).findings == () and len(replaced) > 4
    assert found(copy) == found(other) == []
