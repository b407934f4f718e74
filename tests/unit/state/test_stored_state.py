"""What a checkpoint keeps of what a model knows about Hugging Face. Oracle: what save_pretrained writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt import save
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.state.data_position import Division
from lightning_shardckpt.state.documents import parse_document
from lightning_shardckpt.state.libraries import describe_hugging_face
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


def test_a_config_that_raises_does_not_fail_a_save(tmp_path: Path) -> None:
    module = Wrapped(llama())
    module.model.config.to_json_string = lambda: 1 / 0
    with pytest.warns(UserWarning, match="names of the model: ZeroDivisionError"), pytest.raises(KeyError):
        saved(module, tmp_path / "a.ckpt")
    assert verify(tmp_path / "a.ckpt").findings == ()


def test_the_experts_of_a_layer_have_the_names_and_the_boxes_that_transformers_gives_them(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    config = transformers.MixtralConfig(**LLAMA, num_local_experts=3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    found, notes = describe_hugging_face(model)
    assert found is not None and notes == ()
    names, expected, made = found["models"][0]["names"], {}, {}
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        for to, start, stop, shape in names.get(name) or [[name, [0] * tensor.ndim, tensor.shape, tensor.shape]]:
            made[to] = tensor[tuple(map(slice, start, stop))].reshape(shape)
    assert len(names) == 3 * LLAMA["num_hidden_layers"] and made.keys() == expected.keys()
    assert [k for k, t in expected.items() if not torch.equal(t, made[k])] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [({"ties": {}}, "not a list"), ({"prefix": 1}, "not text"), ({"names": {"a": [["b", [2], [1]]]}}, "of 4 items")],
)
def test_a_hostile_document_is_refused(change: dict[str, Any], words: str) -> None:
    model: dict[str, Any] = {"prefix": "", "class": "A", "adapter": None, "ties": [], "ignored": [], "names": {}}
    model["files"] = {"config.json": "{}"}
    with pytest.raises(FormatError, match=words):
        parse_document("huggingface", json.dumps({"models": [model | change]}).encode(), "x")


# ── an order is dealt to ranks step by step, whatever their number ────────────────────────────────────────────────────


CASES = [Division(*case) for case in itertools.product((1, 2, 3, 5), (1, 2, 3, 4), (False, True))]


@pytest.mark.parametrize("division", CASES, ids=str)
def test_every_sample_comes_once_in_order(division: Division) -> None:
    size = division.ranks * division.batch_size
    for count in range(1, 45):
        order = list(range(100, 100 + count))
        ranks = [list(division.deal(order, rank)) for rank in range(division.ranks)]
        steps = list(zip(*ranks, strict=True))  # the same number on every rank
        assert len(steps) == len(division.sizes(count))
        read = [part[i] for parts in steps for i in range(division.batch_size) for part in parts if i < len(part)]
        repeated = division.repeats(count)
        once = read[: len(read) - repeated]
        assert once == order[: len(once)] and set(read) == set(once)
        lengths = [[len(part) for part in parts] for parts in steps]
        assert all(1 <= length <= division.batch_size for step in lengths for length in step)
        assert all(max(step) - min(step) <= (number == len(steps) - 1) for number, step in enumerate(lengths))
        left_out = count - len(once)
        if division.drop_last:
            assert left_out == count % size
        else:
            assert left_out == 0
        enough = count >= division.ranks and (division.batch_size > 1 or count % division.ranks == 0)
        assert not repeated or not (enough or division.drop_last)
        assert division.sizes(count) == [len({*itertools.chain(*parts)}) for parts in steps]


def test_state_that_a_load_would_refuse_is_not_committed(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    save(tmp_path / "a", state)
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    optimizer.state[model.bias]["$"] = 1.0  # the format gives a meaning to it
    with pytest.raises(StateError, match="a load would refuse it: the optimizer state of rank 0"):
        save(tmp_path / "a", state, overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
