"""What the tools that look inside do with checkpoints that somebody made up: an answer or one clear error, soon."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.cli import main
from tests.support import small
from tests.support.pool import run_ranks

DEEP: Any = 1
for _ in range(60):
    DEEP = {"a": DEEP}
OPTIMIZER = "optimizer-state-dist-00000.json"
EDITS: dict[str, tuple[str, Any]] = {
    "no size": (small.ROOT, {"topology": {"shard": 0}}),
    "a huge mesh": (small.ROOT, {"topology": {"pipeline": 1 << 40, "shard": 1}}),
    "an axis of markup": (small.ROOT, {"topology": {"<script>": 1}}),
    "software": (small.ROOT, {"software": {"</script>": "\n\u2028"}}),
    "hyper-parameters that are a list": (small.DOCUMENT, {"hyper_parameters": [1, {"$": "map", "v": 5}]}),
    "pairs that are none": (small.DOCUMENT, {"hyper_parameters": {"$": "map", "v": [[1], 5, [[2], 3], ["a", "b"]]}}),
    "an unknown tag": (small.DOCUMENT, {"hyper_parameters": {"x": {"$": 5}, "y": {"$": ["a"], "v": 1}}}),
    "deep": (small.DOCUMENT, {"hyper_parameters": DEEP}),
    "an optimizer that is none": (OPTIMIZER, {"0": 5}),
    "groups that are none": (OPTIMIZER, {"0": {"groups": [], "values": {}, "numbered": False}}),
    "a group that is none": (OPTIMIZER, {"0": {"groups": {"0": [], "1": {"hyper": 3}}}}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    run_ranks(2, small.save, str(path))
    return path


def tools(path: Path, whole: Path, output: Path) -> list[list[str]]:
    return [
        ["inspect", str(path)],
        ["inspect", str(path), "--tensors", "*", "--json"],
        ["map", str(path), "-o", str(output)],
        ["diff", str(path), str(whole)],
        ["diff", str(whole), str(path)],
    ]


@pytest.mark.parametrize("what", EDITS)
def test_odd_values_are_shown_or_refused(
    what: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "odd.ckpt"))
    name, values = EDITS[what]
    small.edit(path, name, lambda content: content.update(values))
    for tool in tools(path, whole, tmp_path / "map.html"):
        status = main(tool)
        out, error = capsys.readouterr()
        assert status in (0, 1, 2) and bool(error) == (status == (2 if tool[0] == "diff" else 1) and not out), tool
        assert "Traceback" not in error and error.count("\n") < 3


@pytest.mark.parametrize("length", [1 << 20, 4_000_000])
def test_long_names_take_no_time_and_no_stack(
    length: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "odd.ckpt"))

    def rename(content: Any) -> None:
        model = content["components"]["model"]["tensors"]
        model["a." * (length // 2)] = model["w"]

    small.edit(path, small.ROOT, rename)
    assert main(["inspect", str(path), "--tensors", "a.a"]) == 0
    assert main(["map", str(path), "-o", str(tmp_path / "map.html")]) == 0
    capsys.readouterr()
