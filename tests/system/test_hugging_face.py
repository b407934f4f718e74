"""Hugging Face models, forwards unpatched, under FSDP2 and tensor parallel: save, reshard, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.support import tiny
from tests.support.pool import run_ranks

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}
TP = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto"}


class Causal(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        import transformers  # costs seconds, in the ranks that need it only

        if hasattr(self, "model"):
            return
        configs: dict[str, Any] = {
            "llama": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False),
            "llama-tied": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
            "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=4, tie_word_embeddings=False),
            "gpt2": lambda: transformers.GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=2, n_positions=32),
        }
        self.model = transformers.AutoModelForCausalLM.from_config(configs[self.kind]())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(kind: str, strategy: Any, save: str | None, resume: str | None) -> dict[str, Any]:
    pl.seed_everything(1 if resume is None else 2)
    run = tiny.trainer(strategy, max_steps=2, limit_val_batches=0)
    run.fit(module := Causal(kind), tiny.loader(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return tiny.full_state(module, run.optimizers)


@pytest.mark.parametrize(
    ("kind", "world", "strategy", "to_world", "to"),
    [
        pytest.param("llama-tied", 2, TP, 3, {}, marks=pytest.mark.slow),
        ("qwen3", 2, {}, 4, TP),
    ],
)
def test_reshard(kind: str, world: int, strategy: Any, to_world: int, to: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(world, train, kind, strategy, path, None)[0]
    for found in run_ranks(to_world, train, kind, to, None, path):
        assert tiny.differences(expected, found) == []
