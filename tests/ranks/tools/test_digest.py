"""One state has one digest: on any topology, in any format. Oracle: equal and unequal states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import lightning_shardckpt
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.state.tensor_bytes import host_bytes
from lightning_shardckpt.tools.digest import digest
from tests.support import zoo
from tests.support.pool import run_ranks

MEANING = ("tensors", "components", "optimizer_values", "whole")


def meaning(path: Path, **options: Any) -> dict[str, Any]:
    """All but how it was found; tensors by name."""
    found = digest(path, **options)
    tensors = {(t["component"], t["name"]): t for t in found["tensors"]}
    return {**{key: found[key] for key in MEANING}, "tensors": tensors}


def save_zoo(folder: str) -> None:
    zoo.save(f"{folder}/zoo.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of one state: zoo by 4 ranks, alone by one."""
    folder = tmp_path_factory.mktemp("digests")
    run_ranks(4, save_zoo, str(folder))
    zoo.save(str(folder / "alone.ckpt"))
    return folder


def test_it_is_that_of_the_bytes_of_whole_tensors_on_any_topology(saved: Path) -> None:
    computed = meaning(saved / "zoo.ckpt")
    names = {name for component, name in computed["tensors"] if component == "model"}
    assert names == {*zoo.whole_tensors(), "tied.float64"}
    assert computed == meaning(saved / "alone.ckpt")
    tensors = {**zoo.whole_tensors(), "tied.float64": zoo.whole_tensors()["rows.float64"]}
    expected = {name: xxhash.xxh3_64_hexdigest(bytes(host_bytes(tensor))) for name, tensor in tensors.items()}
    assert {t["name"]: t["digest"] for key, t in computed["tensors"].items() if key[0] == "model"} == expected


@pytest.mark.slow
def test_a_hugging_face_export_has_them_by_its_own_names(tmp_path: Path) -> None:
    """Of a model whose experts are stacked, which an export takes apart, and whose embeddings are tied."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=20, num_hidden_layers=1, num_local_experts=3, tie_word_embeddings=True, **sizes)
    wrapped = torch.nn.ModuleDict({"net": MixtralForCausalLM(config)})
    lightning_shardckpt.save(tmp_path / "a.ckpt", {"model": wrapped})
    consolidate(tmp_path / "a.ckpt", tmp_path / "hf", format="huggingface")
    stored, named, exported = (
        digest(tmp_path / "a.ckpt"),
        digest(tmp_path / "a.ckpt", names="huggingface"),
        digest(tmp_path / "hf"),
    )
    assert len({t["name"] for t in named["tensors"]} - {t["name"].removeprefix("net.") for t in stored["tensors"]}) >= 9
    key = lambda t: t["name"]  # noqa: E731
    assert sorted(named["tensors"], key=key) == sorted(exported["tensors"], key=key)
    assert named["whole"] == exported["whole"] != stored["whole"]


def test_the_command_shows_them(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = digest(saved / "zoo.ckpt")
    assert main(["digest", str(saved / "zoo.ckpt"), "--tensors", "rows.*"]) == 0
    output = capsys.readouterr().out
    assert expected["whole"] in output and "columns.large" not in output
    assert main(["digest", str(saved / "zoo.ckpt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"] == expected["components"]
    assert main(["digest", str(saved / "alone.ckpt"), "--names", "huggingface"]) == 1
    assert "model of transformers" in capsys.readouterr().err
    assert main(["digest", str(saved / "zoo.ckpt"), "--tensors", "row.*"]) == 1
    assert "no tensor whose name matches 'row.*'" in capsys.readouterr().err


def save_stepped(path: Path, *, reverse: bool = False, **changes: Any) -> None:
    """Save a model and its optimizer, whose parameters may be in the opposite order, as on stages of a pipeline."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    parameters = [*module.parameters()]
    optimizer = torch.optim.Adam(parameters[::-1] if reverse else parameters, lr=0.5)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(changes.get("hyper", {}))
    optimizer.state[parameters[1]].update(changes.get("state", {}))
    lightning_shardckpt.save(path, {"model": module, "optimizer": optimizer})


def test_the_order_of_parameters_in_an_optimizer_does_not_change_it(tmp_path: Path) -> None:
    save_stepped(tmp_path / "a")
    save_stepped(tmp_path / "b", reverse=True)
    assert meaning(tmp_path / "a") == meaning(tmp_path / "b")


@pytest.mark.parametrize(
    "change",
    [{"hyper": {"betas": (0.9, 0.99)}}, {"state": {"step": torch.tensor(2.0)}}],
    ids=["betas", "step of one parameter"],
)
def test_any_value_of_an_optimizer_changes_it(tmp_path: Path, change: dict[str, Any]) -> None:
    save_stepped(tmp_path / "a")
    save_stepped(tmp_path / "b", **change)
    a, b = meaning(tmp_path / "a"), meaning(tmp_path / "b")
    assert a["optimizer_values"] != b["optimizer_values"] and a["whole"] != b["whole"]
    assert (a["tensors"], a["components"]) == (b["tensors"], b["components"])
