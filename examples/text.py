"""A small byte-level transformer and its data: an ordinary LightningModule and LightningDataModule.

Nothing here knows how many processes there are or what each of them holds; the YAML files in configs/ say that.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention. A tensor-parallel rank has some of the heads, so their number is never written down."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + down


class ByteTransformer(pl.LightningModule):
    """Predicts the next byte.

    Args:
        width: of the residual stream.
        head_width: of one attention head; ``width / head_width`` must divide over the tensor-parallel ranks.
        depth: number of blocks.
        context: the most bytes that it sees.
        lr: the highest learning rate.
        total_steps: of the learning-rate schedule. It doesn't depend on where a run stops, so that a run in several
            legs has the same schedule as a run in one.
    """

    def __init__(
        self,
        width: int = 64,
        head_width: int = 16,
        depth: int = 2,
        context: int = 64,
        lr: float = 5e-3,
        total_steps: int = 240,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.head_width, self.depth, self.context = width, head_width, depth, context
        self.lr, self.total_steps = lr, total_steps

    def configure_model(self) -> None:
        """Layers that are built here are whole on rank 0 only, while it builds them; the others get their slices."""
        if hasattr(self, "head"):  # Lightning calls this again for each of fit, validate, test and predict
            return
        self.embed = nn.Embedding(BYTES, self.width)
        self.position = nn.Embedding(self.context, self.width)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(self.width, self.head_width) for _ in range(self.depth))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (windows,) = batch
        loss = nn.functional.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.99), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=self.total_steps, pct_start=0.1, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def generate(model: ByteTransformer, prompt: bytes, nbytes: int, *, temperature: float = 0.7, seed: int = 0) -> str:
    """Return ``prompt`` and ``nbytes`` more bytes, drawn from the model."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(nbytes):
        logits = model(tokens[:, -model.context :])[:, -1]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


class PythonDocs(pl.LightningDataModule):
    """The language reference that comes with every Python (what ``help("assert")`` shows), cut into windows of bytes.

    A global batch has the same windows on every topology: Lightning's DistributedSampler deals rows r, r + n, … of
    one shuffled order to data-parallel rank r of n, and each of the n takes its share of the global batch.

    Args:
        global_batch_size: windows per step, over all ranks; a multiple of every number of data-parallel ranks used.
        context: bytes per window.
    """

    def __init__(self, global_batch_size: int = 24, context: int = 64) -> None:
        super().__init__()
        self.global_batch_size, self.context = global_batch_size, context

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        assert self.trainer is not None
        ranks = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        if self.global_batch_size % ranks:
            raise ValueError(f"global_batch_size {self.global_batch_size} doesn't divide over {ranks} ranks")
        windows = self.windows()
        whole = len(windows) // self.global_batch_size * self.global_batch_size
        return DataLoader(TensorDataset(windows[:whole]), self.global_batch_size // ranks, shuffle=True)

    def windows(self) -> Tensor:
        """Return all windows, one more byte long than the context, in the order of the text."""
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        return tokens.unfold(0, self.context + 1, self.context)
