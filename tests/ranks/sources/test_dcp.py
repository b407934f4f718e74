"""Training goes on from directories of torch.distributed.checkpoint. Oracles: Lightning going on, torch's reader."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.consolidate import consolidate
from tests.support import other_programs, tiny
from tests.support.other_programs import fit
from tests.support.pool import RankFailure, run_each, run_ranks

WRITERS = ["model parallel", "fsdp"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Directories of Lightning's Trainer, saved by 2 ranks at step 2, and how Lightning went on from them."""
    path = tmp_path_factory.mktemp("made")
    return path, run_ranks(2, other_programs.make, str(path))[0]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Directories of Fabric and OLMo-core, all of the same state, and that state as torch reads it."""
    path = tmp_path_factory.mktemp("others")
    run_ranks(2, other_programs.make_others, str(path))
    found = other_programs.judged(str(path / "fabric"))
    return path, {"model": found["net"], **{k: found["opt"][k] for k in ("state", "param_groups")}}


def resume_all(folder: str, runs: list[tuple[str, int, list[str]]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """This rank's runs, by strategy and steps, that resume from what each writer saved."""
    return {
        (name, steps): [fit(name, steps, resume=f"{folder}/{writer}.ckpt") for writer in writers]
        for name, steps, writers in runs
    }


def rest(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if k not in ("losses", "state")}


# ── resuming from Lightning's own sharded checkpoints ─────────────────────────────────────────────────────────────


ALONE = [("ours", 2, ["fsdp"]), ("auto", 2, ["model parallel"])]
ON_TWO = [("ours, tp", 2, WRITERS), ("ours, pp", 2, ["model parallel"]), ("ddp", 2, ["fsdp"])]
ON_TWO += [("ours", 4, WRITERS), ("ddp", 4, WRITERS)]
"""Strategies, the step up to which they train (all was saved at step 2), and what they resume from."""


@pytest.fixture(scope="module")
def resumed(made: tuple[Path, dict[str, Any]]) -> dict[tuple[str, int], list[list[dict[str, Any]]]]:
    """What each rank saw, by strategy and steps, and by writer."""
    found = dict[tuple[str, int], list[Any]]()
    for world, runs in ((1, ALONE), (2, ON_TWO)):
        for rank in run_ranks(world, resume_all, str(made[0]), runs):
            for run, seen in rank.items():
                found.setdefault(run, []).append(seen)
    return found


@pytest.mark.parametrize("strategy", ["ours", "auto", "ours, tp", "ours, pp", "ddp"])
def test_every_bit_arrives_on_any_topology(made: tuple[Path, dict[str, Any]], resumed: Any, strategy: str) -> None:
    expected = made[1]["model parallel"]["saved"]
    for ranks in zip(*resumed[strategy, 2], strict=True):  # by directory
        whole = {k: v for found in ranks for k, v in found["state"].items()}  # stages have a part of it each
        assert tiny.differences(expected["state"], whole) == []
        for found in ranks:
            assert rest(found) == rest(expected)
            assert tiny.differences({k: expected["state"][k] for k in found["state"]}, found["state"]) == []


@pytest.mark.parametrize("strategy", ["ours", "ddp"])
def test_training_goes_on_as_under_the_strategy_that_saved(
    made: tuple[Path, dict[str, Any]], resumed: Any, strategy: str
) -> None:
    known = made[1]
    for name, one in zip(WRITERS, resumed[strategy, 4][0], strict=True):
        expected = known[name]["continued"]
        assert one["losses"] == expected["losses"] and rest(one) == rest(expected)
        assert name == "fsdp" or tiny.differences(expected["state"], one["state"]) == []  # FSDP keeps its state apart
        assert tiny.differences(known["model parallel"]["continued"]["state"], one["state"]) == []


def tied(strategy: str, path: str, steps: int) -> dict[str, Any]:
    return fit(strategy, steps, resume=path, model={"tied": True})


def test_a_tied_weight_that_was_stored_under_each_of_its_names_is_one_again(made: tuple[Path, dict[str, Any]]) -> None:
    folder, known = made
    expected = known["tied"]["state"]
    for found in run_ranks(2, tied, "ours, pp", str(folder / "tied.ckpt"), 2):  # the last stage has it by another name
        state = {k.replace("0/head.weight", "0/embed.weight"): v for k, v in found["state"].items()}
        assert tiny.differences({k: expected[k] for k in state}, state) == []


def resume_with(path: str, options: dict[str, bool]) -> int:
    module = other_programs.Net()
    run = other_programs.trainer("ours", max_steps=2, callbacks=[other_programs.Counts()])
    run.fit(module, other_programs.loader(), ckpt_path=path, **options)
    return run.global_step


def test_what_would_have_to_be_executed_is_read_only_if_the_user_says_so(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(made[0] / "model parallel.ckpt", tmp_path / "a.ckpt"))
    meta = torch.load(path / "meta.pt")
    torch.save({**meta, "hyper_parameters": {"made_by": other_programs.Counts}}, path / "meta.pt")
    with pytest.raises(RankFailure, match=r"meta\.pt.*does not read it: .*pass weights_only=False to the Trainer's"):
        run_ranks(1, resume_with, str(path), {})
    if tiny.EXECUTES:  # Lightning 2.5 gives no way to say so
        assert run_ranks(1, resume_with, str(path), tiny.EXECUTES) == [2]


def plain(path: str) -> dict[str, Any]:
    return fit("auto", 2, path, plugins=[])


# ── other directories ─────────────────────────────────────────────────────────────────────────────────────────────


def flat_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    both = ({f"{p}/{k}": v for p, s in one.items() for k, v in s.items()} for one in (expected, found))
    return tiny.differences(*both)


def test_fabrics_directories_hold_what_torch_says(others: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = others
    found = load_full(str(folder / "fabric"))
    assert tiny.differences(expected["model"], found["state_dict"]) == []
    (optimizer,) = found["optimizer_states"]
    assert flat_differences(expected["state"], optimizer["state"]) == []
    assert optimizer["param_groups"] == expected["param_groups"]
    assert found["step"] == 3 and found["notes"] == {"a": [1, "b"]} and len(found) == 4


def resume_at_0(strategy: str, path: str) -> dict[str, Any]:
    pl_trainer = other_programs.trainer(strategy, max_steps=0)
    module = other_programs.Net()
    told = pl_trainer.is_global_zero
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl_trainer.fit(module, other_programs.loader(), ckpt_path=path)
    said = [str(w.message) for w in caught if "not of Lightning's Trainer" in str(w.message)]
    assert len(said) == told
    return tiny.full_state(module, pl_trainer.optimizers)


def test_training_begins_at_step_0_with_what_other_directories_hold(others: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = others
    ways = [("fabric", 2, "ours"), ("fabric", 1, "auto"), ("step3-flat", 2, "ours, pp")]
    ranks = run_each({way: (way[1], resume_at_0, way[2], str(folder / way[0])) for way in ways})
    for found in (rank for of in ranks.values() for rank in of):
        model = {k.removeprefix("model/"): v for k, v in found.items() if k.startswith("model/")}
        assert tiny.differences({k: expected["model"][k] for k in model}, model) == []
        states = {k: v for k, v in found.items() if "/state/" in k}
        assert states
        for key, value in states.items():
            _, param, _, state = key.split("/")
            assert tiny.differences({"": expected["state"][param][state]}, {"": value}) == []


def test_a_directory_of_a_bare_state_dict_is_a_model(others: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = others
    found = load_full(str(folder / "bare"))
    assert found.keys() == {"state_dict"} and tiny.differences(expected["model"], found["state_dict"]) == []
    with pytest.raises(RankFailure, match="it holds weights only, no optimizer state"):
        run_ranks(1, resume_at_0, "ours", str(folder / "bare"))


def test_lightnings_directory_is_neither_removed_nor_overwritten(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(made[0] / "fsdp.ckpt", tmp_path / "a.ckpt"))
    with pytest.warns(UserWarning, match=r"not removed: .*a\.ckpt"):
        ShardCkptIO().remove_checkpoint(path)
    with pytest.raises(FileExistsError):
        ShardCkptIO().save_checkpoint({"epoch": 1}, path)
    assert sorted(os.listdir(path)) == sorted(os.listdir(made[0] / "fsdp.ckpt"))


# ── one file of them ──────────────────────────────────────────────────────────────────────────────────────────────


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested state by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.parametrize("name", WRITERS)
def test_a_consolidated_file_has_what_lightnings_own_tool_would_write(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    path = made[0] / f"{name}.ckpt"
    expected = other_programs.judged(str(path))
    model = expected.pop("model" if name == "fsdp" else "state_dict")  # Lightning's tool knows the first one alone
    found = torch.load(consolidate(path, tmp_path / "out.pt"))
    assert found["global_step"] == 2 and tiny.differences(model, found.pop("state_dict")) == []
    safe = load_file(consolidate(path, tmp_path / "out.safetensors", format="safetensors"))
    assert tiny.differences({k: model[k] for k in safe}, safe) == [] and safe.keys() <= model.keys()
    (optimizer,) = found.pop("optimizer_states")
    assert tiny.differences(flat(expected.pop("optimizer_0")), flat(optimizer)) == []
    assert tiny.differences(flat(expected), flat(found)) == []
