"""Section consolidate: the shards of 4 ranks become files with whole tensors.

Each way runs in a fresh process that has imported torch already; a whole command, with its imports, is a row of its
own; ours imports no torch. All write model and optimizer. Only ours, and one cp, are durable: they end with an fsync.
"""

from __future__ import annotations

import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ours
import peers
import torch
from safetensors import safe_open
from state import llama, wrong_in
from torch import Tensor
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from turns import Facts, Row, case, clear, on_ranks, timed

from lightning_shardckpt.consolidate import consolidate as ours_consolidate

LIMIT, SYNCED, PEER = "limit: cp -r, no fsync", "limit: cp -r, fsync", "DCP, dcp_to_torch_save"
_CUT = ("rows", "columns")
_Names = list[str]


@dataclass(frozen=True)
class Tool:
    """Makes ``out`` from the shards in a folder; ``whole`` reads it back."""

    name: str
    make: Callable[[Path, Path, _Names], Any]
    whole: Callable[[Path], dict[str, Tensor]] | None


def consolidate(options: Namespace, folder: str) -> list[Row]:
    """Of shards that are rows of the tensors, and that are columns."""
    return [row for dim in (0, 1) for row in case("consolidate", _case(dim), _consolidate, dim, options, folder)]


def _consolidate(dim: int, options: Namespace, folder: str) -> list[Row]:
    names, tools = on_ranks(4, _save, dim, options, folder), list(_tools())
    found = {tool.name: _row(_case(dim), tool.name) for tool in tools}
    for number in range(options.rounds + 1):
        for tool in tools:
            row = found[tool.name]
            if "error" not in row:
                try:
                    facts = on_ranks(1, _turn, tool, folder, names, number == 0)
                    row["rounds"] += [facts] * (number > 0)
                except Exception as error:
                    row["error"] = str(error).strip().splitlines()[-1]
    on_ranks(1, clear, folder)
    return list(found.values())


def _case(dim: int) -> str:
    return f"4 ranks, {_CUT[dim]}"


def _row(about: str, name: str) -> Row:
    return {"section": "consolidate", "case": about, "way": name, "limit": LIMIT, "peer": PEER, "rounds": []}


def _save(dim: int, options: Namespace, folder: str) -> _Names:
    """Checkpoints of all formats; returns the names of the tensors."""
    state = llama(options.gb, dim)
    peers.prepare(state)
    ours.way().save(state, f"{folder}/ours")
    for way, name in zip(peers.LOADS, ("DCP", "HF"), strict=True):
        way.save(state, f"{folder}/{name}")
    return list(state.tensors())


def _turn(tool: Tool, folder: str, names: _Names, check: bool) -> Facts:
    source, out = Path(folder), Path(folder, "out")
    try:
        found = timed(lambda: tool.make(source, out, names))
        if check and tool.whole is not None:
            wrong = wrong_in(tool.whole(out), len(names))
            if wrong:
                raise ValueError(wrong)
        return {key: found[key] for key in ("seconds", "extra_mb")}
    finally:
        clear(str(out))


def _tools() -> Iterator[Tool]:
    copy = 'cp -r "$0" "$1"'
    for name, script in ((LIMIT, copy), (SYNCED, f'{copy} && find "$1" -type f -exec sync {{}} +')):
        yield Tool(name, partial(_run, script), None)
    yield Tool("ours", lambda source, out, _: ours_consolidate(source / "ours", out), _of_ours)
    safetensors: dict[str, Any] = {"format": "safetensors", "optimizer": True}
    yield Tool("ours, safetensors", _Ours(**safetensors), _of_our_safetensors)
    yield Tool(PEER, lambda source, out, _: dcp_to_torch_save(str(source / "DCP"), out), _of_torch)
    yield Tool("torch, consolidate_safetensors_files", _hugging_face, _of_safetensors)


def _run(script: str, source: Path, out: Path, names: _Names) -> None:
    subprocess.run(["sh", "-c", script, source / "ours", out], check=True)


class _Ours:
    """Our function with some options."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, source: Path, out: Path, names: _Names) -> None:
        ours_consolidate(source / "ours", out, **self.options)


def _hugging_face(source: Path, out: Path, names: _Names) -> None:
    out.mkdir()
    consolidate_safetensors_files(str(source / "HF"), str(out), dict.fromkeys(names, 1))


def _of_ours(out: Path) -> dict[str, Tensor]:
    found = torch.load(out, mmap=True)
    moments = zip(found["model"], found["optimizer"]["state"].values(), strict=True)
    flat = {f"optimizer.{of}.{key}": value for of, state in moments for key, value in state.items()}
    model = {f"model.{name}": tensor for name, tensor in found["model"].items()}
    return model | {name: tensor for name, tensor in flat.items() if tensor.ndim}


def _of_our_safetensors(out: Path) -> dict[str, Tensor]:
    found = {}
    for name, tensor in _of_safetensors(out).items():
        number, *rest = name.split("/")  # of a model's tensor, its name; of an optimizer's 0, its name and its state's
        found[".".join(["optimizer", *rest]) if rest else f"model.{number}"] = tensor
    return found


def _of_torch(out: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in torch.load(out, mmap=True).items() if tensor.ndim}


def _of_safetensors(out: Path) -> dict[str, Tensor]:
    found = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    return found
