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
    assert torch.equal(dict(results["prune_state_dict"][0])["embed.weight"], expected["embed.weight"])
    assert differing(dict(torch.load("step-3.pt")["model"]), expected) == []
    tensors = {name: value for name, value in expected.items() if isinstance(value, Tensor)}
    for written in ("one.safetensors", "each", "some"):
        files = [written] if written.startswith("one") else sorted(map(str, Path(written).glob("*.safetensors")))
        merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert merged.keys() <= tensors.keys() and merged.keys() >= tensors.keys() - {"head.weight"}, written
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in merged.items())
        assert len(files) == (len(merged) if written == "each" else 1)


def run_rows_on_ranks(url: str) -> None:
    from lightning.fabric import Fabric
    from peft import LoraConfig, PeftModel, get_peft_model
    from torch.optim import SGD
    from torch.utils.data import DataLoader

    from lightning_shardckpt.consolidate import consolidate
    from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy

    torch.manual_seed(1)
    me, model = dist.get_rank(), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    base, again = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)) for _ in range(2))
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    names: dict[str, Any] = {
        **{known.__name__: known for known in (Fabric, ShardCkptIO, ShardedStrategy, SGD, save, PeftModel)},
        **{known.__name__: known for known in (get_peft_model, consolidate)},
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
    for theirs, lines in rows(ON_RANKS):
        for line in lines:
            exec(line, names)
        if "Booster.boost" in theirs:
            assert all(isinstance(p, DTensor) for p in names["model"].parameters())
            assert differing(whole(names["model"]), before) == []
    assert differing(before, whole(names["model"])) != []
    chat, loaded = ({k: v for k, v in whole(names[name]).items() if "lora_" in k} for name in ("chat", "loaded"))
    assert len(chat) == 2 and differing(loaded, chat) == []


@pytest.mark.slow
def test_the_counterparts_of_booster_and_olmo_core_run_on_ranks(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    run_ranks(2, run_rows_on_ranks, s3.url("step-1"))
    assert "step-1/checkpoint.index.json" in s3.listed() and s3.uploads() == []
