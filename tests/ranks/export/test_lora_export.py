"""Adapters exported from checkpoints, as PEFT loads them. Oracle: what PEFT's own save_pretrained writes."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from torch import nn

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.export.whole_files import ADAPTER_CONFIG as CONFIG
from lightning_shardckpt.export.whole_files import ADAPTER_WEIGHTS as WEIGHTS
from lightning_shardckpt.format.clean_fqn import base_fqn, clean_fqn
from lightning_shardckpt.state.libraries import describe_adapters, stored_names
from tests.support import adapters, small, tiny
from tests.support.adapters import FSDP, PP, TP, base, fit_each, fit_once, whole
from tests.support.faults import flip
from tests.support.pool import run_ranks

__all__ = ["base"]  # a fixture
EMBEDDED = {"target_modules": ["embed_tokens", "up_proj"], "lora_dropout": 0.0}


def tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, "pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118


def compare_with_peft(folder: str, base: str, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Against PEFT's own files of the same model, and by what PEFT loads."""
    model = adapters.oracle(base, state, options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`", UserWarning)
        model.save_pretrained("theirs")
    (ours, metadata), (theirs, their_metadata) = tensors(Path(folder, WEIGHTS)), tensors(Path("theirs", WEIGHTS))
    if "adapters-only" in folder:  # PEFT saves the frozen weights of an embedding, too, which are the base's
        theirs = {key: value for key, value in theirs.items() if not key.endswith("base_layer.weight")}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    assert metadata == their_metadata
    mine, yours = (json.loads(Path(f, CONFIG).read_text()) for f in (folder, "theirs"))
    assert mine | {"target_modules": set(mine["target_modules"])} == yours | {
        "target_modules": set(yours["target_modules"])
    }
    loaded, keys = adapters.from_pretrained(base, folder)
    assert not [key for key in keys.missing_keys if "lora_" in key or "modules_to_save" in key]
    assert keys.unexpected_keys == []
    assert torch.equal(adapters.logits(loaded), adapters.logits(model))


# Strategy of the training; whether the checkpoint has the adapters only; options of LoRA.
WAYS: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "fsdp2 adapters-only": (FSDP, True, adapters.LORA),
    "pp2 adapters-only": (PP, True, adapters.LORA),
    "tp2 adapters-only embedding": (TP, True, EMBEDDED),
}


def test_peft_loads_what_is_exported(base: str, tmp_path: Path) -> None:
    # frozen weights of the base are in the states, too, so that the oracle has them
    runs = [
        (strategy, {"base": base, "save": f"{tmp_path}/{way}.ckpt", "options": options, "io": {"adapters_only": only}})
        for way, (strategy, only, options) in WAYS.items()
    ]
    states = [whole(list(ranks)) for ranks in zip(*run_ranks(2, fit_each, runs), strict=True)]
    for way, state in zip(WAYS, states, strict=True):
        output = tmp_path / way
        consolidate(tmp_path / f"{way}.ckpt", output, format="peft")
        assert sorted(os.listdir(output)) == [CONFIG, WEIGHTS]
        run_ranks(1, compare_with_peft, str(output), base, state, WAYS[way][2])


class Two(adapters.Adapted):
    """Two adapters, of which the second one is active."""

    def configure_model(self) -> None:
        from peft import LoraConfig

        super().configure_model()
        if "other" not in self.model.peft_config:
            self.model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
            self.model.set_adapter("other")


def save_two(path: str) -> dict[str, torch.Tensor]:
    pl.seed_everything(1, verbose=False)
    io = ShardCkptIO(adapters_only=True)
    tiny.train(module := Two(options={"target_modules": ["q_proj"]}), FSDP, 1, save=path, plugins=[io])
    return {key.removeprefix("model/model."): value for key, value in tiny.full_state(module, []).items()}


def test_each_of_several_adapters_gets_a_folder(tmp_path: Path) -> None:
    path, output = str(tmp_path / "a.ckpt"), tmp_path / "out"
    state = run_ranks(2, save_two, path)[0]
    assert consolidate(path, output, format="peft") == output
    for folder, name, rank in ((output, "default", 3), (output / "other", "other", 2)):
        found, _ = tensors(folder / WEIGHTS)
        expected = {key.replace(f".{name}.", "."): v for key, v in state.items() if f".{name}." in key}
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
        assert json.loads((folder / CONFIG).read_text())["r"] == rank


KINDS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"], "bias": "lora_only", "use_dora": True},
    {"target_modules": ["q_proj", "down_proj"], "bias": "all", "lora_bias": True},
    {"target_modules": r".*layers\.1\.self_attn\.(k|v)_proj", "modules_to_save": ["mlp"]},
    {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "norm"]},
    {"target_modules": r"(.*\.)?(embed_tokens|up_proj)"},
    {"target_modules": ["lm_head", "k_proj"], "use_rslora": True},
    {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
    {"target_modules": ["q_proj"], "task_type": None},
]


def names_of_kinds() -> None:
    from peft import get_peft_model_state_dict

    warnings.simplefilter("ignore")
    for options in KINDS:
        import transformers

        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**adapters.LLAMA, attention_bias=True))
        before = set(plain.state_dict())
        model = adapters.lora(plain, **options)
        (adapter,) = describe_adapters(nn.ModuleList([model]))
        state = {f"0.{key}": value for key, value in model.state_dict().items()}
        expected = get_peft_model_state_dict(model)
        found = {name: state[stored] for name, stored in stored_names(adapter, state.keys()).items()}
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        live = {clean_fqn(key) for key in model.state_dict() if "lora_" not in key and "delta" not in key}
        assert {base_fqn(key) for key in live} == before, options


def test_names_are_those_that_peft_gives_for_every_option_of_lora() -> None:
    run_ranks(1, names_of_kinds, init_process_group=False)


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def checkpoint(base: str, tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    run_ranks(1, fit_once, FSDP, {"base": base, "save": str(path)})
    return path


def test_bad_input_is_an_error_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(CheckpointNotFoundError):
        consolidate(tmp_path / "none", output, format="peft")
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="already exists"):
        consolidate(checkpoint, tmp_path / "taken", format="peft")
    original = (checkpoint / "peft.json").read_bytes()
    small.edit(checkpoint, "peft.json", lambda value: value["adapters"][0].update({"name": "../../x"}))
    with pytest.raises(FormatError, match="not the name of an adapter"):
        consolidate(checkpoint, output, format="peft")
    small.put(checkpoint, "peft.json", original)
    flip(checkpoint / small.SHARD, -1)
    with pytest.raises(CorruptionError, match="corrupted data"):
        consolidate(checkpoint, output, format="peft")
    assert not output.exists()


def test_the_command_writes_a_folder_for_peft(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["consolidate", str(checkpoint), "--format", "peft", "--output_file", str(tmp_path / "adapter")]
    assert main(arguments) == 0
    assert sorted(os.listdir(tmp_path / "adapter")) == [CONFIG, WEIGHTS]
    assert main(arguments) == 1 and "already exists" in capsys.readouterr().err
