"""The call orders in how-it-works.md. Oracle: the calls that Python makes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support import tiny
from tests.support.pages import DOCS
from tests.support.pool import ROOT, run_ranks


def functions_entered(call: Callable[[], Any]) -> list[str]:
    """Return the files and names of the package's functions, in the order in which they are entered first."""
    entered = dict[str, None]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT / "lightning_shardckpt"):
            entered[f"{file.relative_to(ROOT / 'lightning_shardckpt')} {frame.f_code.co_qualname}"] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(entered)


def save_and_resume(path: str) -> tuple[list[str], list[str]]:
    trainer = tiny.trainer({}, max_steps=1)
    trainer.fit(tiny.TinyLM(), tiny.loader(shuffle=False))
    saving = functions_entered(lambda: trainer.save_checkpoint(path))
    resumed = tiny.trainer({}, max_steps=2)
    resuming = functions_entered(lambda: resumed.fit(tiny.TinyLM(), tiny.loader(shuffle=False), ckpt_path=path))
    return saving, resuming


def test_the_documented_call_orders_are_those_of_the_code(tmp_path: Path) -> None:
    page = (DOCS / "how-it-works.md").read_text()
    block = re.search(r"The same as calls, .*?```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    drawn = [re.findall(r"^ *([\w.]+)  +(.*)$", text, re.MULTILINE) for text in block[1].split("\n\n")]
    rank_0, _ = run_ranks(2, save_and_resume, str(tmp_path / "a.ckpt"))
    for calls, entered in zip(drawn, rank_0, strict=True):
        assert len(calls) > 8
        names = [line.partition(" ")[2] for line in entered]
        places = [names.index(name) for name, _ in calls]
        assert places == sorted(places), calls
        for name, about in calls:
            file = re.match(r"[\w/]+\.py", about)
            assert file is None or f"{file[0]} {name}" in entered
