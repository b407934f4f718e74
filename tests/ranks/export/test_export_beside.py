"""Exports that follow saves. Oracles: ``from_pretrained``, and the tensors of the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_shardckpt import ShardCkptIO, load_keys
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.export.safetensors_export import export_beside
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.hub import Causal, model_of
from tests.support.pool import run_each, selected

TP_FSDP = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto", "data_parallel_shard_size": 2}
PP = {"pipeline_parallel_size": 2}


def trained(kind: str, strategy: dict[str, Any], path: str, options: dict[str, Any]) -> list[str]:
    """The files of the export once ``wait`` has returned."""
    pl.seed_everything(1)
    io = ShardCkptIO(export="huggingface", **options)
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0, plugins=[io])
    run.fit(Causal(kind), tiny.loader())
    run.save_checkpoint(path)
    io.wait()
    return sorted(os.listdir(f"{path}/huggingface")) if run.is_global_zero else []


def hub_weights(folder: Path) -> dict[str, Tensor]:
    """What transformers loads from a directory, which must have all that the model needs and nothing else."""
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert {name: found for name, found in info.items() if found} == {}
    return dict(model.state_dict())


WAYS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "tied llama fsdp2 tp2": (4, "llama-tied", TP_FSDP, {"use_async": True}),
    "mixtral pp2": (2, "mixtral", PP, {"sync_files": False}),
}
"""How many ranks train what, under which strategy, and how they save."""


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the selected checkpoints, and what rank 0 saw of each; tests must not change them."""
    folder, calls = tmp_path_factory.mktemp("exported"), {}
    for way in selected(request, "way"):
        world, kind, strategy, options = WAYS[way]
        calls[way] = (world, trained, kind, strategy, str(folder / way), options)
    return folder, run_each(calls)


@pytest.mark.parametrize("way", WAYS)
def test_transformers_loads_the_export_of_a_save(way: str, exported: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = exported
    path = folder / way
    assert {"config.json", "model.safetensors"} <= {*seen[way][0]}
    found = hub_weights(path / "huggingface")
    expected = dict(load_keys(path, [f"model.{name}" for name in found]))
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[f"model.{name}"])] == []
    assert verify(path).findings == ()
    assert [name for name in os.listdir(path) if name.startswith(".")] == []


def saved(path: str, step: int, io: ShardCkptIO | None = None, **options: Any) -> ShardCkptIO:
    """Save a Llama whose weights are all equal to ``step``."""
    module = torch.nn.Module()
    module.model = model_of("llama")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float(step))
    io = io or ShardCkptIO(**options)
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict(), "global_step": step}, path)
    return io


def test_a_disk_that_is_full_for_the_export_is_a_warning_and_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    saved(str(path), 1)
    before = {file.name for file in path.iterdir()}
    fsync = os.fsync

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("/model.safetensors"):
            raise OSError(28, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"not exported for transformers: .*a\.ckpt.*No space left on device"):
        saved(str(path), 2, export="huggingface").wait()
    assert verify(path).findings == ()
    assert {file.name for file in path.iterdir()} == before
    assert dict(load_keys(path, ["model.lm_head.weight"]))["model.lm_head.weight"].unique().tolist() == [2.0]


def test_the_next_save_waits_for_the_export_and_a_removal_takes_it_along(tmp_path: Path) -> None:
    io = saved(str(tmp_path / "a.ckpt"), 1, export="huggingface")
    saved(str(tmp_path / "b.ckpt"), 2, io)
    assert (tmp_path / "a.ckpt" / "huggingface" / "config.json").exists()
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.wait()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_a_module_without_a_model_of_transformers_is_saved_with_a_warning(tmp_path: Path) -> None:
    io, module = ShardCkptIO(export="huggingface"), torch.nn.Linear(2, 2)
    io.attach(Ranks.alone(), module, {})
    with pytest.warns(UserWarning, match="not exported for transformers: .* no model of transformers"):
        io.save_checkpoint({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
        io.wait()
    assert verify(tmp_path / "a.ckpt").findings == ()
    with pytest.raises(ValueError, match='export is "huggingface" or None'):
        ShardCkptIO(export="onnx")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adapters_only leaves out the base model"):
        ShardCkptIO(export="huggingface", adapters_only=True)


def test_an_export_in_a_store_is_of_the_checkpoint_beside_it_and_goes_with_it(tmp_path: Path) -> None:
    url, store = f"memory:/{tmp_path}/a.ckpt", fsspec.filesystem("memory")

    def export() -> list[str]:
        return sorted(name.rpartition("/")[2] for name in store.find(f"{url}/huggingface"))

    for step in (1, 2):
        saved(url, step, export="huggingface").wait()
        assert {"config.json", "model.safetensors"} <= {*export()} and verify(url).findings == ()
        store.get(f"{url}/huggingface", str(tmp_path / f"copy{step}"), recursive=True)
        assert {tensor.unique().item() for tensor in hub_weights(tmp_path / f"copy{step}").values()} == {float(step)}
    saved(url, 3)
    assert export() == [] and verify(url).findings == ()
    saved(url, 4, export="huggingface").wait()
    assert export() != []
    ShardCkptIO().remove_checkpoint(url)
    assert store.find(url) == []


def test_an_export_of_a_checkpoint_that_was_replaced_meanwhile_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = str(tmp_path / "a.ckpt"), os.fsync

    def replacing(file: int) -> None:
        fsync(file)
        if os.readlink(f"/proc/self/fd/{file}").endswith("/config.json"):  # the last one
            monkeypatch.undo()
            saved(path, 2)

    saved(path, 1)
    monkeypatch.setattr(os, "fsync", replacing)
    with pytest.raises(CheckpointNotFoundError, match="another process replaced it"):
        export_beside(path, ShardCkptIO().storage)
    assert not os.path.exists(f"{path}/huggingface") and verify(path).findings == ()
