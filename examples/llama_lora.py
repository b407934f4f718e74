"""Fine-tune a Hugging Face model with LoRA in bf16, resume on another number of GPUs, and export it.

    python examples/llama_lora.py base llama                        # a tiny Llama of random weights, to try this out
    python examples/llama_lora.py train llama --steps 4 --devices 2
    python examples/llama_lora.py train llama --steps 8 --devices 4   # continues at step 4
    python examples/llama_lora.py export llama                      # adapters for PEFT, and the merged model

In place of ``llama``, give the directory of a model, or its name on the hub. Without GPUs it trains on CPUs.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shardckpt import FSDP, ShardCkptIO, ShardedStrategy, metadata
from lightning_shardckpt.consolidate import consolidate


class Chat(LightningModule):
    """A causal language model with LoRA on every linear layer.

    Args:
        model: the directory of the base model.
        batch_size: windows of a step, over all ranks; a multiple of every number of data-parallel ranks used.
        length: tokens of a window.
        lr: the learning rate.
    """

    def __init__(self, model: str, batch_size: int = 8, length: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.directory, self.batch_size, self.length, self.lr = model, batch_size, length, lr

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        if not hasattr(self, "model"):  # the strategy's ``pretrained`` fills the base model, each rank its slices
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.directory))
            config = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
            self.model = get_peft_model(base, config)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def train_dataloader(self) -> DataLoader[Tensor]:
        ranks = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        windows = torch.tensor(tokens(self.directory)).unfold(0, self.length, self.length)
        whole = windows[: len(windows) // self.batch_size * self.batch_size]
        return DataLoader(whole, self.batch_size // ranks, shuffle=True)


def tokens(model: str) -> list[int]:
    """Return Python's language reference in tokens of the model, or in bytes for a model without a tokenizer."""
    text = "\n".join(topics[name] for name in sorted(topics))
    if not Path(model, "tokenizer_config.json").exists():
        return list(text.encode())
    from transformers import AutoTokenizer

    found: list[int] = AutoTokenizer.from_pretrained(model)(text).input_ids
    return found


def base(output: str) -> None:
    """Write a tiny Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(torch.bfloat16).save_pretrained(output)


def train(model: str, output: Path, steps: int, devices: int) -> None:
    """Train up to a step, from the newest checkpoint if there is one; save the adapters and their optimizer state."""
    warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")
    seed_everything(1, verbose=False)  # of the order of the data, and of the adapters' first values
    trainer = Trainer(
        accelerator="auto",
        devices=devices,
        precision="bf16-true",
        strategy=ShardedStrategy(pretrained=model, fsdp=FSDP(activation_checkpointing=True)),
        plugins=[ShardCkptIO(adapters_only=True)],
        callbacks=[ModelCheckpoint(output / "checkpoints", "{step}", every_n_train_steps=4, save_top_k=-1)],
        max_steps=steps,
        logger=False,
        log_every_n_steps=1,
    )
    trainer.fit(Chat(model), ckpt_path="last")


def export(model: str, output: Path) -> None:
    """Write the adapters of the newest checkpoint as PEFT reads them, and the base model with them merged into it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    newest = max((output / "checkpoints").glob("*.ckpt"), key=lambda path: metadata(path).step or 0)
    consolidate(newest, output / "adapter", format="peft")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(whole, str(output / "adapter")).merge_and_unload()
    merged.save_pretrained(output / "merged")
    if Path(model, "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(model).save_pretrained(output / "merged")
    print(f"{newest}: wrote {output / 'adapter'} and {output / 'merged'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("base", "train", "export"))
    parser.add_argument("model", help="a directory, or a name on the hub")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/llama_lora"))
    args = parser.parse_args()
    if args.action == "base":
        base(args.model)
        return
    model = args.model
    if not os.path.isdir(model):
        from huggingface_hub import snapshot_download

        model = snapshot_download(model)
    if args.action == "train":
        train(model, args.output, args.steps, args.devices)
    else:
        export(model, args.output)


if __name__ == "__main__":
    main()
