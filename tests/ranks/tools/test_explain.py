"""What a resume would read is what it reads. The oracle is the storage, which notes every read of a real resume."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.cli import main
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.layout import parts_of_rank
from lightning_shardckpt.parallel.sharding import mesh
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.tools import explain
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support import tiny
from tests.support.counting import Counting
from tests.support.pool import run_ranks, selected

FSDP2_TP2 = {"data_parallel_shard_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}
PP2_TP2 = {**FSDP2_TP2, "data_parallel_shard_size": 1, "pipeline_parallel_size": 2, "pipeline_layers": ["blocks"]}


Strategy = dict[str, Any]
Case = tuple[str, Strategy]


def save(folder: str, saved: dict[str, Strategy]) -> None:
    for name, strategy in saved.items():
        tiny.fit(strategy, 1, save=f"{folder}/{name}.ckpt")


def resume(folder: str, cases: list[Case]) -> list[tuple[int, int]]:
    """Return how many bytes this rank read in each case, and in how many calls."""
    found = []
    for name, target in cases:
        io = ShardCkptIO()
        io.storage = storage = Counting()
        tiny.fit(target, 1, resume=f"{folder}/{name}.ckpt", plugins=[io])
        found.append((storage.nbytes, len(storage.reads)))
    return found


def onto(target: dict[str, Any]) -> str:
    sizes = {k: v for k, v in target.items() if k.endswith("_size")}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 ranks as FSDP 2 × TP 2, with a pipelined one beside it."""
    folder = tmp_path_factory.mktemp("explain")
    run_ranks(4, save, str(folder), {"a": FSDP2_TP2, "pipelined": PP2_TP2})
    return folder / "a.ckpt"


@pytest.fixture(scope="module")
def read(request: pytest.FixtureRequest, saved: Path) -> dict[int, list[tuple[int, int]]]:
    """What each rank read, by the number of the case, of those that are selected."""
    numbers = selected(request, "number")
    ranks = run_ranks(4, resume, str(saved.parent), [CASES[number] for number in numbers])
    return dict(zip(numbers, zip(*ranks, strict=True), strict=True))


TARGETS: list[dict[str, Any]] = [
    {"data_parallel_shard_size": 4},
    {**FSDP2_TP2, "data_parallel_shard_size": 1, "data_parallel_replicate_size": 2},
]


CASES: list[Case] = [*(("a", target) for target in TARGETS), ("pipelined", TARGETS[0]), ("pipelined", PP2_TP2)]
MARKS: dict[int, list[Any]] = {0: [], 2: [pytest.mark.slow, pytest.mark.sweep]}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{name} {onto(to)}", marks=MARKS.get(number, [pytest.mark.slow]))
        for number, (name, to) in enumerate(CASES)
    ],
)
def test_what_is_predicted_is_what_a_resume_reads(
    saved: Path, number: int, read: dict[int, list[tuple[int, int]]]
) -> None:
    name, target = CASES[number]
    found = explain.explain(saved.with_name(f"{name}.ckpt"), onto(target))
    predicted = [[rank["reads"], rank["calls"]] for rank in found["ranks"]]
    assert predicted == [list(rank) for rank in read[number]]
    assert all(rank["needs"] <= rank["reads"] for rank in found["ranks"])
    assert all(sum(rank["from"].values()) == rank["needs"] for rank in found["ranks"])


def test_tensor_parallelism_shards_as_when_the_checkpoint_was_saved(saved: Path) -> None:
    with Checkpoint(LocalStorage(), str(saved)) as checkpoint:
        layouts = explain.target_layouts(checkpoint.root, explain.parse_topology("fsdp=2,tp=2"))
        specs = checkpoint.root.components["model"].tensors
    for key, planned in layouts["model"].items():
        for rank in range(4):
            shape, layout = specs[key].shape, specs[key].layout
            assert parts_of_rank(planned.layout, shape, rank) == parts_of_rank(layout, shape, rank), key


def test_all_ranks_of_plain_fsdp_need_every_parameter_once_and_every_buffer_each(saved: Path) -> None:
    found = explain.explain(saved, {"fsdp": 3})
    with Checkpoint(LocalStorage(), str(saved)) as checkpoint:
        stored = [s for c in checkpoint.root.components.values() for s in c.tensors.values()]
    sizes = {"F32": 4, "F64": 8, "I64": 8}
    once = sum(prod(s.shape) * sizes[s.dtype] for s in stored if s.layout.axes)
    each = sum(prod(s.shape) * sizes[s.dtype] for s in stored if not s.layout.axes)
    assert found["totals"]["needs"] == once + 3 * each
    assert found["imbalance"] == pytest.approx(max(r["reads"] for r in found["ranks"]) * 3 / found["totals"]["reads"])


def test_notes_say_what_is_assumed_and_what_does_not_continue(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "--onto", "tp=2,fsdp=1"]) == 0
    out = capsys.readouterr().out
    assert "from shard 2 × tensor 2 onto tensor 2" in out
    assert "Tensor parallelism is assumed to shard the same dims as in the checkpoint." in out
    assert "2 data-parallel ranks become 1: the order of the data in mid-epoch continues with" in out
    assert "Random numbers (dropout) are drawn anew" in out
    assert main(["explain", str(saved), "--onto", "fsdp=2,tp=2"]) == 0
    assert "The topology is the same" in capsys.readouterr().out


def test_without_tensor_parallelism_before_its_plan_is_not_known(tmp_path: Path) -> None:
    run_ranks(1, tiny_save, str(tmp_path / "one.ckpt"))
    found = explain.explain(tmp_path / "one.ckpt", "tp=2")
    assert any("assumed not to be sharded by tensor parallelism" in note for note in found["assumed"])
    (first, second) = found["ranks"]
    assert first["needs"] == second["needs"] == found["totals"]["needs"] // 2


def tiny_save(path: str) -> None:
    tiny.fit({}, 1, save=path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--onto", "tp"], "'tp' is not a topology"),
        (["--onto", "tp=2,tp=2"], "each has one size"),
        (["--onto", "tp=0"], "is not a topology"),
        (["--onto", "ep=2"], "The axes are pp, dp, fsdp, tp"),
        (["--onto", "pp=3"], "does not tell how its layers would be split into 3 pipeline stages: give pp=1"),
    ],
)
def test_a_target_that_cannot_be_is_refused(
    saved: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(saved), *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_missing_rank_index_is_an_error_that_names_it(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "copy.ckpt")
    (copy / "model-meta-dist-00003.index.json").unlink()
    with pytest.raises(OSError, match=r"model-meta-dist-00003\.index\.json: the file is missing"):
        explain.explain(copy, "fsdp=2")


def test_axes_are_those_of_the_strategy() -> None:
    assert explain.AXES == mesh.AXES
    with pytest.raises(TopologyError):
        explain.parse_topology("")
