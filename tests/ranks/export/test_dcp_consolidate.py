"""One file for torch.load out of directories of torch.distributed.checkpoint. Oracles: Lightning's tool, torch's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CorruptionError, FormatError
from tests.support import other_programs, tiny
from tests.support.pool import run_ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of every kind, by 2 ranks."""
    path = tmp_path_factory.mktemp("made")
    run_ranks(2, make_all, str(path))
    return path


def make_all(directory: str) -> None:
    for name in ("model parallel", "fsdp"):
        other_programs.fit(name, 2, f"{directory}/{name}.ckpt")
    other_programs.make_others(directory)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested state by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.parametrize("name", ["model parallel", "fsdp"])
def test_the_file_has_what_lightnings_own_tool_would_write(made: Path, tmp_path: Path, name: str) -> None:
    expected = other_programs.judged(str(made / f"{name}.ckpt"))
    model = expected.pop("model" if name == "fsdp" else "state_dict")  # Lightning's tool knows the first one alone
    file = consolidate(made / f"{name}.ckpt", tmp_path / "out.pt")
    found = torch.load(file)
    assert list(found.keys() - {"state_dict", "optimizer_states"}) and found["global_step"] == 2
    assert tiny.differences(model, found.pop("state_dict")) == []
    safe = load_file(consolidate(made / f"{name}.ckpt", tmp_path / "out.safetensors", format="safetensors"))
    assert tiny.differences({k: model[k] for k in safe}, safe) == [] and safe.keys() <= model.keys()
    (optimizer,) = found.pop("optimizer_states")
    assert tiny.differences(flat(expected.pop("optimizer_0")), flat(optimizer)) == []
    assert tiny.differences(flat(expected), flat(found)) == []


@pytest.mark.parametrize(("name", "world", "strategy"), [("model parallel", 1, "auto"), ("fsdp", 2, "ours, pp")])
def test_training_resumes_from_the_file(made: Path, tmp_path: Path, name: str, world: int, strategy: str) -> None:
    file = str(consolidate(made / f"{name}.ckpt", tmp_path / "out.pt"))
    expected = other_programs.judged(str(made / f"{name}.ckpt"))["state_dict" if "model" in name else "model"]
    for found in run_ranks(world, resumed, strategy, file):
        model = {k.removeprefix("model/"): v for k, v in found.items() if k.startswith("model/")}
        assert tiny.differences({k: expected[k] for k in model}, model) == []


def resumed(strategy: str, file: str) -> dict[str, Any]:
    plugins = {"plugins": []} if strategy == "auto" else {}
    found: dict[str, Any] = other_programs.fit(strategy, 2, resume=file, **plugins)["state"]
    return found


def test_damage_is_named_and_leaves_nothing(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(made / "fsdp.ckpt", tmp_path / "a.ckpt"))
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CorruptionError, match=r"a\.ckpt': file __1_0\.distcp: the file is missing"):
        consolidate(folder)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(FormatError, match=r"a\.ckpt': \.metadata"):
        consolidate(folder)
    assert main(["consolidate", str(folder)]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
