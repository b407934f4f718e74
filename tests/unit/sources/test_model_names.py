"""Stored tensors under the names of a model.

Oracles: torch's stack and cat, and names written out by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

import lightning_shardckpt as ckpt
from lightning_shardckpt.checkpoint.load_job import LoadTargets, match_targets
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.hugging_face import open_path
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.state.model import WholeNames, tied_names
from lightning_shardckpt.strategy.pretrained import Pretrained
from tests.support import tiny


class Model(nn.Module):
    """What the fitting looks for in transformers' models; each name has a tensor of one element."""

    base_model_prefix = "transformer"
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            *above, last = name.split(".")
            module: nn.Module = self
            for part in above:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.zeros(1)))


def root_of(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def compared(
    tmp_path: Path, module: nn.Module, stored: list[str], mapping: Any = None, *, apart: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The names in the file by name in the model, and the differences.

    The tensors of the file are zero, or ``apart`` have different values.
    """
    values = {name: torch.tensor([float(apart * at)]) for at, name in enumerate(stored)}
    safetensors.torch.save_file(values, tmp_path / "w.safetensors")
    live = module.state_dict()
    whole = WholeNames(frozenset(live), tied_names(module))
    file = open_path(str(tmp_path / "w.safetensors"))
    source, problems = Pretrained("", mapping).fit(file, module, whole)
    match = match_targets(source, LoadTargets.of_module(module, live, whole))
    names = {id(one): name for name, one in file.table["model"].items()}
    filled = [(row.names, names[id(source.table["model"][row.stored])]) for row in match.rows if row.stored is not None]
    return {name: key for names, key in filled for name in names}, problems + match.problems


BASE = ["transformer.h.0.w", "transformer.h.1.w"]


@pytest.mark.parametrize(
    ("module", "stored", "found"),
    [
        (root_of(m=Model(*BASE, "head")), [*BASE, "head"], {f"m.{n}": n for n in [*BASE, "head"]}),
        (root_of(m=Model(*BASE)), ["h.0.w", "h.1.w"], {"m.transformer.h.0.w": "h.0.w", "m.transformer.h.1.w": "h.1.w"}),
        (root_of(m=Model("h.0.w", "h.1.w")), BASE, {"m.h.0.w": BASE[0], "m.h.1.w": BASE[1]}),
        (root_of(m=Model(*BASE)), [f"m.{n}" for n in BASE], {f"m.{n}": f"m.{n}" for n in BASE}),
        (root_of(net=root_of(a=Model("w"), b=Model("v"))), ["a.w", "b.v"], {"net.a.w": "a.w", "net.b.v": "b.v"}),
        (root_of(other=Model("z"), m=Model("w")), ["w"], {"m.w": "w"}),
    ],
    ids=["a prefix", "files of the base", "a base of files", "full names", "no model of transformers", "one of two"],
)
def test_names_fit_by_what_they_have_in_common(
    module: nn.Module, stored: list[str], found: dict[str, str], tmp_path: Path
) -> None:
    assert compared(tmp_path, module, stored)[0] == found


def test_ties_are_filled_by_any_of_their_names_and_those_that_are_stored_apart_are_told(tmp_path: Path) -> None:
    model = Model("transformer.embed.w", "head.w")
    model.get_submodule("head").register_parameter("w", model.get_submodule("transformer.embed").w)
    found, differences = compared(tmp_path, root_of(m=model), ["head.w", "old"])
    assert found.keys() == {"m.transformer.embed.w", "m.head.w"}
    assert differences == ["m.old  in checkpoint only"]
    _, (told,) = compared(tmp_path, root_of(m=model), ["head.w", "transformer.embed.w"], apart=True)
    assert told == "m.transformer.embed.w  tied to ['m.head.w'] in the model, stored apart in the checkpoint"


def test_two_models_that_fit_alike_are_told_apart_by_a_mapping(tmp_path: Path) -> None:
    module = root_of(student=Model("w", "v"), teacher=Model("w", "v"))
    with pytest.raises(MismatchError, match=r"fit 'student' and 'teacher' of Module alike; .*=.*student\."):
        compared(tmp_path, module, ["w", "v"])
    found, differences = compared(tmp_path, module, ["w", "v"], {"^": "teacher."})
    assert found == {"teacher.w": "w", "teacher.v": "v"}
    assert [line.partition(";")[0] for line in differences] == [f"student.{n}  in model only" for n in ("w", "v")]


class FusedConfig(transformers.PretrainedConfig):
    model_type = "fused-of-tests"


class Fused(transformers.PreTrainedModel):
    """A model whose files have other tensors than it, in every way that is supported, and in one that is not."""

    config_class = FusedConfig

    def __init__(self, config: Any, *, turned: bool = False) -> None:
        super().__init__(config)
        self.experts = nn.ParameterDict({"gate_up": torch.zeros(11, 10, 3), "down": torch.zeros(3, 11, 5)})
        if turned:
            self.turned = nn.Linear(2, 3, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


CONVERSIONS = [
    WeightConverter(["experts.*.gate", "experts.*.up"], "experts.gate_up", [MergeModulelist(0), Concatenate(1)]),
    WeightConverter(["experts.*.down"], "experts.down", [MergeModulelist(1)]),
    WeightConverter("turned.weight", "turned.weight", [Transpose(0, 1)]),
]
register_checkpoint_conversion_mapping("fused-of-tests", CONVERSIONS, overwrite=True)


def test_tensors_are_joined_as_transformers_does(tmp_path: Path) -> None:
    shapes = {"gate": (5, 3), "up": (5, 3), "down": (3, 5)}
    tensors = {f"experts.{e}.{n}": torch.randn(shape) for e in range(11) for n, shape in shapes.items()}
    Fused(FusedConfig()).save_pretrained(tmp_path)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    expected, live = Fused.from_pretrained(tmp_path), root_of(m=Fused(FusedConfig()))  # the oracle
    assert torch.equal(expected.experts["gate_up"][10, 5:], tensors["experts.10.up"])
    ckpt.load(tmp_path, {"model": live})
    assert tiny.differences(expected.state_dict(), live.get_submodule("m").state_dict()) == []
    safetensors.torch.save_file(tensors | {"turned.weight": torch.randn(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"turned\.weight  needs a conversion of transformers .*: Transpose of"):
        ckpt.load(tmp_path, {"model": Fused(FusedConfig(), turned=True)})
    del tensors["experts.3.up"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"m\.experts\.gate_up  .*: tensors that differ"):
        ckpt.load(tmp_path, {"model": live})


# ── one table of what a mapping from stored names to new ones does, and what is refused ───────────────────────────────


NAMES = ["a.w", "b.w", "x"]


def shout(name: str) -> str | None:
    return f"m.{name}" if "." in name else None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        pytest.param(None, {"a.w": "a.w", "b.w": "b.w", "x": "x"}, id="nothing"),
        pytest.param({"a.w": "b.w", "b.w": "a.w"}, {"b.w": "a.w", "a.w": "b.w", "x": "x"}, id="whole names, swapped"),
        pytest.param({"a": "c", "w": "v"}, {"a.w": "a.w", "b.w": "b.w", "x": "x"}, id="part of a name is no name"),
        pytest.param({r"^(.)\.": r"net.\1.", "w$": "v"}, {"net.a.v": "a.w", "net.b.v": "b.w", "x": "x"}, id="several"),
        pytest.param({"^a|^b": "c", "^b": "d", "^[a]": "e"}, None, id="two names that become one"),
        pytest.param({r"^.\.": "c.", "^b": "d", "b.w": "kept"}, {"c.w": "a.w", "kept": "b.w", "x": "x"}, id="first"),
        pytest.param({"^": "net."}, {"net.a.w": "a.w", "net.b.w": "b.w", "net.x": "x"}, id="a prefix"),
        pytest.param({"x": None, "^b": None}, {"a.w": "a.w"}, id="left out"),
        pytest.param(shout, {"m.a.w": "a.w", "m.b.w": "b.w"}, id="function"),
        pytest.param(["^a=b", "^b=a", "x=y"], {"b.w": "a.w", "a.w": "b.w", "y": "x"}, id="texts"),
        pytest.param([r"^a\.=", "^b=null", "x=nulls"], {"w": "a.w", "nulls": "x"}, id="texts that strip and leave out"),
    ],
)
def test_all_names_are_mapped_at_once(given: Any, found: dict[str, str] | None) -> None:
    mapping = KeyMapping.of_texts(given) if isinstance(given, list) else KeyMapping.of(given)
    if found is not None:
        assert mapping.apply(NAMES) == found
        return
    with pytest.raises(MismatchError, match=r"gives 1 name several times\n  c.w  of a.w, b.w"):
        mapping.apply(NAMES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"(": ""}, "'(' is not a regular expression"),
        ({"^a": r"\1"}, "'^a' is not a regular expression for '\\\\1': invalid group reference"),
        ({"a": 3}, "'a': 3, but a name must map to a name"),
        ("a=b", "is a dict from stored names (or regular"),
        (["x=y", "nothing"], "'nothing' is not OLD=NEW"),
    ],
)
def test_what_is_no_mapping_is_wrong_usage(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^key_mapping.*{re.escape(words)}"):
        KeyMapping.of_texts(given) if isinstance(given, list) else KeyMapping.of(given)


# ── files of PEFT's adapters, loaded into its models ──────────────────────────────────────────────────────────────────


KINDS: dict[str, dict[str, Any]] = {
    "one layer": {"target_modules": ["a"]},
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


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_loaded_as_peft_loads_it(kind: str, format: str, tmp_path: Path) -> None:
    make(1, kind).save_pretrained(tmp_path, safe_serialization=format == "safetensors")
    expected = make(2, kind)
    file = tmp_path / f"adapter_model.{format}"
    entries = torch.load(file) if format == "bin" else safetensors.torch.load_file(file)
    peft.set_peft_model_state_dict(expected, entries)
    for path in (tmp_path, file):
        inside = nn.Module()
        inside.model = make(2, kind)  # in a module of the user's
        for live in (make(2, kind), inside):
            with pytest.warns(UserWarning, match=r"base_layer\.weight  in model only"):
                assert ckpt.load(path, {"m": live}, strict=False) == {}
            found = live.model if live is inside else live
            assert tiny.differences(expected.state_dict(), found.state_dict()) == []
        with pytest.raises(MismatchError, match=r"a\.base_layer\.weight  in model only"):
            ckpt.load(path, {"m": make(2, kind)})
