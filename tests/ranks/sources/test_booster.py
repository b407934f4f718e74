"""Weights that ColossalAI's Booster wrote are read. Oracles: the live objects, and torch's own loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_shardckpt import load
from lightning_shardckpt import open as open_checkpoint
from tests.support import other_programs
from tests.support.whole_state import differing

SMALL = 100 / 1024 / 1024  # MB: several files


class Net(nn.Module):
    """Rows cut over ranks, columns cut over ranks, a whole one, buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.rand(3))
        self.register_buffer("count", torch.full((), seed))


@pytest.mark.parametrize(("safe", "prefix"), [(False, None), (True, "a.b")])
def test_weights_are_read_with_any_prefix_of_file_names(tmp_path: Path, safe: bool, prefix: str | None) -> None:
    saved, live = Net(1), Net(2)
    other_programs.write_booster(tmp_path / "a", saved.state_dict(), limit=SMALL, prefix=prefix, safe=safe)
    assert len(list((tmp_path / "a").iterdir())) > 3
    load(tmp_path / "a", {"model": live})
    assert not differing(dict(live.state_dict()), dict(saved.state_dict()))
    with open_checkpoint(tmp_path / "a") as checkpoint:
        assert torch.equal(checkpoint["embed.weight"][2:4], saved.embed.weight[2:4])
