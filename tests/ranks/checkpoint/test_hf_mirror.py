"""Checkpoints that transformers loads as they are. Oracles: from_pretrained, save_pretrained, and the shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt import ShardCkptIO, load_keys, save
from lightning_shardckpt.cli import main
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.tools.verify import verify
from tests.ranks.state.test_state import NoFullTensor
from tests.support import adapters, tiny
from tests.support.hub import Causal, model_of
from tests.support.nets import lora
from tests.support.pool import run_each, run_ranks, selected

TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}
TP_FSDP = {**TP, "data_parallel_shard_size": 2}
PP = {"pipeline_parallel_size": 2}


def trained(kind: str, strategy: dict[str, Any], path: str, options: dict[str, Any]) -> None:
    pl.seed_everything(1)
    io = ShardCkptIO(also="huggingface", **options)
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0, plugins=[io])
    run.fit(Causal(kind), tiny.loader())
    run.save_checkpoint(path)
    assert io.saves.finished[-1].nbytes == sum(file.stat().st_size for file in Path(path).iterdir())


def hub_weights(folder: Path) -> dict[str, Tensor]:
    """What transformers loads from a directory, which must have all that the model needs and nothing else."""
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert {name: found for name, found in info.items() if found} == {}
    return dict(model.state_dict())


WAYS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "llama fsdp2": (2, "llama", {}, {}),
    "tied llama fsdp2 tp2": (4, "llama-tied", TP_FSDP, {"size_per_shard": 0.004}),
    "mixtral fsdp2": (2, "mixtral", {}, {"use_async": True}),
    "llama pp2": (2, "llama", PP, {"use_async": True, "size_per_shard": 0.01}),
    "bert fsdp2": (2, "bert", {}, {"sync_files": False}),
}
"""How many ranks train what, under which strategy, and how they save."""


@pytest.fixture(scope="module")
def mirrored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the selected checkpoints; tests must not change them."""
    folder, calls = tmp_path_factory.mktemp("mirrored"), {}
    for way in selected(request, "way"):
        world, kind, strategy, options = WAYS[way]
        calls[way] = (world, trained, kind, strategy, str(folder / way), options)
    calls["saved"] = (2, trained, "llama-tied", {}, str(folder / "saved"), {"size_per_shard": 0.004})
    run_each(calls)
    return folder


@pytest.fixture
def saved(mirrored: Path) -> Path:
    """A checkpoint of two ranks in several files; tests must not change it."""
    return mirrored / "saved"


@pytest.mark.parametrize("way", [*[*WAYS][:1], *(pytest.param(way, marks=pytest.mark.slow) for way in [*WAYS][1:])])
def test_transformers_loads_the_checkpoint_as_it_is(way: str, mirrored: Path, tmp_path: Path) -> None:
    path, options = mirrored / way, WAYS[way][3]
    found = hub_weights(path)
    expected = dict(load_keys(path, [f"model.{name}" for name in found]))
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[f"model.{name}"])] == []
    assert (len(list(path.glob("model-0*-of-0*.safetensors"))) > 1) == ("size_per_shard" in options)
    assert verify(path).findings == ()
    judge = tmp_path / "judge"
    restored = hub_model(path)
    restored.save_pretrained(judge)
    again = {name for file in judge.glob("*.safetensors") for name in names_in(file)}
    assert {name for file in hub_files(path) for name in names_in(file)} == again


def hub_model(folder: Path) -> Any:
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder)


def hub_files(path: Path) -> list[Path]:
    return [file for file in path.glob("model*.safetensors") if "-dist-" not in file.name]


def names_in(file: Path) -> set[str]:
    length = int.from_bytes(file.read_bytes()[:8], "little")
    return json.loads(file.read_bytes()[8 : 8 + length]).keys() - {"__metadata__"}


def damaged(saved: Path, copy: Path, name: str, at: int) -> list[str]:
    shutil.copytree(saved, copy)
    content = bytearray((copy / name).read_bytes())
    content[at] ^= 4
    (copy / name).write_bytes(content)
    return [str(finding) for finding in verify(copy).findings]


def test_verify_compares_the_files_with_the_shards(saved: Path, tmp_path: Path) -> None:
    file = sorted(hub_files(saved))[0].name
    (found,) = damaged(saved, tmp_path / "a", file, -1)
    assert found.startswith(f"{file}: '") and found.endswith("differ from the shards")
    (found,) = damaged(saved, tmp_path / "b", file, 20)
    assert found.startswith(f"{file}: ") and "header is damaged" in found
    assert "config.json" in damaged(saved, tmp_path / "c", "config.json", 5)[0]
    copy = Path(shutil.copytree(saved, tmp_path / "d"))
    (copy / file).unlink()
    assert [str(finding) for finding in verify(copy, quick=True).findings] == [f"{file}: the file is missing"]


def test_the_checkpoint_resumes_and_is_listed_as_any_other(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    listed = {file["name"]: file["bytes"] for file in json.loads(capsys.readouterr().out)["files"]}
    assert listed == {file.name: file.stat().st_size for file in saved.iterdir()}
    run_ranks(2, resumed, str(saved))


def saved_watched(path: str) -> tuple[int, int]:
    """The bytes of the largest plain tensor of a save in both formats, and of the model's largest tensor."""

    def gathering(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a DTensor was gathered")

    run = tiny.trainer({}, max_steps=1, limit_val_batches=0, plugins=[ShardCkptIO(also="huggingface")])
    run.fit(module := Causal("llama"), tiny.loader())
    largest = max(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    DTensor.full_tensor = DTensor.redistribute = gathering  # type: ignore[method-assign]
    checkpoint = run._checkpoint_connector.dump_checkpoint()
    with NoFullTensor() as saving:
        run.strategy.save_checkpoint(checkpoint, path)
    return saving.largest, largest


@pytest.mark.slow
def test_no_rank_holds_a_full_tensor_while_both_formats_are_written(tmp_path: Path) -> None:
    for saving, largest in run_ranks(4, saved_watched, str(tmp_path / "a.ckpt")):
        assert saving <= -(-largest // 4)


def resumed(path: str) -> None:
    run = tiny.trainer({}, max_steps=3, limit_val_batches=0)
    run.fit(Causal("llama-tied"), tiny.loader(), ckpt_path=path)
    assert run.global_step == 3


def test_a_module_without_a_model_of_transformers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    io = ShardCkptIO(also="huggingface")
    module = torch.nn.Linear(2, 2)
    io.attach(Ranks.alone(), module, {})
    with pytest.raises(StateError, match=r"a model of transformers, found none"):
        io.save_checkpoint({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="also is"):
        ShardCkptIO(also="onnx")  # type: ignore[arg-type]


def test_a_model_with_adapters_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"also='huggingface' cannot write a model with adapters.*--format peft"):
        save(tmp_path / "a.ckpt", {"model": lora(adapters.llama())}, also="huggingface")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_the_second_copy_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    module = torch.nn.Module()
    module.model = model_of("llama")
    io = ShardCkptIO(also="huggingface")
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict(), "global_step": 1}, path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    pwrite = os.pwrite

    def full(file: int, data: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith("/model.safetensors"):
            raise OSError(28, "No space left on device")
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device.*model\.safetensors"):
        io.save_checkpoint({"state_dict": module.state_dict(), "global_step": 2}, path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
