"""Tensors on the meta device are filled as transformers does, which is the oracle, loaded, or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.deferred_init.first_values import initialize_meta

Build = Callable[[], nn.Module]


def filled(build: Build, loaded: Collection[str] = ()) -> dict[str, Tensor]:
    """The values of a module that was built on the meta device, by name."""
    with torch.device("meta"):
        module = build()
    torch.manual_seed(7)
    deferred = DeferredInit()
    initialize_meta(module, deferred, loaded)
    return values(module, deferred, loaded)


def values(module: nn.Module, deferred: DeferredInit, loaded: Collection[str] = ()) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    named = dict(module.named_parameters(remove_duplicate=False))
    places = {(id(module.get_submodule(fqn.rpartition(".")[0])), fqn.rpartition(".")[2]): fqn for fqn in named}
    skip = {place for place, fqn in places.items() if fqn in loaded}
    found = {names[id(named[places[id(m), n]])]: full for m, n, full in deferred.replay(module, skip=skip)}
    return found | {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# ── modules of others ───────────────────────────────────────────────────────────────────────────────────────────────


class Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scales = [torch.tensor(3.0)]
        self.bias_scale = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: nn.Linear(3, 4), r"2 of the tensors .* no first values:\n  weight  parameter of Linear\n  bias"),
        (Scaled, r"2 of .*\n  weight .*\n  scale  buffer of Scaled\nBuild them in configure_model"),
        (Attribute, r"4 of .*\n  bias_scale  attribute of Attribute\n.*\n.*\n  scales  list of Attribute"),
    ],
)
def test_tensors_that_are_not_loaded_are_refused_by_name(build: Build, error: str) -> None:
    with pytest.raises(UnsupportedCodeError, match=error):
        filled(build)


def test_what_is_loaded_needs_no_value() -> None:
    assert filled(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]) == {}  # fmt: skip


def test_deferred_modules_beside_those_on_the_meta_device_keep_their_values() -> None:
    deferred = DeferredInit()
    with deferred:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    initialize_meta(net, deferred, loaded := ["1.weight", "1.bias"])
    torch.manual_seed(3)
    assert_same(values(net, deferred, loaded), tensors(nn.Sequential(nn.Linear(2, 2))))


# ── models of transformers ──────────────────────────────────────────────────────────────────────────────────────────

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
VISION = {"image_size": 8, "patch_size": 4, "projection_dim": 8}


def config_of(kind: str) -> Any:
    import transformers  # costs seconds, in the tests that need it only

    clip = {name: size for name, size in SIZES.items() if name != "vocab_size"} | {"intermediate_size": 24} | VISION
    sides: dict[str, Any] = {"encoder": DECODER, "decoder": {**DECODER, "cross_attention_hidden_size": 16}}
    configs: dict[str, Callable[[], Any]] = {
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**DECODER, tie_word_embeddings=True),
        "GemmaForCausalLM": lambda: transformers.GemmaConfig(**DECODER),
        "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(**DECODER),
        "Gemma3ForCausalLM": lambda: transformers.Gemma3TextConfig(**DECODER),
        "T5GemmaModel": lambda: transformers.T5GemmaConfig(**sides),
        "T5ForConditionalGeneration": lambda: transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2
        ),
        "BertForSequenceClassification": lambda: transformers.BertConfig(**SIZES, intermediate_size=24),
        "CLIPVisionModel": lambda: transformers.CLIPVisionConfig(**clip),
        "SwinModel": lambda: transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2
        ),
        "MambaForCausalLM": lambda: transformers.MambaConfig(**{**SIZES, "state_size": 4, "time_step_rank": 2}),
    }
    return getattr(transformers, kind), configs[kind]()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "kind",
    [
        "LlamaForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "T5GemmaModel",
        "T5ForConditionalGeneration", "BertForSequenceClassification", "CLIPVisionModel", "SwinModel",
        "MambaForCausalLM",
    ],
)  # fmt: skip
def test_models_of_transformers_are_filled_as_from_pretrained_fills_what_files_lack(kind: str) -> None:
    model, config = config_of(kind)
    found = filled(lambda: model(config))
    torch.manual_seed(7)
    expected = model.from_pretrained(None, config=config, state_dict={})
    assert_same(found, tensors(expected))
    loaded = frozenset(expected.state_dict())
    others = {name: value for name, value in tensors(expected).items() if name not in loaded}
    assert_same(filled(lambda: model(config), loaded), others)


@pytest.mark.filterwarnings("default")
def test_a_new_head_gets_the_first_values_of_its_model() -> None:
    model, config = config_of("BertForSequenceClassification")
    base = model(config).bert.state_dict()
    loaded = [f"bert.{name}" for name in base]
    found = filled(lambda: model(config), loaded)
    torch.manual_seed(7)
    expected = tensors(model.from_pretrained(None, config=config, state_dict={f"bert.{n}": t for n, t in base.items()}))
    assert found.keys() >= {"classifier.weight", "classifier.bias"}
    assert_same(found, {name: expected[name] for name in found})


def test_adapters_of_peft_on_the_meta_device_are_refused() -> None:
    import peft

    model, config = config_of("LlamaForCausalLM")
    error = r"(?s)8 of .*q_proj\.lora_A\.default\.weight  parameter of Linear, which PEFT fills only when it makes it"
    with pytest.raises(UnsupportedCodeError, match=error):
        filled(lambda: peft.get_peft_model(model(config), peft.LoraConfig(target_modules=["q_proj", "v_proj"])))


def test_what_a_checkpoint_will_fill_may_be_left_without_a_value() -> None:
    with torch.device("meta"):
        partly, fully = nn.Sequential(Scaled(), nn.Linear(2, 2)), nn.Linear(2, 2)
    initialize_meta(fully, DeferredInit(), (), lambda: True)
    with pytest.raises(UnsupportedCodeError, match=r"1 of .*\n  0\.scale  buffer of Scaled"):  # not persistent
        initialize_meta(partly, DeferredInit(), (), lambda: True)
