"""Tensors on the meta device are filled as transformers does, which is the oracle, loaded, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.first_values.initializers import Initialization
from lightning_shardckpt.parallel.first_values.one_rank import Build as FirstValues

Build = Callable[[], nn.Module]


def filled(
    build: Build, loaded: Collection[str] = (), restores: Callable[[], bool] = lambda: False, seed: int = 7
) -> dict[str, Tensor]:
    """The values of a module that was built on the meta device, by name."""
    values = FirstValues()
    with values.building(Ranks.alone()), torch.device("meta"):
        module = build()
    values.compare(module, Ranks.alone())
    torch.manual_seed(seed)
    planned, found = Initialization(module, values, loaded), dict[str, Tensor]()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    planned.run(lambda target, full: found.update({names[id(target)]: full}), torch.device("cpu"), restores)
    return found | {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def assert_alike(found: dict[str, Tensor], *expected: dict[str, Tensor]) -> None:
    """Compare with the oracle under two seeds: what is random must have their spread, all else must be equal."""
    one, other = expected
    assert found.keys() == one.keys()
    random = {name for name in one if not torch.equal(one[name], other[name])}
    assert [name for name in found.keys() - random if not torch.equal(found[name], one[name])] == []
    assert [name for name in random if torch.equal(found[name], one[name])] == []
    spread = {name: (found[name].std() / one[name].std()).item() for name in random if one[name].numel() >= 128}
    assert [name for name, ratio in spread.items() if not 0.7 < ratio < 1.4] == []


class Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.bias_scale = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (
            lambda: nn.ParameterList([torch.ones(1), torch.ones(2)]),
            r"2 of the tensors .* no first values:\n  0  parameter of ParameterList, which no method fills\n  1",
        ),
        (Attribute, r"1 of .*\n  bias_scale  attribute of Attribute, which no method fills"),
    ],
)
def test_tensors_that_are_not_loaded_are_refused_by_name(build: Build, error: str) -> None:
    with pytest.raises(UnsupportedCodeError, match=error):
        filled(build)


def test_a_copy_of_a_module_is_refused_since_its_values_are_those_of_the_original() -> None:
    with pytest.raises(UnsupportedCodeError, match=r"2 of .*\n  1\.weight  parameter of Linear, which is a copy, or"):
        filled(lambda: nn.Sequential(layer := nn.Linear(2, 2), copy.deepcopy(layer)))


SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**DECODER, "tie_word_embeddings": True}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", DECODER),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "SwinModel": ("SwinConfig", SWIN),
    "MambaForCausalLM": ("MambaConfig", {**SIZES, "state_size": 4, "time_step_rank": 2}),
}


def config_of(kind: str) -> Any:
    import transformers  # costs seconds, in the tests that need it only

    name, sizes = KINDS[kind]
    return getattr(transformers, kind), getattr(transformers, name)(**sizes)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_are_filled_as_from_pretrained_fills_what_files_lack(kind: str) -> None:
    model, config = config_of(kind)
    found = filled(lambda: model(config))
    expected = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        expected.append(model.from_pretrained(None, config=config, state_dict={}))
    assert_alike(found, *map(tensors, expected))
    loaded = frozenset(expected[0].state_dict())
    others = {name: value for name, value in tensors(expected[0]).items() if name not in loaded}
    assert_alike(filled(lambda: model(config), loaded), others, others)


def test_adapters_of_peft_on_the_meta_device_are_refused() -> None:
    import peft

    model, config = config_of("LlamaForCausalLM")
    error = r"(?s)8 of .*q_proj\.lora_A\.default\.weight  parameter of Linear, which was changed 2 times"
    with pytest.raises(UnsupportedCodeError, match=error):
        filled(lambda: peft.get_peft_model(model(config), peft.LoraConfig(target_modules=["q_proj", "v_proj"])))
