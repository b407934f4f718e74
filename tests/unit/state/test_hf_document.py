"""What a checkpoint keeps of what a model knows about Hugging Face. Oracle: what save_pretrained writes."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.state.documents import checked, unpacked
from lightning_shardckpt.state.hf_directory import applied
from lightning_shardckpt.state.hf_document import HuggingFace, packed
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.verify import verify
from lightning_shardckpt.transfer.reader import Checkpoint

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Words:
    """Behaves like a tokenizer; counts how often it is saved."""

    def __init__(self, *files: tuple[str, bytes]) -> None:
        self.files, self.saves, self.chat_template = dict(files), 0, "plain"

    def __repr__(self) -> str:
        return f"Words({sorted(self.files)})"

    def save_pretrained(self, folder: str) -> None:
        self.saves += 1
        for name, content in self.files.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            Path(folder, name).write_bytes(content)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module, **more: Any) -> None:
        super().__init__()
        self.model = model
        for name, value in more.items():
            setattr(self, name, value)


def llama(**more: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA, **more))


def saved(module: nn.Module, path: Path) -> dict[str, Any]:
    io = ShardCkptIO()
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict(), "global_step": 0, "epoch": 0}, path)
    return document(path)


def document(path: Path) -> dict[str, Any]:
    with Checkpoint(LocalStorage(), str(path)) as checkpoint:
        return checked("huggingface", checkpoint.document("huggingface.json"), "it")


def test_a_checkpoint_has_the_files_that_save_pretrained_writes(tmp_path: Path) -> None:
    tokenizer = Words(("tokenizer.json", b"{}"), ("spiece.model", bytes(range(256))), ("merges.txt", b"a b\n" * 50_000))
    module = Wrapped(llama(tie_word_embeddings=True).bfloat16(), tokenizer=tokenizer)
    found = saved(module, tmp_path / "a.ckpt")
    (model,) = found["models"]
    module.model.save_pretrained(tmp_path / "judge")
    expected = {name: json.loads((tmp_path / "judge" / name).read_text()) for name in model["files"]}
    assert expected.keys() == {"config.json", "generation_config.json"}
    assert {name: json.loads(text) for name, text in model["files"].items()} == expected
    assert (model["prefix"], model["class"], model["ties"]) == ("model.", "LlamaForCausalLM", ["lm_head.weight"])
    assert {name: unpacked(content, name) for name, content in found["files"].items()} == tokenizer.files
    assert verify(tmp_path / "a.ckpt").findings == ()
    assert "huggingface.json" in [file["name"] for file in inspect(tmp_path / "a.ckpt")["files"]]


def test_a_module_without_transformers_writes_no_such_document(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        saved(Wrapped(nn.Linear(2, 2), tokenizer=Words(("tokenizer.json", b"{}"))), tmp_path / "a.ckpt")


def test_a_tokenizer_is_serialised_once_and_a_changed_config_is_seen() -> None:
    tokenizer = Words(("tokenizer.json", b"{}"))
    module, known = Wrapped(llama(), tokenizer=tokenizer), HuggingFace()
    first, _ = known.document(module)
    module.model.config.rms_norm_eps = 0.5
    second, _ = known.document(module)
    assert first is not None and second is not None and tokenizer.saves == 1
    assert json.loads(second["models"][0]["files"]["config.json"])["rms_norm_eps"] == 0.5
    tokenizer.chat_template = "another"
    known.document(module)
    assert tokenizer.saves == 2


def test_a_step_of_a_tokenizer_that_changed_is_seen() -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a")
    module, known = Wrapped(llama(), tokenizer=tokenizer), HuggingFace()

    def processor() -> Any:
        found, _ = known.document(module)
        assert found is not None
        return json.loads(unpacked(found["files"]["tokenizer.json"], ""))["post_processor"]["special_tokens"]

    assert processor() == {}
    made = tokenizers.processors.TemplateProcessing(single="b $A", special_tokens=[("b", 1)])
    tokenizer.backend_tokenizer.post_processor = made
    assert processor().keys() == {"b"}


class ProcessorMixin:
    """Has a name by which processors of transformers are known."""


class Processor(ProcessorMixin, Words):
    def __repr__(self) -> str:
        return f"Processor({sorted(self.files)})"


class Pipe(Words):
    def __init__(self) -> None:
        super().__init__(("unet.json", b"{}"))
        self.unet = nn.Linear(1, 1)


def test_whatever_has_save_pretrained_is_carried_under_any_name_and_the_rest_is_named() -> None:
    import transformers

    inner = Wrapped(llama(), tok=Words(("vocab.txt", b"a"), ("bpe.codes", b"a b"), ("README.md", b"no")))
    module = Wrapped(
        inner,
        video_processor=Words(("video_preprocessor_config.json", b"{}")),
        processor=Processor(("tokenizer_config.json", b'{"by": "processor"}')),
        words=Words(("tokenizer_config.json", b"{}")),
        target=Words(("tokenizer_config.json", b'{"of": "target"}'), ("added.json", b"{}")),
        generation=transformers.GenerationConfig(),
        settings=transformers.LlamaConfig(),
        pipe=Pipe(),
        processors={"sound": Words(("feature_extractor.json", b"{}"))},
        others=[Words(("others.json", b"{}")), Words(("others.json", b"[]"))],
    )
    found, notes = HuggingFace().document(module)
    assert found is not None
    assert found["files"] == {
        "vocab.txt": "a",
        "feature_extractor.json": "{}",
        "others.json": "{}",
        "bpe.codes": "a b",
        "video_preprocessor_config.json": "{}",
        "tokenizer_config.json": '{"by": "processor"}',
    }
    expected = [
        "target, a Words, is not in the checkpoint: another attribute has another file tokenizer_config.json",
        "pipe, a Pipe, is not in the checkpoint: it holds modules",
        "README.md, of model.tok, is not in the checkpoint: a file beside a model's weights has one of the endings",
        "others.1, a Words, is not in the checkpoint: another attribute has another file others.json",
    ]
    assert [[line for line in notes if line.startswith(text)] != [] for text in expected] == [True] * 4
    assert len(notes) == 4


class Closed:
    """A tokenizer that can be neither referred to weakly nor compared."""

    __slots__ = ("saves",)

    def __init__(self) -> None:
        self.saves = 0

    def __repr__(self) -> str:
        raise RuntimeError

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "vocab.txt").write_text("a")


def test_a_tokenizer_of_any_class_is_saved() -> None:
    found, notes = HuggingFace().document(Wrapped(llama(), tokenizer=Closed()))
    assert found is not None and notes == () and found["files"] == {"vocab.txt": "a"}


def test_what_cannot_be_saved_is_a_note_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    class Broken(Words):
        def save_pretrained(self, folder: str) -> None:
            raise RuntimeError("no vocabulary")

    module = Wrapped(llama(), tokenizer=Broken(), processor=Words(("a.sh", b"echo"), ("p.json", b"{}")))
    with pytest.warns(UserWarning) as caught:
        found = saved(module, tmp_path / "a.ckpt")
    said = [str(warning.message) for warning in caught]
    assert ["tokenizer, a Broken, is not in the checkpoint: RuntimeError: no vocabulary" in text for text in said] == [
        True,
        False,
    ]
    assert "a.sh, of processor" in said[1] and found["files"].keys() == {"p.json"}


def test_a_config_of_more_values_than_json_may_have_is_left_out(tmp_path: Path) -> None:
    module = Wrapped(llama())
    module.model.config.to_json_string = lambda: json.dumps({"a": "," * (1 << 22)})
    with pytest.warns(UserWarning, match="more than 2097152 values"), pytest.raises(KeyError):
        saved(module, tmp_path / "a.ckpt")
    assert verify(tmp_path / "a.ckpt").findings == ()


def test_tokenizers_that_are_too_large_are_left_out_with_a_note(tmp_path: Path) -> None:
    module = Wrapped(llama(), tokenizer=Words(("spiece.model", os.urandom(26 << 20))))
    with pytest.warns(UserWarning, match="the tokenizer's files are too large"):
        found = saved(module, tmp_path / "a.ckpt")
    assert found["files"] == {} and found["models"][0]["files"].keys() == {"config.json", "generation_config.json"}


def test_a_config_that_raises_does_not_fail_a_save(tmp_path: Path) -> None:
    module = Wrapped(llama())
    module.model.config.to_json_string = lambda: 1 / 0
    with pytest.warns(UserWarning, match="is not in the checkpoint: ZeroDivisionError"), pytest.raises(KeyError):
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
    patterns, expected, made = found["models"][0]["names"], {}, {}
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        boxes = [part for p, parts in patterns.items() for part in applied(p, parts, name) or ()]
        for to, start, stop, shape in boxes or [[name, [0] * tensor.ndim, tensor.shape, tensor.shape]]:
            made[to] = tensor[tuple(map(slice, start, stop))].reshape(shape)
    assert len(patterns) == 3 and made.keys() == expected.keys()
    assert [k for k, t in expected.items() if not torch.equal(t, made[k])] == []


def good() -> dict[str, Any]:
    model = {"prefix": "", "class": "A", "adapter": None, "ties": [], "ignored": [], "names": {}}
    return {"models": [{**model, "files": {"config.json": "{}"}}], "files": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("files"), "not an object with models, files"),
        (lambda d: d.update(files={"../x.json": ""}), "may stand beside"),
        (lambda d: d.update(files={"/etc/x.json": ""}), "may stand beside"),
        (lambda d: d.update(files={"x.bin": ""}), "may stand beside"),
        (lambda d: d.update(files={"model.safetensors.index.json": ""}), "may stand beside"),
        (lambda d: d.update(files={"x.json": 3}), "not an object with zlib"),
        (lambda d: d.update(files={"x.json": {"zlib": "", "bytes": 1 << 40}}), "expected at most"),
        (lambda d: d.update(files={f"{i}.json": "" for i in range(65)}), "more than 64"),
        (lambda d: d.update(models={}), "not a list"),
        (lambda d: d["models"][0].update(prefix=1), "not text"),
        (lambda d: d["models"][0].update(ties="abc"), "not a list"),
        (lambda d: d["models"][0].update(adapter=[]), "not text"),
        (lambda d: d["models"][0]["files"].clear(), "not text"),
        (lambda d: d["models"][0]["files"].update({"config.json": "[1]"}), "not an object"),
        (lambda d: d["models"][0].update(names={"a": [["b", [0], [1]]]}), "expected a name, start, stop and shape"),
        (lambda d: d["models"][0].update(names={"a": [["b", [2], [1], [1]]]}), "no box"),
        (lambda d: d["models"][0].update(names={"a": [["b", [-1], [1], [1]]]}), "not a size"),
    ],
)
def test_a_hostile_document_is_refused(change: Any, words: str) -> None:
    value = good()
    checked("huggingface", json.dumps(value).encode(), "x")
    change(value)
    with pytest.raises(FormatError, match=words):
        checked("huggingface", json.dumps(value).encode(), "x")


def test_a_compressed_file_takes_no_more_memory_than_it_says() -> None:
    content = packed(bytes(1 << 22))
    for wrong in ({**content, "bytes": 100}, {**content, "zlib": "@@"}, {**content, "zlib": content["zlib"][:40]}):
        with pytest.raises(FormatError, match="x"):
            unpacked(wrong, "x")
    assert unpacked(content, "x") == bytes(1 << 22)
