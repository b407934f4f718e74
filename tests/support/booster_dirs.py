"""Directories as ColossalAI's Booster writes them: what its writers do, retold.

After ``colossalai/checkpoint_io``: ``utils.py`` (names, blocks by size), ``general_checkpoint_io.py`` and
``hybrid_parallel_checkpoint_io.py`` (index, param groups, pipeline stages), and ``utils/safetensors.py`` (asynchronous
saves).
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
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


def write_optimizer(
    folder: Path,
    state: State,
    *,
    limit: float = 1024,
    prefix: str | None = None,
    stages: Sequence[Sequence[Any]] = (),
    use_async: bool = False,
    mark: str = "-",
) -> None:
    """``save_optimizer(shard=True)``; ``stages``: the parameters of each, if there is a pipeline."""
    folder.mkdir(parents=True, exist_ok=True)
    base = "optimizer.safetensors" if use_async else "pytorch_optim.bin"
    weight_map: dict[Any, str] = {}
    total = 0.0
    for stage, params in enumerate(stages or [list(state["state"])]):
        name = with_prefix(base, prefix)
        if stages:
            for suffix in (".bin", ".safetensors"):
                name = name.replace(suffix, f"-stage-{stage + 1:05d}-shard{suffix}")
        entries = {param: state["state"][param] for param in params if param in state["state"]}
        for i, (block, size) in enumerate(blocks(entries, limit)):
            weight_map |= dict.fromkeys(block, numbered(name, i + 1))
            total += size
            if use_async:
                write_flat({"state": block}, folder / numbered(name, i + 1), mark)
            else:
                torch.save(block, folder / numbered(name, i + 1))
    groups = with_prefix("pytorch_optim_group.bin", prefix)
    torch.save(state["param_groups"], folder / groups)
    metadata = {"param_groups": groups, "total_size": total}
    write_index(folder / with_prefix(f"{base}.index.json", prefix), metadata, weight_map)


def write_flat(state: State, path: Path, mark: str = "-") -> None:
    """An asynchronous save: flattened, with pickles of what is no tensor."""
    flat: dict[str, Tensor] = {}
    pickled = []
    for param, entries in state["state"].items():
        for name, value in entries.items():
            key = f"state{mark}{param}{mark}{name}"
            pickled += [] if isinstance(value, Tensor) else [key]
            flat[key] = value if isinstance(value, Tensor) else as_bytes(value)
    if "param_groups" in state:
        flat["param_groups"] = as_bytes(state["param_groups"])
        pickled.append("param_groups")
    said = {"non_tensor_keys": json.dumps(pickled)} if pickled else {}
    safetensors.torch.save_file(flat, path, metadata={"format": "pt", **said})


def as_bytes(value: Any) -> Tensor:
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump(value)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
