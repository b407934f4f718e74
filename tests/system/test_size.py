"""How many files a save and a resume go through: what a reader has to open to follow one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

import lightning_shardckpt
from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.system.tuning import TUNING
from tests.support import tiny
from tests.support.pool import run_ranks

MOST_FILES = {"save": 67, "resume": 104}
"""Lower these when a path gets shorter."""
PACKAGE = Path(lightning_shardckpt.__file__).parent


@contextmanager
def note_files(files: set[str]) -> Iterator[None]:
    """Inside, add the file of each function of the package that rank 0 calls, in any thread."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    if dist.get_rank():
        yield
        return
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class StopsNoting(Callback):
    """Stops at the first step."""

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        sys.setprofile(None)


def save_and_resume() -> dict[str, list[str]]:
    files = {"save": set[str](), "resume": set[str]()}
    trainer = tiny.trainer({}, TUNING, plugins=[ShardCkptIO()], max_steps=1)
    trainer.fit(tiny.TinyLM(), tiny.loader())
    with note_files(files["save"]):
        trainer.save_checkpoint("a.ckpt")
    trainer = tiny.trainer({}, TUNING, plugins=[ShardCkptIO()], max_steps=2, callbacks=[StopsNoting()])
    with note_files(files["resume"]):
        trainer.fit(tiny.TinyLM(), tiny.loader(), ckpt_path="a.ckpt")
    return {
        name: sorted(str(Path(file).relative_to(PACKAGE)) for file in of if Path(file).is_relative_to(PACKAGE))
        for name, of in files.items()
    }


@pytest.mark.slow
def test_a_save_and_a_resume_up_to_the_first_step_go_through_few_files() -> None:
    files, _ = run_ranks(2, save_and_resume)
    assert {name: len(of) for name, of in files.items() if len(of) > MOST_FILES[name]} == {}, files
