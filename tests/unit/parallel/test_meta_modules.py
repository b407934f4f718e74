"""Modules built on the meta device are filled as they fill themselves on the CPU, which is the oracle, or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.deferred_init.meta_modules import initialize_meta

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


# ── torch's modules and those of users ──────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.embed.weight)


class Rotary(nn.Module):
    """A buffer that is not stored, and a table in an attribute, both assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inverse = 1.0 / torch.arange(1.0, 5.0)
        self.table = torch.outer(torch.arange(3.0), self.inverse)


class Pieces(nn.Module):
    """Fills one parameter in two pieces, reads one for the other, and replaces a third."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(4))
        self.new = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.rows[:2].normal_()
            self.rows[2:] = torch.tensor([1.0, 2.0, 3.0])
            self.scale.copy_(self.rows.sum(1))
        self.new = nn.Parameter(torch.tensor([1.0, 2.0]))


COMPLETE: dict[str, Build] = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.Embedding(4, 3, padding_idx=1), nn.Conv2d(2, 3, 3)),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)),
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "tied": Tied,
    "rotary": Rotary,
    "pieces": Pieces,
    "half": lambda: nn.Linear(3, 4, dtype=torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", COMPLETE)
def test_modules_on_the_meta_device_are_filled_as_on_the_cpu(name: str) -> None:
    found = filled(COMPLETE[name])
    torch.manual_seed(7)
    assert_same(found, tensors(COMPLETE[name]()))


class Scaled(nn.Embedding):
    """As of all Gemmas: ``reset_parameters`` is of nn.Embedding, which knows of no scale."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scales = [torch.tensor(3.0)]
        self.bias_scale = torch.tensor(3.0)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(4, 3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows[:3])


class Derived(Half):
    """Every byte is written, but of memory that nothing initialised."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.rows.data.copy_(self.rows.data.flip(0))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class ZeroNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(3)
        self.weight = nn.Parameter(torch.zeros(3))


class RMSNorm(nn.Module):
    """Without ``reset_parameters``: its constructor makes it of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.arange(4))


class OldGPT(NanoGPT):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)


INCOMPLETE: dict[str, tuple[Build, str]] = {
    "buffer": (Scaled, r"1 of the tensors .* no first values:\n  scale  buffer of Scaled, which no method fills\nLet"),
    "attribute": (Attribute, r"2 of .*\n  bias_scale  attribute of Attribute, .*\n  scales  list of Attribute, which"),
    "rows": (lambda: nn.Sequential(Half()), r"1 of .*\n  0\.rows  parameter of Half, which no method fills"),
    "derived": (Derived, r"1 of .*\n  rows  parameter of Derived, which no method fills"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), r"2 of .*\n.*weight\.original0  parameter"),
    "constructor": (
        NanoGPT,
        r"1 of .*\n  layer\.weight  parameter of Linear, which constructors wrote to 2 times",
    ),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", INCOMPLETE)
def test_what_no_method_fills_is_refused_by_name(name: str) -> None:
    build, error = INCOMPLETE[name]
    with pytest.raises(UnsupportedCodeError, match=error):
        filled(build)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("build", "error"),
    [
        (OldGPT, r"layer\.weight  parameter of Linear, which constructors wrote to 2 times, reset_parameters 1\n"),
        (ZeroNorm, r"weight  parameter of ZeroNorm, to which constructors gave another value than reset_parameters\n"),
    ],
)
def test_what_constructors_do_by_data_or_instead_of_reset_parameters_is_seen_in_the_context(
    build: Build, error: str
) -> None:
    deferred = DeferredInit()
    with deferred, torch.device("meta"):
        modules = nn.Sequential(build(), *(build() for build in COMPLETE.values()))
    with pytest.raises(UnsupportedCodeError, match=r"1 of .*\n  0\." + error):
        initialize_meta(modules, deferred, ())


def test_constants_that_constructors_make_in_the_context_need_no_method() -> None:
    deferred = DeferredInit()
    with deferred, torch.device("meta"):
        norm = RMSNorm()
    initialize_meta(norm, deferred, ())
    assert_same(values(norm, deferred), tensors(RMSNorm()))
    with pytest.raises(UnsupportedCodeError, match=r"2 of .*\n  weight .*\n  steps "):
        filled(RMSNorm)


def test_what_is_loaded_needs_no_method_and_the_rest_is_filled() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Scaled(), Half(), nn.Linear(2, 2))

    loaded = ["0.scale", "1.rows", "2.bias"]
    assert filled(build, loaded).keys() == {"0.weight", "2.weight"}


def test_tensors_with_values_keep_them() -> None:
    norm = nn.BatchNorm1d(3)
    with torch.no_grad():
        norm.running_mean.fill_(5.0)
        norm.bias.fill_(6.0)
    norm.weight = nn.Parameter(torch.empty(3, device="meta"))
    initialize_meta(norm, deferred := DeferredInit(), ())
    expected = {"weight": torch.ones(3), "running_mean": torch.full((3,), 5.0), "running_var": torch.ones(3)}
    assert_same(values(norm, deferred), expected | {"num_batches_tracked": torch.tensor(0)})
    assert torch.equal(norm.bias, torch.full((3,), 6.0))


def test_parts_on_the_meta_device_inside_deferred_ones_are_filled_besides() -> None:
    deferred = DeferredInit()
    with deferred:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    torch.manual_seed(7)
    initialize_meta(net, deferred, ())
    torch.manual_seed(3)
    first = nn.Linear(2, 2)
    torch.manual_seed(7)
    expected = nn.Sequential(first, nn.Linear(2, 2))
    assert_same(values(net, deferred), tensors(expected))


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
        partly, fully = nn.Sequential(Scaled(), Half()), Half()
    initialize_meta(fully, DeferredInit(), (), lambda: True)
    with pytest.raises(UnsupportedCodeError, match=r"1 of .*\n  0\.scale  buffer of Scaled"):  # not persistent
        initialize_meta(partly, DeferredInit(), (), lambda: True)
