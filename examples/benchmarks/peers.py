"""The ways that torch and safetensors bring along. They get a flat dict of the live tensors that is ready for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from limits import BUFFERED, COPY, DIRECT, READ, READ_ANEW
from safetensors import safe_open
from safetensors.torch import save_file
from state import State
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from turns import Way


def _flat(state: State) -> dict[str, Any]:
    """Made before the clock starts: see ``prepare``."""
    return state.kept["flat"]


def prepare(state: State) -> None:
    """Before each turn of any way: the live tensors may be others than last time."""
    state.kept["flat"] = state.flat()


def forget(state: State) -> None:
    """Hold on to no tensor, so that its memory can be freed."""
    state.kept.pop("flat", None)


def _dcp_save(state: State, path: str, **options: Any) -> None:
    dcp.save(_flat(state), storage_writer=FileSystemWriter(path, **options))


def _dcp_load(state: State, path: str) -> None:
    dcp.load(_flat(state), checkpoint_id=path)


def _dcp_load_anew(state: State, path: str) -> None:
    """As a run that resumes must: make the optimizer's state, with the function that is there for it, and fill it."""
    get_optimizer_state_dict(state.model, state.optimizer)
    dcp.load(state.flat(), checkpoint_id=path)


def _dcp_begin(state: State, path: str, *, reuse: bool = False, **options: Any) -> Callable[[], Any]:
    if reuse:
        if "stager" not in state.kept:
            state.kept["stager"] = DefaultStager(StagingOptions(False, False, False, False))
        options["async_stager"] = state.kept["stager"]
    return dcp.async_save(_flat(state), checkpoint_id=path, **options).result  # type: ignore[union-attr]


def _sharded(state: State) -> dict[str, Any]:
    """Without the step counters, of which HuggingFaceStorageWriter can't bring back all."""
    return {name: tensor for name, tensor in _flat(state).items() if tensor.ndim}


def _hf_save(state: State, path: str) -> None:
    dcp.save(_sharded(state), storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def _hf_load(state: State, path: str) -> None:
    dcp.load(_sharded(state), storage_reader=HuggingFaceStorageReader(path))


def _st_file(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return f"{path}/{dist.get_rank()}.safetensors"


def _st_save(state: State, path: str) -> None:
    save_file({name: tensor.to_local() for name, tensor in _sharded(state).items()}, _st_file(path))


def _st_load(state: State, path: str) -> None:
    with safe_open(_st_file(path), "pt") as file:
        for name, tensor in _sharded(state).items():
            tensor.to_local().copy_(file.get_tensor(name))


SAFETENSORS = "safetensors save_file per rank"
SAVES = [
    Way("DCP", _dcp_save, _dcp_load, DIRECT, "DCP"),
    Way("DCP, no fsync", lambda s, p: _dcp_save(s, p, sync_files=False), _dcp_load, BUFFERED, "DCP, no fsync"),
    Way(SAFETENSORS, _st_save, _st_load, BUFFERED, "DCP, no fsync"),
]
LOADS = [
    Way("DCP", _dcp_save, _dcp_load, READ, "DCP"),
    Way("DCP, HuggingFaceStorageReader", _hf_save, _hf_load, READ, "DCP"),
]
RESUMES = [Way("DCP, new moments", _dcp_save, _dcp_load_anew, READ_ANEW, "DCP, new moments", fresh=True)]
COPIES = [
    Way("DCP, thread", _dcp_save, _dcp_load, COPY, "DCP, thread", begin=_dcp_begin),
    Way(
        "DCP, reused stager", _dcp_save, _dcp_load, COPY, "DCP, thread", begin=lambda s, p: _dcp_begin(s, p, reuse=True)
    ),
]
MANY = [
    Way("DCP", _dcp_save, _dcp_load, SAFETENSORS, "DCP"),
    Way(SAFETENSORS, _st_save, _st_load, SAFETENSORS, "DCP"),
]
