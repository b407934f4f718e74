"""What no door can read is named: the program that wrote it, and what to do. Single files of a checkpoint, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import lightning_shardckpt
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny

DEEPSPEED = r"holds files of DeepSpeed without .*give the path of the folder with \*_model_states\.pt"
TITAN = "holds folders of steps, as TorchTitan makes; give the path of one of them"
NO_INDEX = r"holds files of weights without the index"

FOLDERS: dict[str, tuple[list[str], str]] = {
    "DeepSpeed": (["zero_to_fp32.py", "latest", "global_step10/mp_rank_00_model_states.pt"], DEEPSPEED),
    "Megatron-LM": (["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"], "Megatron-LM"),
    "TorchTitan": (["step-10/__0_0.distcp", "step-20/__0_0.distcp"], TITAN),
    "an unfinished step of TorchTitan": (
        ["__0_0.distcp"],
        r"an unfinished save of .*it has no \.metadata.*load an ear",
    ),
    "shards without an index": (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], NO_INDEX),
    "one file": (["weights.safetensors", "README.md"], r"holds files of weights .*give the path of one file"),
    "anything else": (["README.md"], f"is not a complete checkpoint: it has no {ROOT_NAME}"),
}

Door = Callable[[str], Any]
FUNCTIONS: dict[str, Door] = {
    "load": lambda path: lightning_shardckpt.load(path, {"model": torch.nn.Linear(4, 2)}),
    "metadata": lightning_shardckpt.metadata,
    "open": lightning_shardckpt.open,
    "verify": verify,
    "inspect": inspect,
    "load_from_checkpoint": lambda path: lightning_shardckpt.load_from_checkpoint(tiny.TinyLM, path),
}
LOCAL_ONLY: dict[str, Door] = {
    "consolidate": consolidate,
    "pretrained": lambda path: tiny.trainer({"pretrained": path}, max_steps=1).fit(tiny.TinyLM(), tiny.loader()),
    "fit": lambda path: tiny.trainer({}, max_steps=1).fit(tiny.TinyLM(), tiny.loader(), ckpt_path=path),
}


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Trainers run in the process of the tests here, and leave the default process group to its end."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_another_program_wrote_is_named_with_what_to_do(kind: str, tmp_path: Path) -> None:
    names, expected = FOLDERS[kind]
    fs, path, url = fsspec.filesystem("memory"), tmp_path / "run", f"memory:/{tmp_path}/run"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
        fs.pipe_file(f"{url}/{name}", b"")
    doors = {**FUNCTIONS, **(LOCAL_ONLY if kind in ("DeepSpeed", "shards without an index") else {})}
    for door in doors.values():
        with pytest.raises(CheckpointNotFoundError, match=rf"{re.escape(str(path))}' .*{expected}"):
            door(str(path))
    for name, door in FUNCTIONS.items():
        if name != "load_from_checkpoint":
            with pytest.raises(CheckpointNotFoundError, match=rf"{re.escape(url)}' is not a complete checkpoint"):
                door(url)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_door_can_read_is_suggested(tmp_path: Path) -> None:
    for step in (10, 20):
        dcp.save({"weight": torch.ones(2, 4)}, checkpoint_id=tmp_path / f"run/checkpoint/step-{step}", no_dist=True)
    for folder in ("run", "run/checkpoint"):
        for door in (FUNCTIONS["load"], FUNCTIONS["metadata"], FUNCTIONS["open"], *LOCAL_ONLY.values()):
            with pytest.raises(CheckpointNotFoundError, match=r"did you mean '.*step-10' or '.*step-20'\?"):
                door(str(tmp_path / folder))
    assert lightning_shardckpt.metadata(tmp_path / "run/checkpoint/step-10").tensors["weight"].shape == (2, 4)
    with pytest.raises(
        CheckpointNotFoundError, match=r"of torch.distributed.checkpoint, not of .*consolidate` read it"
    ):
        verify(tmp_path / "run/checkpoint/step-10")


def test_a_file_of_a_checkpoint_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """A shard file is one of safetensors, but its tensors are slices: half a tensor must not pass for all of it."""
    path = tmp_path / "a.ckpt"
    lightning_shardckpt.save(path, {"model": torch.nn.Linear(4, 2), "step": 1})
    expected = r"a\.ckpt/.*(part of a sharded checkpoint|is a file).*did you mean '.*a\.ckpt'\?"
    for file in sorted(path.iterdir()):
        for name, door in {**FUNCTIONS, "consolidate": LOCAL_ONLY["consolidate"]}.items():
            if name != "load_from_checkpoint":
                with pytest.raises(CheckpointNotFoundError, match=expected):
                    door(str(file))
    save_file({"weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    assert lightning_shardckpt.metadata(tmp_path / "model.safetensors").tensors.keys() == {"weight"}
