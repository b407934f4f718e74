"""Make ``deepspeed-0.19.zip``: directories that DeepSpeed itself writes, and what should be found in them.

Run once, beside the package, where ``deepspeed==0.19.8`` and torch 2.13 are installed (``DS_BUILD_OPS=0 pip install
deepspeed``, on CPUs): ``python make_deepspeed.py``. Like the other files here it is never made again; it fails where
one is. Two ranks; two param groups, a tie, a buffer, frozen parameters, and sizes that ranks cannot share evenly.
Expected weights and optimizer state are those of DeepSpeed's own ``ds_to_universal``. Lightning's strategy is told that
CPUs are GPUs, and trains a second epoch from its own directory, whose end is what others should reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import safetensors.torch
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TARGET = Path(__file__).parent / "deepspeed-0.19.zip"
PLAIN = {"zero0": (0, "fp32"), "zero1": (1, "fp32"), "zero2": (2, "bf16"), "zero3": (3, "fp32")}
PLAIN |= {"half": (1, "fp16"), "several": (3, "bf16")}  # the last with several vectors for a param group
TAG = "step3"


class Net(nn.Module):
    """As in ``tests/ranks/sources/test_deepspeed.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.frozen = nn.Embedding(33, 8), nn.Linear(8, 33), nn.Linear(8, 5)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 33, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        return self.head(x).mean() + self.up(x).square().mean() + self.frozen(x).square().mean()


class Lit(pl.LightningModule):
    """As in ``tests/ranks/sources/test_deepspeed.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33, 5))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(32, 7, generator=random), torch.randint(5, (32,), generator=random))
        return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def make(rank: int, folder: str, stage: int, precision: str, vectors: dict[str, int]) -> None:
    import deepspeed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29600"}
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    net = Net()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **vectors},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if precision == "fp16" else {}),
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    random = torch.Generator().manual_seed(rank)
    for _ in range(3):
        engine.backward(engine(torch.randint(33, (4, 5), generator=random)))
        engine.step()
    state = {"epoch": 1, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(folder, tag=TAG, client_state=state)


def train(path: str, epochs: str, resumed: str | None = None) -> None:
    """Train with Lightning's strategy, and save."""
    import deepspeed
    import lightning.pytorch.strategies.deepspeed as theirs
    from lightning.pytorch.accelerators import CPUAccelerator

    initialize = deepspeed.initialize
    theirs.CUDAAccelerator, theirs._validate_device_index_selection = CPUAccelerator, lambda devices: None

    def on_cpu(args: Any, **kwargs: Any) -> Any:
        args.device_rank = -1
        return initialize(args=args, **kwargs)

    deepspeed.initialize = on_cpu
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 4,
    }
    pl.seed_everything(3)
    strategy = theirs.DeepSpeedStrategy(stage=2, process_group_backend="gloo", config=config)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": int(epochs)}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
    trainer.fit(Lit(), ckpt_path=resumed)
    trainer.save_checkpoint(path)


def expected(folder: Path, source: Path, tag: str) -> dict[str, Tensor]:
    """Return weights and optimizer state as DeepSpeed's converter finds them."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source / tag), "--output_folder", str(folder)]
    subprocess.run(command, check=True)
    found = {}
    for path in sorted((folder / "zero").rglob("*/*.pt")):
        value = torch.load(path, weights_only=False)
        found[f"{path.parent.name}/{path.stem}"] = value["param"] if isinstance(value, dict) else value
    return {key: tensor.clone().contiguous() for key, tensor in found.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(TARGET, "x", zipfile.ZIP_DEFLATED) as archive:
        made = Path(temporary, "made")
        for name, (stage, precision) in PLAIN.items():
            vectors = {"sub_group_size": 50} if name == "several" else {}
            mp.spawn(make, (str(made / name), stage, precision, vectors), 2)
            if stage:
                universal = made / f"universal-{name}" if name not in ("zero2", "half") else Path(temporary, name)
                safetensors.torch.save_file(expected(universal, made / name, TAG), made / f"{name}.safetensors")
        script = [sys.executable, __file__]
        subprocess.run([*script, str(made / "lightning.ckpt"), "1"], check=True)
        second = Path(temporary, "second.ckpt")
        subprocess.run([*script, str(second), "2", str(made / "lightning.ckpt")], check=True)
        found = expected(Path(temporary, "universal"), second, "checkpoint")
        safetensors.torch.save_file(found, made / "lightning.safetensors")
        for path in sorted(path for path in made.rglob("*") if path.is_file()):
            if path.suffix == ".py" or (path.parent == made and not path.suffix):
                continue  # scripts of DeepSpeed, and a mark of its converter
            archive.write(path, path.relative_to(made))


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    train(*sys.argv[1:]) if sys.argv[1:] else main()
