"""One file for torch.load out of directories of torch.distributed.checkpoint. Oracles: Lightning's tool, torch's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CorruptionError, FormatError
from tests.support import other_programs, tiny
from tests.support.pool import ROOT, run_ranks


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


def test_fabrics_keys_beside_model_and_optimizer_stay(made: Path, tmp_path: Path) -> None:
    found = torch.load(consolidate(made / "fabric", tmp_path / "out.pt"))
    assert found.keys() == {"state_dict", "optimizer_states", "step", "notes"} and found["notes"] == {"a": [1, "b"]}


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


_LIMITED = """
import sys
import torch
from lightning_shardckpt.consolidate import consolidate
import lightning_shardckpt.sources.dcp, lightning_shardckpt.export.torch_export
import lightning_shardckpt.sources.open_source
from tests.support.faults import grown_mib
lightning_shardckpt.export.torch_export.fake_tensors()  # imports 70 MiB, whatever the checkpoint
print(grown_mib(lambda: consolidate(sys.argv[1])), "lightning" in sys.modules)
"""


def save_large(path: str, rows: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)
    state = {f"{i}.dim{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for i in range(5) for dim in (0, 1)}
    dcp.save({"model": state}, checkpoint_id=path)


@pytest.mark.slow
@pytest.mark.sweep
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    rows = 8 * 1024  # 32 MiB per tensor, of which a chunk is half
    run_ranks(2, save_large, str(tmp_path / "a"), rows)
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "a")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    grown_mib, with_lightning = done.stdout.split()
    assert int(grown_mib) < 100 and with_lightning == "False"
    found = torch.load(tmp_path / "a.consolidated", mmap=True)["state_dict"]
    expected = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)
    assert len(found) == 10 and all(torch.equal(tensor, expected) for tensor in found.values())
