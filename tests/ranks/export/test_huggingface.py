"""What was trained on several ranks, as a directory for transformers. Oracle: from_pretrained, gathered weights."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_shardckpt import ShardCkptIO, load_keys
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.export.consolidation import export_beside
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.exports import in_windows
from tests.support.hub import Causal, Wrapped, llama, model_of
from tests.support.pool import run_each, selected

TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}
PP = {"pipeline_parallel_size": 2}


def train(kind: str, strategy: Any, path: str) -> dict[str, Any]:
    """This rank's weights when training is done, whole; the checkpoint has its export inside."""
    pl.seed_everything(1)
    io = ShardCkptIO(export="huggingface", use_async=kind == "llama-tied")
    tiny.train(module := Causal(kind), strategy, 2, save=path, plugins=[io])
    io.wait()
    return {k: t for k, t in tiny.full_state(module, []).items() if k.startswith("model/")}


def from_pretrained(folder: Path) -> Any:
    """The model that transformers makes of a directory, if it has nothing to complain of."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {k: v for k, v in info.items() if v} == {}
    return model.eval()


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24).view(2, 12)).logits  # type: ignore[no-any-return]


WAYS = {
    "llama, tp2": ("llama", TP),
    "tied llama, pp2": ("llama-tied", PP),
    "tied llama": ("llama-tied", {}),
    "mixtral, pp2": ("mixtral", PP),
    "gpt2": ("gpt2", {}),
    "qwen3-moe": ("qwen3-moe", {}),
}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[Any]]]:
    """Where the checkpoints of the selected ways are, and the weights that each of two ranks had."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_each({way: (2, train, *WAYS[way], str(folder / way)) for way in selected(request, "way")})


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if "," not in way else []) for way in WAYS])
def test_from_pretrained_loads_what_was_trained_and_answers_the_same(
    way: str, trained: tuple[Path, dict[str, list[Any]]], tmp_path: Path
) -> None:
    kind, path = WAYS[way][0], trained[0] / way
    weights = {k: t for rank in trained[1][way] for k, t in rank.items()}
    judge = model_of(kind)
    own = {k.removeprefix("model/model."): t for k, t in weights.items() if k.startswith("model/model.")}
    missing, unexpected = judge.load_state_dict(own, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    judge.tie_weights()
    whole = consolidate(path, tmp_path / "whole", format="huggingface")
    beside = {file.name: file.read_bytes() for file in (path / "huggingface").iterdir()}
    assert beside == {file.name: file.read_bytes() for file in whole.iterdir()}
    assert verify(path).findings == () and not list(path.glob(".*"))
    chunks = consolidate(path, tmp_path / "chunks", format="huggingface", size_per_shard=0.01)
    assert len(list(chunks.glob("model-*.safetensors"))) > 1
    expected = answers(judge)
    for folder in (whole, chunks):
        found = from_pretrained(folder)
        assert tiny.differences(judge.state_dict(), found.state_dict()) == []
        assert torch.equal(answers(found), expected)
    judge.save_pretrained(tmp_path / "judge")
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "judge" / name).exists():
            assert json.loads((whole / name).read_text()) == json.loads((tmp_path / "judge" / name).read_text())
    a, b = load_file(whole / "model.safetensors"), load_file(tmp_path / "judge" / "model.safetensors")
    assert tiny.differences(a, b) == []


# ── one process ───────────────────────────────────────────────────────────────────────────────────────────────────


def saved(module: nn.Module, path: Path) -> Path:
    io = ShardCkptIO()
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict(), "global_step": 0, "epoch": 0}, path)
    return path


@pytest.mark.parametrize("kind", ["llama-tied", "mixtral"])
def test_a_dtype_is_that_of_the_weights_and_of_the_config(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    folder = consolidate(saved(Wrapped(model), tmp_path / "a.ckpt"), format="huggingface", dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    found = from_pretrained(folder)
    assert found.dtype == torch.bfloat16
    assert tiny.differences(found.state_dict(), model.bfloat16().state_dict()) == []


def test_experts_are_cut_apart_alike_in_windows_of_any_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float64", "size_per_shard": 0.005}
    path = saved(Wrapped(model_of("mixtral")), tmp_path / "a.ckpt")
    found = []
    for nbytes in (1 << 20, 200, 72):
        folder = in_windows(path, tmp_path / str(nbytes), nbytes, format="huggingface", **options)
        found.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert any(b"experts.2." in content for content in found[0].values())
    assert found[0] == found[1] == found[2] and len(found[0]) > 5


def test_of_several_models_one_is_left_by_the_mapping(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Wrapped(llama(), teacher=llama(), scale=nn.Linear(2, 2))
    path = saved(module, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"under 'model\.', LlamaForCausalLM under 'teacher\.'; leave out all but"):
        consolidate(path, format="huggingface")
    with pytest.raises(ValueError, match=r"can leave 'teacher\.model\.norm\.weight' out, but not rename it to 'norm'"):
        mapping = {r"^model\.": None, "teacher.model.norm.weight": "norm"}
        consolidate(path, format="huggingface", key_mapping=mapping)
    folder = consolidate(path, format="huggingface", key_mapping={r"^model\.": None})
    assert tiny.differences(from_pretrained(folder).state_dict(), module.teacher.state_dict()) == []
    assert "not of the LlamaForCausalLM, and not in the output: 'scale.bias', 'scale.weight'" in caplog.text


def test_an_adapter_is_not_left_out_silently(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        base = llama()
        expected = {k: t.clone() for k, t in base.state_dict().items()}
        adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
    path = saved(Wrapped(adapted), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"has an adapter of PEFT, .*lora_A.*--key_mapping '\\.lora_=null'"):
        consolidate(path, format="huggingface")
    folder = consolidate(path, format="huggingface", key_mapping={r"\.lora_": None})
    assert tiny.differences(from_pretrained(folder).state_dict(), expected) == []


# ── exports that follow saves ─────────────────────────────────────────────────────────────────────────────────────


def saved_equal(path: str, step: int, io: ShardCkptIO | None = None, **options: Any) -> ShardCkptIO:
    """Save a Llama whose weights are all equal to ``step``."""
    module, io = Wrapped(model_of("llama")), io or ShardCkptIO(**options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float(step))
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict(), "global_step": step}, path)
    return io


def test_a_disk_that_is_full_for_the_export_is_a_warning_and_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    saved_equal(str(path), 1)
    before = {file.name for file in path.iterdir()}
    fsync = os.fsync

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("/model.safetensors"):
            raise OSError(28, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"not exported for transformers: .*a\.ckpt.*No space left on device"):
        saved_equal(str(path), 2, export="huggingface").wait()
    assert verify(path).findings == ()
    assert {file.name for file in path.iterdir()} == before
    assert dict(load_keys(path, ["model.lm_head.weight"]))["model.lm_head.weight"].unique().tolist() == [2.0]


def test_the_next_save_waits_for_the_export_and_a_removal_takes_it_along(tmp_path: Path) -> None:
    io = saved_equal(str(tmp_path / "a.ckpt"), 1, export="huggingface")
    saved_equal(str(tmp_path / "b.ckpt"), 2, io)
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
        saved_equal(url, step, export="huggingface").wait()
        assert {"config.json", "model.safetensors"} <= {*export()} and verify(url).findings == ()
        store.get(f"{url}/huggingface", str(tmp_path / f"copy{step}"), recursive=True)
        found = from_pretrained(tmp_path / f"copy{step}").state_dict()
        assert {tensor.unique().item() for tensor in found.values()} == {float(step)}
    saved_equal(url, 3)
    assert export() == [] and verify(url).findings == ()
    saved_equal(url, 4, export="huggingface").wait()
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
            saved_equal(path, 2)

    saved_equal(path, 1)
    monkeypatch.setattr(os, "fsync", replacing)
    with pytest.raises(FileNotFoundError):
        export_beside(path, ShardCkptIO().storage)
    assert not os.path.exists(f"{path}/huggingface") and verify(path).findings == ()
