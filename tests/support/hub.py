"""Tiny models of transformers, and a module that trains one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}


def model_of(kind: str) -> Any:
    """A model with random weights, without dropout; what follows a colon in ``kind`` means nothing."""
    import transformers  # costs seconds, in the ranks that need it only

    none = {"attention_dropout": 0.0, "tie_word_embeddings": False}
    gpt = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    bert = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    experts = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 11}
    few = {"moe_intermediate_size": 8, "num_experts": 3, "head_dim": 4}
    configs: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**LLAMA, **none),
        "llama-tied": lambda: transformers.LlamaConfig(**LLAMA, **{**none, "tie_word_embeddings": True}),
        "qwen3": lambda: transformers.Qwen3Config(**LLAMA, **none, head_dim=4),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **gpt),
        "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**LLAMA, **none, **experts, num_experts_per_tok=2),
        "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**LLAMA, **none, **few, num_experts_per_tok=2),
        "mixtral": lambda: transformers.MixtralConfig(**LLAMA, **none, num_local_experts=3, num_experts_per_tok=2),
        "vit": lambda: transformers.ViTConfig(image_size=8, patch_size=4, **VISION),
        "bert": lambda: transformers.BertConfig(**SIZES, **bert, intermediate_size=24, max_position_embeddings=32),
    }
    kind = kind.partition(":")[0]
    others = {"bert": transformers.AutoModelForMaskedLM, "vit": transformers.AutoModelForImageClassification}
    auto = others.get(kind, transformers.AutoModelForCausalLM)
    return auto.from_config(configs[kind]())


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The model's own loss of tokens that are their own labels."""
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


class Causal(pl.LightningModule):  # trains a model of a kind, which it builds late
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = model_of(self.kind)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        return loss_of(self.model, tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module, **more: Any) -> None:
        super().__init__()
        self.model = model
        for name, value in more.items():
            setattr(self, name, value)


def llama(**more: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**LLAMA, **more}))
