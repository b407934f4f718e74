"""Stored tensors under the names of a model.

Oracles: torch's stack, cat and chunk, and names written out by hand.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

import lightning_shardckpt as ckpt
from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.hugging_face import open_path
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.model_names import fit_names
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.reading import ReadTarget, read_targets
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.strategy.pretrained import Pretrained, PretrainedWeights, compare_weights
from tests.support import tiny


class Model(nn.Module):
    """What the fitting looks for in transformers' models; each name has a tensor of one element."""

    base_model_prefix = "transformer"
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, *names: str) -> None:
        super().__init__()
        add(self, *names)


def add(root: nn.Module, *names: str) -> None:
    for name in names:
        *above, last = name.split(".")
        module = root
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
) -> PretrainedWeights:
    """With a file whose tensors are zero, or ``apart`` have different values."""
    values = {name: torch.tensor([float(apart * at)]) for at, name in enumerate(stored)}
    safetensors.torch.save_file(values, tmp_path / "w.safetensors")
    return compare_weights(open_path(str(tmp_path / "w.safetensors")), module, Pretrained("", KeyMapping.of(mapping)))


def filled(weights: PretrainedWeights) -> dict[str, str]:
    """The names in the file by name in the model."""
    assert weights.source is not None
    table, aliases = weights.source.table["model"], weights.source.aliases["model"]
    return {name: table[aliases.get(name, name)].key for name in weights.names}


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    assert filled(compared(tmp_path, module, stored)) == found


def test_adapters_leave_the_names_of_what_they_wrap(tmp_path: Path) -> None:
    inner = Model("transformer.q.base_layer.w", "transformer.q.lora_A.default.w", "transformer.norm.w")
    add(inner, "head.original_module.w", "head.modules_to_save.default.w")
    module = root_of(m=root_of(base_model=root_of(model=inner)))
    found = compared(tmp_path, module, ["transformer.q.w", "transformer.norm.w", "head.w"])
    at = "m.base_model.model"
    assert filled(found) == {
        f"{at}.transformer.q.base_layer.w": "transformer.q.w",
        f"{at}.transformer.norm.w": "transformer.norm.w",
        f"{at}.head.original_module.w": "head.w",
        f"{at}.head.modules_to_save.default.w": "head.w",
    }
    assert found.report == ""


def test_ties_are_filled_by_any_of_their_names(tmp_path: Path) -> None:
    model = Model("transformer.embed.w", "head.w")
    model.get_submodule("head").register_parameter("w", model.get_submodule("transformer.embed").w)
    found = compared(tmp_path, root_of(m=model), ["head.w", "old"])
    assert found.names == {"m.transformer.embed.w", "m.head.w"}
    assert found.report.endswith("not in the model: 1 tensor\n  old")


def test_ties_that_are_stored_apart_are_told(tmp_path: Path) -> None:
    model = Model("transformer.embed.w", "head.w")
    model.get_submodule("head").register_parameter("w", model.get_submodule("transformer.embed").w)
    stored = ["head.w", "transformer.embed.w"]
    assert compared(tmp_path, root_of(m=model), stored).report == ""
    told = compared(tmp_path, root_of(m=model), stored, apart=True).report
    assert "with several values, of which the first is used: 1 tie\n  m.transformer.embed.w, m.head.w" in told


def test_two_models_that_fit_alike_are_told_apart_by_a_mapping(tmp_path: Path) -> None:
    module = root_of(student=Model("w", "v"), teacher=Model("w", "v"))
    with pytest.raises(MismatchError, match=r"fit 'student' and 'teacher' of Module alike; .*=.*student\."):
        compared(tmp_path, module, ["w", "v"])
    found = compared(tmp_path, module, ["w", "v"], {"^": "teacher."})
    assert filled(found) == {"teacher.w": "w", "teacher.v": "v"}
    assert found.report.endswith("with first values: 2 tensors\n  student.v\n  student.w")


def test_parameters_that_a_save_of_adapters_left_out_are_told(tmp_path: Path) -> None:
    module = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))  # type: ignore[arg-type]
    io = ShardCkptIO(adapters_only=True)
    io.attach(Ranks.alone(), module, {})
    io.save_checkpoint({"state_dict": module.state_dict()}, tmp_path / "a")
    with closing(open_source(str(tmp_path / "a"), StorageRouter())[0]) as source:
        found = compare_weights(source, module, Pretrained(""))
    layer = "base_model.model.0"
    assert found.names == {f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"}
    assert found.report.endswith(
        f"with first values: 2 tensors\n  {layer}.base_layer.bias\n  {layer}.base_layer.weight"
    )


def test_weights_of_another_model_are_an_error_with_names_of_both(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"no tensor .* Stored are, for example, \['x'\]; the model has \['m.w'\]"):
        compared(tmp_path, root_of(m=Model("w")), ["x"])


# ── tensors that are put together ─────────────────────────────────────────────────────────────────────────────────


class FusedConfig(transformers.PretrainedConfig):
    model_type = "fused-of-tests"


class Fused(transformers.PreTrainedModel):
    """A model whose files have other tensors than it, in every way that is supported, and in one that is not."""

    config_class = FusedConfig

    def __init__(self, config: Any, *, turned: bool = False) -> None:
        super().__init__(config)
        self.experts = nn.ParameterDict({"gate_up": torch.zeros(11, 10, 3), "down": torch.zeros(3, 11, 5)})
        self.attn = nn.ModuleDict({name: nn.Linear(3, 5) for name in ("q", "k")})
        if turned:
            self.turned = nn.Linear(2, 3, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


CONVERSIONS = [
    WeightConverter(["experts.*.gate", "experts.*.up"], "experts.gate_up", [MergeModulelist(0), Concatenate(1)]),
    WeightConverter(["experts.*.down"], "experts.down", [MergeModulelist(1)]),
    WeightConverter("attn.qk.weight", ["attn.q.weight", "attn.k.weight"], [Chunk(dim=0)]),
    WeightConverter("attn.qk.bias", ["attn.q.bias", "attn.k.bias"], [Chunk(dim=0)]),
    WeightConverter("turned.weight", "turned.weight", [Transpose(0, 1)]),
]
register_checkpoint_conversion_mapping("fused-of-tests", CONVERSIONS, overwrite=True)


def test_tensors_are_joined_and_split_as_transformers_does(tmp_path: Path) -> None:
    shapes = {"gate": (5, 3), "up": (5, 3), "down": (3, 5)}
    tensors = {f"experts.{e}.{n}": torch.randn(shape) for e in range(11) for n, shape in shapes.items()}
    tensors |= {"attn.qk.weight": torch.randn(10, 3), "attn.qk.bias": torch.randn(10)}
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


# ── dtypes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
@pytest.mark.parametrize("live", [torch.bfloat16, torch.float32])
def test_floating_tensors_are_converted_as_torch_does(stored: torch.dtype, live: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(3000, 1500).to(stored)  # more than a window
    safetensors.torch.save_file({"w": value}, tmp_path / "w.safetensors")
    source = open_path(str(tmp_path / "w.safetensors"))
    tensor = torch.zeros(3000, 1500, dtype=live)
    target = ReadTarget("model", "net.w", tensor)
    read_targets(fit_names(source, root_of(net=Model("w")), ["net.w"]).source, [target])
    assert torch.equal(tensor, value.to(live))
