"""What Booster and OLMo-core offer, and what does it here: the tables of the documentation, every row of which runs.

Oracles: the objects before, torch's own state dicts, the safetensors library and PEFT.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt import load, load_keys, metadata, save, save_async
from lightning_shardckpt.consolidate import consolidate
from tests.support.pages import DOCS, table
from tests.support.pool import run_ranks
from tests.support.stores import Bucket
from tests.support.whole_state import differing, trained, whole

State = dict[str, Any]
PAGE = DOCS / "guide" / "migrate.md"
HERE, ON_RANKS = "| Booster and OLMo-core |", "| Booster and OLMo-core, on ranks |"


def rows(head: str) -> list[tuple[str, list[str]]]:
    """Of a table of the page: what is theirs, and the lines of code in the other column."""
    return [(theirs, re.findall(r"`([^`]*)`", ours)) for theirs, ours in table(PAGE, head)]


def test_the_counterparts_of_booster_and_olmo_core_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved, state = trained(1), trained(2, steps=0)
    names = {"save": save, "save_async": save_async, "load": load, "load_keys": load_keys, "metadata": metadata}
    names |= {"consolidate": consolidate, "load_file": load_file}
    results: dict[str, list[Any]] = {}
    for theirs, lines in rows(HERE):
        for line in lines:  # what is saved is of one script, what is loaded goes to another one
            objects = saved if line.startswith("save") else state
            found = eval(line, names | {"state": objects["nested"]} | objects)
            results.setdefault(theirs.partition("`")[2].partition("(")[0].partition("`")[0], []).append(found)
    assert differing(whole(state), whole(saved) | {"step": 0}) == []
    expected = whole(saved["model"])
    (shards,) = results["use_safetensors=True"]
    assert shards.keys() <= expected.keys() and all(torch.equal(tensor, expected[k]) for k, tensor in shards.items())
    assert results["prune_state_dict"][0][0][0] == "embed.weight"
    assert torch.equal(results["prune_state_dict"][0][0][1], expected["embed.weight"])
    assert results["flatten_optimizer_state=True"][0].shape == (7, 5)
    assert differing(dict(torch.load("step-3.pt")["model"]), expected) == []
    assert "optim" in torch.load("step-3.pt")
    tensors = {name: value for name, value in expected.items() if isinstance(value, Tensor)}
    assert load_file("pruned.safetensors").keys() == {"embed.weight"}
    prefixed = {name.removeprefix("teacher."): tensor for name, tensor in load_file("teacher.safetensors").items()}
    assert prefixed.keys() == load_file("one.safetensors").keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in prefixed.items())
    for written in ("one.safetensors", "each", "some"):
        files = [written] if written.startswith("one") else sorted(map(str, Path(written).glob("*.safetensors")))
        merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert merged.keys() <= tensors.keys() and merged.keys() >= tensors.keys() - {"head.weight"}, written
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in merged.items())
        assert len(files) == (len(merged) if written == "each" else 1)


def run_rows_on_ranks(url: str) -> None:
    """Run the table of what goes over ranks; what each row should have done is looked at when it has."""
    from lightning.fabric import Fabric
    from peft import LoraConfig, PeftModel, get_peft_model
    from torch.optim import SGD
    from torch.utils.data import DataLoader

    from lightning_shardckpt import export_adapters
    from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy

    torch.manual_seed(1)
    me, model = dist.get_rank(), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    base, again = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)) for _ in range(2))
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    names: dict[str, Any] = {
        **{known.__name__: known for known in (Fabric, ShardCkptIO, ShardedStrategy, SGD, save, PeftModel)},
        **{known.__name__: known for known in (get_peft_model, export_adapters)},
        "url": url,
        "model": model,
        "batch": torch.randn(4, 4),
        "base": base,
        "again": again,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5),
        "loader": DataLoader(list(range(8)), batch_size=2),
        "group": [dist.new_group([rank]) for rank in range(2)][me],
        "layers": layers,
        "twin": deepcopy(layers),
        "config": LoraConfig(r=2, target_modules=["0"], init_lora_weights=False),
    }
    before = whole(model)
    assert all(any(mark in theirs for theirs, _ in rows(ON_RANKS)) for mark in CHECKS)
    for theirs, lines in rows(ON_RANKS):
        for line in lines:
            exec(line, names)
        for mark, check in CHECKS.items():
            if mark in theirs:
                check(names, before)
    assert differing(before, whole(names["model"])) != []


def check_boost(names: State, before: State) -> None:
    assert all(isinstance(p, DTensor) for p in names["model"].parameters())
    assert differing(whole(names["model"]), before) == []
    assert torch.cat(list(names["loader"])).tolist() == [dist.get_rank() + i for i in range(0, 8, 2)]


def check_backward(names: State, before: State) -> None:
    assert all(isinstance(p.grad, DTensor) for p in names["model"].parameters())
    assert differing(whole(names["model"]), before) != []  # it stepped


def check_pipeline(names: State, before: State) -> None:
    """One process with the same layers is the oracle; of other stages a rank has no tensors."""
    twin = names["twin"]
    loss = twin(names["batch"]).square().mean()
    loss.backward()
    here = dict(names["stages"].module.named_parameters())
    mine = [name for name, p in here.items() if not getattr(p, "is_elsewhere", False)]
    assert mine == [f"0.{dist.get_rank()}.{kind}" for kind in ("weight", "bias")]
    grads = dict(twin.named_parameters())
    assert all(torch.allclose(whole(here[name].grad), grads[name].grad) for name in mine)  # sums in another order
    assert torch.allclose(names["found"]["loss"], loss)


def check_save(names: State, before: State) -> None:
    assert len(list(Path("cache").iterdir())) == 1  # of the one save


def check_group(names: State, before: State) -> None:
    dist.barrier()
    assert [metadata(f"of-{rank}").world_size for rank in range(2)] == [1, 1]
    assert [load(f"of-{rank}", process_group=names["group"])["rank"] for rank in range(2)] == [0, 1]


def check_lora(names: State, before: State) -> None:
    assert any("lora_A" in name for name, p in names["chat"].named_parameters() if isinstance(p, DTensor))


def check_adapter(names: State, before: State) -> None:
    chat, loaded = (
        {name: value for name, value in whole(names[key]).items() if "lora_" in name} for key in ("chat", "loaded")
    )
    assert len(chat) == 2 and differing(loaded, chat) == []


CHECKS = {
    "Booster.boost": check_boost,
    "Booster.backward": check_backward,
    "save_state_dict": check_save,
    "process_group": check_group,
    "execute_pipeline": check_pipeline,
    "lora_config": check_lora,
    "save_lora_as_pretrained": check_adapter,
}


@pytest.mark.slow
def test_the_counterparts_of_booster_and_olmo_core_run_on_ranks(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    run_ranks(2, run_rows_on_ranks, s3.url("step-1"))
    assert "step-1/checkpoint.index.json" in s3.listed() and s3.uploads() == []
