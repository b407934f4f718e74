"""A small Llama with adapters of PEFT in a LightningModule, and runs that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt import ShardCkptIO
from tests.support import hub, tiny
from tests.support.nets import lora
from tests.support.pool import run_ranks

LLAMA = {**hub.LLAMA, "vocab_size": 37}
LORA: dict[str, Any] = {"modules_to_save": ["lm_head"], "lora_dropout": 0.1}


def llama(folder: str | None = None) -> Any:
    """New weights, or those of a folder."""
    if folder is None:
        return hub.llama(**LLAMA)
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).train()


def save_base(folder: str) -> None:
    """A base model that every run of a test starts from, in bfloat16; PEFT gives it adapters of float32."""
    pl.seed_everything(7, verbose=False)
    llama().bfloat16().save_pretrained(folder)


class Adapted(pl.LightningModule):
    """``base``: the folder of the base model's weights, else new ones. ``options``: of LoRA; None for no adapters."""

    def __init__(self, base: str | None = None, options: dict[str, Any] | None = LORA) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model = llama(self.hparams["base"])
        options = self.hparams["options"]
        if options is not None:
            self.model = lora(self.model, **options)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(
    strategy: dict[str, Any], steps: int, *, base: str | None, options: Any = LORA, io: Any = None, **more: Any
) -> dict[str, Any]:
    """Train up to ``steps`` as `tiny.train`; returns weights and optimizer state, whole, of this rank's stage."""
    pl.seed_everything(more.pop("seed", 1), verbose=False)
    plugin = ShardCkptIO(**({"adapters_only": True} if io is None else io))
    module = Adapted(base, options)
    module.strict_loading = more.pop("strict", True)
    run = tiny.train(module, strategy, steps, plugins=[plugin], **more)
    return tiny.full_state(module, run.optimizers)


def logits(model: nn.Module) -> Tensor:
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return found


def oracle(base: str, state: dict[str, Any], options: dict[str, Any] = LORA) -> nn.Module:
    """The same model built in this process by PEFT alone, with the weights of ``fit``."""
    model = lora(llama(base), **options)
    prefix = "model/model."
    weights = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    model.load_state_dict(weights, strict=True)
    return model


def from_pretrained(base: str, folder: Path | str) -> tuple[nn.Module, Any]:
    """What PEFT makes of a folder, and which keys it missed or did not expect."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(llama(base), folder)
    return model, model.load_adapter(folder, "default")


FSDP: dict[str, Any] = {}
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a base model, in Hugging Face's format."""
    folder = str(tmp_path_factory.mktemp("base") / "llama")
    run_ranks(1, save_base, folder)
    return folder


def whole(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The states of all stages as one."""
    return {key: value for rank in ranks for key, value in rank.items()}


def fit_once(strategy: Any, options: dict[str, Any]) -> dict[str, Any]:
    return fit(strategy, 1, **options)


def fit_each(runs: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [fit_once(*one) for one in runs]
