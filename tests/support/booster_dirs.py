"""Directories of models as ColossalAI's Booster writes them.

After ``colossalai/checkpoint_io``: ``utils.py`` (names, blocks by size) and ``general_checkpoint_io.py`` (index).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

State = dict[Any, Any]


def with_prefix(name: str, prefix: str | None) -> str:
    """Booster's ``prefix`` goes before the last suffix of every file name."""
    return name if not prefix else ".".join((*name.split(".")[:-1], prefix, name.split(".")[-1]))


def numbered(name: str, number: int) -> str:
    for suffix in (".bin", ".safetensors"):
        name = name.replace(suffix, f"-{number:05d}{suffix}")
    return name


def megabytes(value: Any) -> float:
    tensors = value.values() if isinstance(value, dict) else [value]
    return sum(t.numel() * t.element_size() / 1024 / 1024 for t in tensors if isinstance(t, Tensor))


def blocks(entries: Mapping[Any, Any], limit: float) -> Iterator[tuple[State, float]]:
    """A new block begins where the next entry would exceed the limit; the last one may be empty."""
    block, size = State(), 0.0
    for key, value in entries.items():
        if size + megabytes(value) > limit and size > 0:
            yield block, size
            block, size = {}, 0.0
        block[key] = value
        size += megabytes(value)
    yield block, size


def write_file(content: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path, metadata={"format": "pt"})
    else:
        torch.save(content, path)


def write_model(folder: Path, state: State, *, limit: float = 1024, prefix: str | None = None, safe: bool) -> None:
    """``save_model(shard=True)``."""
    folder.mkdir(parents=True, exist_ok=True)
    base = "model.safetensors" if safe else "pytorch_model.bin"
    weight_map, total = {}, 0.0
    for i, (block, size) in enumerate(blocks(state, limit)):
        name = numbered(with_prefix(base, prefix), i + 1)
        weight_map |= dict.fromkeys(block, name)
        total += size
        write_file(block, folder / name)
    write_index(folder / with_prefix(f"{base}.index.json", prefix), {"total_size": total}, weight_map)


def write_index(path: Path, metadata: Mapping[str, Any], weight_map: Mapping[Any, str]) -> None:
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=4))
