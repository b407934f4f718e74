"""Records of the same state on other ranks are equal; a fault is found on any topology. Oracle: numpy on the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt.recording import box_record, tensor_entry
from lightning_shardckpt.tools.prove_resume import (
    Comparison,
    Entry,
    RankRecords,
    Setting,
    compare_runs,
    rank_file,
    read_records,
    to_line,
)

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def whole(tensor: torch.Tensor) -> Entry:
    return tensor_entry(tensor)


def rows_of(tensor: torch.Tensor, first: int, last: int) -> Entry:
    """The entry of a rank that has some rows."""
    return Entry("float32", shape=(6, 4), boxes=(box_record((first, 0), (last - first, 4), tensor[first:last]),))


def run(*weights: Entry, **sections: list[dict[str, Entry]]) -> list[RankRecords]:
    """A run of one step after the first, with a rank for each record of the weight."""
    ranks = []
    for rank, weight in enumerate(weights):
        found = RankRecords(Setting(rank, len(weights), "S", "32"))
        more = {section: each[rank] for section, each in sections.items()}
        found.moments[1, "restored"] = found.moments[1, "after"] = {"weights": {"w": weight}}
        found.moments[2, "before"] = {s: more[s] for s in more if s in ("random", "batch")}
        after = {s: more[s] for s in more if s in ("loss", "logged", "logged_by_rank")}
        found.moments[2, "after"] = {"weights": {"w": weight}} | after
        ranks.append(found)
    return ranks


def compare(a: list[RankRecords], b: list[RankRecords], **options: Any) -> Comparison:
    return compare_runs(a, b, first=1, last=2, **options)


TWO = run(rows_of(WEIGHT, 0, 2), rows_of(WEIGHT, 2, 6))
THREE = run(rows_of(WEIGHT, 0, 3), rows_of(WEIGHT, 3, 5), rows_of(WEIGHT, 5, 6))
REPLICAS = run(whole(WEIGHT), whole(WEIGHT))


@pytest.mark.parametrize("other", [THREE, REPLICAS, run(whole(WEIGHT))], ids=["three", "replicas", "one"])
def test_the_same_state_on_other_ranks_is_bit_equal(other: list[RankRecords]) -> None:
    assert compare(TWO, other).differences == []


@pytest.mark.parametrize(
    "changed",
    [WEIGHT[[1, 0, 2, 3, 4, 5]], WEIGHT.bfloat16().float(), WEIGHT.clone().index_fill_(0, torch.tensor([5]), 0.0)],
    ids=["rows", "bf16", "zeros"],
)
def test_a_change_is_found_on_another_topology(changed: torch.Tensor) -> None:
    (found,) = compare(TWO, run(whole(changed)), tolerance=1e-4).differences
    assert (found.step, found.phase, found.section, found.name, found.rank) == (1, "restored", "weights", "w", None)
    del (straight := run(whole(changed)))[0].moments[1, "restored"]
    (found,) = compare(TWO, straight, tolerance=1e-4).differences
    assert (found.step, found.phase) == (2, "after")


def test_rounding_is_no_difference_after_a_step_but_is_one_of_what_was_loaded() -> None:
    rounded = run(whole(WEIGHT * (1 + 2**-22)))
    assert [found.phase for found in compare(TWO, rounded, tolerance=1e-4).differences] == ["restored"]
    del rounded[0].moments[1, "restored"]
    assert compare(TWO, rounded, tolerance=1e-4).differences == []
    assert [found.phase for found in compare(TWO, rounded).differences] == ["after"]


def test_the_distance_is_estimated_within_a_factor_of_two() -> None:
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    (found,) = compare(run(whole(WEIGHT)), run(whole(WEIGHT + 0.01 * noise))).differences
    estimate = float(found.found.rpartition(" ")[2])
    assert 0.5 < estimate / float(0.01 * noise.norm() / WEIGHT.norm()) < 2


def test_a_rank_is_compared_with_itself_on_the_same_topology() -> None:
    changed = run(rows_of(WEIGHT, 0, 2), rows_of(-WEIGHT, 2, 6))
    (found,) = compare(TWO, changed, tolerance=1e-4).differences
    assert (found.rank, found.name) == (1, "w")


def test_state_that_every_rank_had_whole_may_come_back_in_slices() -> None:
    changed = WEIGHT.clone()
    changed[4, 1] = 7
    straight = run(whole(WEIGHT), whole(WEIGHT))
    for state, differs in ((WEIGHT, False), (changed, True)):
        resumed = run(whole(WEIGHT), whole(WEIGHT))
        for records, rows in zip(resumed, (rows_of(state, 0, 2), rows_of(state, 2, 6)), strict=True):
            records.moments[2, "after"] = {"weights": {"w": whole(WEIGHT)}, "optimizer": {"v": rows}}
        for records in straight:
            records.moments[2, "after"] = {"weights": {"w": whole(WEIGHT)}, "optimizer": {"v": whole(WEIGHT)}}
        found = compare(straight, resumed).differences
        assert [(d.section, d.name, d.rank) for d in found] == [("optimizer", "v", None)] * differs


def test_what_belongs_to_a_rank_is_said_not_to_be_compared_on_another_topology() -> None:
    names = ("random", "batch", "loss", "logged_by_rank")

    def sections(value: str) -> dict[str, list[dict[str, Entry]]]:
        of_rank, synced = Entry(value, float(value), shared=False), Entry("0.5", 0.5)
        return {name: [{"x": of_rank}] * 2 for name in names} | {"logged": [{"own": of_rank, "synced": synced}] * 2}

    one = {name: of[:1] for name, of in sections("2").items()}
    found = compare(run(whole(WEIGHT), **one), run(whole(WEIGHT), whole(WEIGHT), **sections("3")))
    assert found.differences == [] and {*found.skipped} == {*names, "gradients", "metrics", "logged/own"}
    assert found.compared == {"weights": 2, "logged": 1}


def test_what_is_ignored_is_said() -> None:
    found = compare(TWO, run(whole(-WEIGHT)), ignore=["weights/*"])
    assert found.differences == [] and found.skipped["weights/w"] == "ignored by --ignore"


def test_something_that_is_gone_or_has_another_shape_is_a_difference() -> None:
    (gone,) = compare(run(whole(WEIGHT)), run(whole(WEIGHT[:3]))).differences
    assert "(6, 4)" in gone.expected and "(3, 4)" in gone.found


def test_records_come_back_from_files(tmp_path: Path) -> None:
    (found,) = run(whole(WEIGHT), logged=[{"x": Entry("nan", float("nan")), "y": Entry("'…'")}])
    lines = [to_line(setting=found.setting)]
    lines += [to_line(step=step, phase=phase, sections=of) for (step, phase), of in found.moments.items()]
    killed = '{"step": 7, "ph'
    rank_file(str(tmp_path), 0).write_text("".join([*lines, killed]))
    rank_file(str(tmp_path), 1).touch()
    (again,) = read_records(str(tmp_path))
    assert again.last_step == 2
    assert again.setting == found.setting and repr(again.moments) == repr(found.moments)
