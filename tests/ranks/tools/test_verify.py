"""Whatever happens to a checkpoint's files is found and named. Oracle: what the test itself has changed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.cli import main
from lightning_shardckpt.format.index import ROOT_NAME, FileInfo, root_from_json, root_to_json
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.posix import EXCHANGE, rename_with_flag
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
    assert announced == [sum(told)] == [expected]


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


def test_all_findings_are_collected(saved: Path, copy: Path) -> None:
    for kind in ("deleted", "extra", "index deleted", "document deleted"):
        DAMAGE[kind][0](copy)
    flip(copy / "optimizer-dist-00002-shard-00001.safetensors", -1)
    assert len(found(copy)) == 5 and len(found(copy, quick=True)) == 4


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
