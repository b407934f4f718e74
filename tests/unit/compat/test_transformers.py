"""What models of transformers keep to themselves means what from_pretrained and save_pretrained do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from lightning_shardckpt.compat import transformers as compat
from tests.support.nets import qwen3

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8, "intermediate_size": 8}


@pytest.fixture(scope="module")
def mixture() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=2)
    return transformers.MixtralForCausalLM(config)


def test_conversions_put_tensors_of_files_together(mixture: Any) -> None:
    _, steps = compat.conversions_of(mixture)
    assert any(step.operations and step.source_patterns for step in steps)
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    found = [step.rename_source_key(name) for step in steps]
    assert any(pattern in step.source_patterns for step, (_, pattern) in zip(steps, found, strict=True) if pattern)


def test_reverting_them_gives_what_is_saved(mixture: Any, tmp_path: Path) -> None:
    mixture.save_pretrained(tmp_path)
    stored, revert = load_file(tmp_path / "model.safetensors"), compat.revert_function()
    assert revert is not None
    found = revert(mixture, mixture.state_dict())
    assert found.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())


class Plain(transformers.PreTrainedModel):
    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kept, self.derived = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("position_ids", torch.arange(3), persistent=False)
        self.post_init()


class Leaving(Plain):
    _keys_to_ignore_on_save = ("derived.weight", "derived.bias")
    _keys_to_ignore_on_load_unexpected = (r"old\.",)


def loaded(kind: Any, folder: Path) -> tuple[set[str], set[str]]:
    """Return what from_pretrained misses, and what it finds unexpected."""
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    return set(info["missing_keys"]), set(info["unexpected_keys"])


def test_ignored_names_are_those_that_are_not_saved_or_minded(tmp_path: Path) -> None:
    plain, model = Plain(transformers.PretrainedConfig()), Leaving(transformers.PretrainedConfig())
    for one in (plain, nn.Linear(2, 2)):
        assert compat.names_not_saved(one) == frozenset()
    model.save_pretrained(tmp_path / "a")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    left_out = model.state_dict().keys() - stored.keys()
    assert compat.names_not_saved(model) == left_out == {"derived.weight", "derived.bias"}
    from safetensors.torch import save_file

    more = {**stored, "old.weight": torch.zeros(1), "position_ids": torch.arange(3)}
    save_file(more, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    assert compat.patterns_that_may_be_unexpected(model) == {r"old\.", r"(^|\.)position_ids$"}
    assert loaded(Leaving, tmp_path / "a")[1] == set()
    assert compat.patterns_that_may_be_unexpected(plain) == {r"(^|\.)position_ids$"}
    assert loaded(Plain, tmp_path / "a")[1] == {"old.weight"}


def test_tied_patterns_are_of_names_that_are_saved_once(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)
    model: Any = transformers.LlamaForCausalLM(config)
    assert compat.own_tied_patterns(model) == ("lm_head.weight",) and compat.own_tied_patterns(nn.Linear(1, 1)) == ()
    model.save_pretrained(tmp_path)
    missing = model.state_dict().keys() - load_file(tmp_path / "model.safetensors").keys()
    assert missing == {"lm_head.weight"}


def test_a_model_initializes_a_module_as_its_constructor_does(mixture: Any) -> None:
    assert compat.is_model(mixture) and not compat.is_model(nn.Linear(1, 1))
    head, norm, embedding = mixture.lm_head, mixture.model.norm, mixture.model.embed_tokens
    with torch.no_grad():
        for module in (head, norm, embedding):
            module.weight.fill_(torch.inf)
    compat.initialize(mixture, head)
    compat.initialize(mixture, norm)
    assert head.weight.isfinite().all() and head.weight.unique().numel() > 1
    assert head.weight.std() < 3 * mixture.config.initializer_range
    assert norm.weight.eq(1).all() and embedding.weight.isinf().all()
    assert not compat.was_initialized(nn.Linear(1, 1)) and compat.was_initialized(head)
    assert compat.weights_method(mixture) == mixture._init_weights and compat.weights_method(nn.Linear(1, 1)) is None


# ── the tensor-parallel plans of models of transformers, as `compat.transformers` finds them ──────────────────────────


class Around(nn.Module):
    """Passes on what it does not have, as a PeftModel does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["model"] = model

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["model"], name)


def test_a_model_has_the_plan_of_its_layers_and_what_wraps_it_has_none() -> None:
    model = qwen3()
    plan = compat.own_tensor_parallel_plan(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise" and plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert "lm_head" in plan and hasattr(Around(model), "_tp_plan")
    assert compat.own_tensor_parallel_plan(Around(model)) == compat.own_tensor_parallel_plan(nn.Linear(2, 2)) == {}
