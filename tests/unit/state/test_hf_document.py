"""What a checkpoint keeps of what a model knows about Hugging Face. Oracle: what save_pretrained writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.state.documents import parse_document
from lightning_shardckpt.state.hf_document import HuggingFace
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.verify import verify
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support.hub import LLAMA, Wrapped, llama


def saved(module: nn.Module, path: Path) -> dict[str, Any]:
    io = ShardCkptIO()
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict(), "global_step": 0, "epoch": 0}, path)
    return document(path)


def document(path: Path) -> dict[str, Any]:
    with Checkpoint(LocalStorage(), str(path)) as checkpoint:
        return parse_document("huggingface", checkpoint.document("huggingface.json"), "it")


def test_a_checkpoint_has_the_files_that_save_pretrained_writes(tmp_path: Path) -> None:
    module = Wrapped(llama(tie_word_embeddings=True).bfloat16())
    found = saved(module, tmp_path / "a.ckpt")
    (model,) = found["models"]
    module.model.save_pretrained(tmp_path / "judge")
    expected = {name: json.loads((tmp_path / "judge" / name).read_text()) for name in model["files"]}
    assert expected.keys() == {"config.json", "generation_config.json"}
    assert {name: json.loads(text) for name, text in model["files"].items()} == expected
    assert (model["prefix"], model["class"], model["ties"]) == ("model.", "LlamaForCausalLM", ["lm_head.weight"])
    assert verify(tmp_path / "a.ckpt").findings == ()
    assert "huggingface.json" in [file["name"] for file in inspect(tmp_path / "a.ckpt")["files"]]


def test_a_module_without_transformers_writes_no_such_document(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        saved(Wrapped(nn.Linear(2, 2)), tmp_path / "a.ckpt")


def test_a_config_that_raises_does_not_fail_a_save(tmp_path: Path) -> None:
    module = Wrapped(llama())
    module.model.config.to_json_string = lambda: 1 / 0
    with pytest.warns(UserWarning, match="names of the model: ZeroDivisionError"), pytest.raises(KeyError):
        saved(module, tmp_path / "a.ckpt")
    assert verify(tmp_path / "a.ckpt").findings == ()


def test_several_models_are_recorded_with_their_prefixes_and_a_peft_model_by_its_base() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
        module = Wrapped(llama(), teacher=torch.compile(llama()), adapted=adapted)
    found, notes = HuggingFace().document(module)
    assert found is not None and notes == ()
    assert [(m["prefix"], m["adapter"]) for m in found["models"]] == [
        ("model.", None),
        ("teacher.", None),
        ("adapted.base_model.model.", "lora_"),
    ]


def test_the_experts_of_a_layer_have_the_names_and_the_boxes_that_transformers_gives_them(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    config = transformers.MixtralConfig(**LLAMA, num_local_experts=3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    found, notes = HuggingFace().document(model)
    assert found is not None and notes == ()
    names, expected, made = found["models"][0]["names"], {}, {}
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        for to, start, stop, shape in names.get(name) or [[name, [0] * tensor.ndim, tensor.shape, tensor.shape]]:
            made[to] = tensor[tuple(map(slice, start, stop))].reshape(shape)
    assert len(names) == 3 * LLAMA["num_hidden_layers"] and made.keys() == expected.keys()
    assert [k for k, t in expected.items() if not torch.equal(t, made[k])] == []


def good() -> dict[str, Any]:
    model = {"prefix": "", "class": "A", "adapter": None, "ties": [], "ignored": [], "names": {}}
    return {"models": [{**model, "files": {"config.json": "{}"}}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(models={}), "not a list"),
        (lambda d: d["models"][0].update(prefix=1), "not text"),
        (lambda d: d["models"][0]["files"].clear(), "with config.json"),
        (lambda d: d["models"][0]["files"].update({"config.json": "[1]"}), "not an object"),
        (lambda d: d["models"][0]["files"].update({"generation_config.json": {}}), "not text"),
        (lambda d: d["models"][0].update(names={"a": [["b", [0], [1]]]}), "list of 4"),
        (lambda d: d["models"][0].update(names={"a": [["b", [2], [1], [1]]]}), "not a box"),
    ],
)
def test_a_hostile_document_is_refused(change: Any, words: str) -> None:
    value = good()
    parse_document("huggingface", json.dumps(value).encode(), "x")
    change(value)
    with pytest.raises(FormatError, match=words):
        parse_document("huggingface", json.dumps(value).encode(), "x")
