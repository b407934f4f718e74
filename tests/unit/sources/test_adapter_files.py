"""Files of PEFT's adapters, loaded into its models. Oracles: set_peft_model_state_dict, and torch's strict=False."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import nn

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import MismatchError
from tests.support import tiny

KINDS: dict[str, dict[str, Any]] = {
    "one layer": {"target_modules": ["a"]},
    "every layer": {"target_modules": ["a", "b.0", "b.1", "b.2"]},
    "a module as a whole": {"target_modules": ["a"], "modules_to_save": ["b"]},
    "weights apart": {"target_modules": ["a"], "use_dora": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def make(seed: int, kind: str) -> peft.PeftModel:
    torch.manual_seed(seed)
    return peft.get_peft_model(Net(), peft.LoraConfig(r=2, init_lora_weights=False, **KINDS[kind]))


def load(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ckpt.load(path, state, strict=False) == {}
    assert len(caught) == 1 and "base_layer.weight  in model only" in str(caught[0].message)


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_loaded_as_peft_loads_it(kind: str, format: str, tmp_path: Path) -> None:
    make(1, kind).save_pretrained(tmp_path, safe_serialization=format == "safetensors")
    expected = make(2, kind)
    file = tmp_path / f"adapter_model.{format}"
    entries = torch.load(file) if format == "bin" else safetensors.torch.load_file(file)
    peft.set_peft_model_state_dict(expected, entries)
    for path in (tmp_path, file):
        found = make(2, kind)
        load(path, {"m": found})
        assert tiny.differences(expected.state_dict(), found.state_dict()) == []
        inside = nn.Module()
        inside.model = make(2, kind)  # in a module of the user's
        load(path, {"m": inside})
        assert tiny.differences(expected.state_dict(), inside.model.state_dict()) == []
        with pytest.raises(MismatchError, match=r"a\.base_layer\.weight  in model only"):
            ckpt.load(path, {"m": make(2, kind)})


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_state_of_a_wrapped_model_is_loaded(kind: str, tmp_path: Path) -> None:
    expected = make(1, kind).state_dict()
    torch.save(expected, tmp_path / "x.pt")
    safetensors.torch.save_file(dict(expected), tmp_path / "x.safetensors")
    for name in ("x.pt", "x.safetensors"):
        found = make(2, kind)
        ckpt.load(tmp_path / name, {"m": found})
        assert tiny.differences(expected, found.state_dict()) == []
