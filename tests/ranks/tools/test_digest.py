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
from lightning_shardckpt.state.local_tensors import host_bytes
from lightning_shardckpt.tools.digest import digest
from tests.support import zoo
from tests.support.hub import model_of

MEANING = ("tensors", "components", "optimizer_values", "whole")


def meaning(path: Path, **options: Any) -> dict[str, Any]:
    """All but how it was found; tensors by name."""
    found = digest(path, **options)
    tensors = {(t["component"], t["name"]): t for t in found["tensors"]}
    return {**{key: found[key] for key in MEANING}, "tensors": tensors}


@pytest.mark.slow
def test_a_hugging_face_export_has_them_by_its_own_names(tmp_path: Path) -> None:
    """Of a model whose experts are stacked, which an export takes apart."""
    wrapped = torch.nn.ModuleDict({"net": model_of("mixtral")})
    lightning_shardckpt.save(tmp_path / "a.ckpt", {"model": wrapped})
    consolidate(tmp_path / "a.ckpt", tmp_path / "hf", format="huggingface")
    stored, named = (digest(tmp_path / "a.ckpt", names=names) for names in ("stored", "huggingface"))
    exported = digest(tmp_path / "hf")
    assert len({t["name"] for t in named["tensors"]} - {t["name"].removeprefix("net.") for t in stored["tensors"]}) >= 9
    key = lambda t: t["name"]  # noqa: E731
    assert sorted(named["tensors"], key=key) == sorted(exported["tensors"], key=key)
    assert named["whole"] == exported["whole"] != stored["whole"]


def test_the_command_shows_them(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = digest(saved)
    tensors = {**zoo.whole_tensors(), "tied.float64": zoo.whole_tensors()["rows.float64"]}
    found = {t["name"]: t["digest"] for t in expected["tensors"] if t["component"] == "model"}
    assert found == {name: xxhash.xxh3_64_hexdigest(bytes(host_bytes(tensor))) for name, tensor in tensors.items()}
    assert main(["digest", str(saved), "--tensors", "rows.*"]) == 0
    output = capsys.readouterr().out
    assert expected["whole"] in output and "columns.large" not in output
    assert main(["digest", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"] == expected["components"]
    for arguments, said in ((["--names", "huggingface"], "model of transformers"), (["--tensors", "row.*"], "'row.*'")):
        assert main(["digest", str(saved), *arguments]) == 1
        assert said in capsys.readouterr().err


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
