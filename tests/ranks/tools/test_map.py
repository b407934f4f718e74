"""The page shows what the ranks had: its drawings are compared with DTensors and with the indexes of the files.

Its script runs under node, where that is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lightning_shardckpt import save
from lightning_shardckpt.cli import main
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.tools.map import write_map
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support import worlds, zoo
from tests.support.pool import run_ranks

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "${x}`\\", "a\u2028\"'&lt;", "<!--data-->"]
HOSTILE += ["__proto__", "constructor.x", "a" * 5000, ".".join("a" * 300)]


class Page(HTMLParser):
    """The scripts of a page by id, its tags, the names of their attributes, and the content to draw."""

    def __init__(self, path: Path, checkpoint: Path) -> None:
        super().__init__()
        self.scripts, self.tags, self.attributes = dict[str | None, str](), list[str](), set[str]()
        self.checkpoint, self.text, self.title, self._within = checkpoint, path.read_text("utf-8"), "", ("", None)
        self.feed(self.text)
        self.about: dict[str, Any] = json.loads(self.scripts["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= dict(attrs).keys()
        self._within: tuple[str, str | None] = tag, dict(attrs).get("id")

    def handle_endtag(self, tag: str) -> None:
        self._within = "", None

    def handle_data(self, data: str) -> None:
        if self._within[0] == "script":
            self.scripts[self._within[1]] = self.scripts.get(self._within[1], "") + data
        if self._within[0] == "title":
            self.title += data

    def tensors(self, component: str) -> dict[str, tuple[dict[str, Any], list[Any]]]:
        """Name -> kind, and the rest of the row: the number of the drawing as written, and aliases."""
        rows = next(c["tensors"] for c in self.about["components"] if c["name"] == component)
        return {name: (self.about["kinds"][kind], rest) for name, kind, *rest in rows}

    def cells(self, number: int) -> Iterator[tuple[tuple[slice, ...], set[int]]]:
        """Boxes of a drawing, each with its ranks."""
        *edges, groups = self.about["drawings"][number]
        boxes = product(*([slice(*span) for span in pairwise(along)] for along in edges))
        for box, group in zip(boxes, groups, strict=True):
            ends = iter(self.about["groups"][group] if group >= 0 else ())
            yield box, {rank for start, stop in zip(ends, ends, strict=True) for rank in range(start, stop)}

    def elements(self, number: int, shape: list[int], rank: int) -> list[int]:
        """Positions in a tensor, row-major, of the elements that a drawing gives to a rank."""
        return elements(shape, [box for box, ranks in self.cells(number) if rank in ranks])


def elements(shape: Any, boxes: list[tuple[slice, ...]]) -> list[int]:
    positions = numpy.arange(prod(shape)).reshape(shape)
    return sorted(position for box in boxes for position in positions[box].ravel().tolist())


def save_and_list(path: str) -> dict[str, list[int]]:
    """Save, and return which elements of each tensor this rank holds, as torch shards an enumeration of them."""
    zoo.save(path)
    return {name: local.ravel().tolist() for name, local in zoo.enumerations().items()}


@pytest.fixture(scope="module")
def zoo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, list[dict[str, list[int]]]]:
    """All kinds of cuts, on 4 ranks, in several files each; and what the ranks held."""
    path = tmp_path_factory.mktemp("map") / "zoo.ckpt"
    held = run_ranks(4, save_and_list, str(path))
    return Page(write_map(path, path.parent / "zoo.html"), path), held


@pytest.fixture(scope="module")
def page(zoo_run: tuple[Page, Any]) -> Page:
    return zoo_run[0]


# ── the data ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_shows_what_each_dtensor_held(zoo_run: tuple[Page, list[dict[str, list[int]]]]) -> None:
    page, every_rank = zoo_run
    tensors, whole = page.tensors("model"), zoo.whole_tensors()
    assert tensors.keys() == whole.keys()
    assert tensors["rows.float64"][1][1:] == ["tied.float64"]
    about = {key: page.about[key] for key in ("name", "step", "epoch", "world", "mesh")}
    mesh = [["shard", 2], ["tensor", 2]]
    assert about == {"name": "zoo.ckpt", "step": 7, "epoch": 3, "world": 4, "mesh": mesh}
    for rank, held in enumerate(every_rank):
        for name, (kind, _) in tensors.items():
            assert tuple(kind["shape"]) == whole[name].shape and kind["bytes"] == whole[name].itemsize
            assert page.elements(kind["held"], kind["shape"], rank) == sorted(held[name]), (name, rank)
        nbytes = sum(len(positions) * whole[name].itemsize for name, positions in held.items())
        assert page.about["components"][0]["held"][rank] == nbytes


def test_the_page_shows_what_each_rank_wrote(page: Page) -> None:
    with Checkpoint(LocalStorage(), str(page.checkpoint)) as checkpoint:
        for component in page.about["components"]:
            for rank in range(page.about["world"]):
                has_index = rank in checkpoint.root.components[component["name"]].indexes
                shards = dict(checkpoint.index(component["name"], rank).shards) if has_index else {}
                for name, (kind, (drawing, *_)) in page.tensors(component["name"]).items():
                    boxes = [worlds.at(entry.box) for entry in shards.get(name, ())]
                    assert page.elements(drawing, kind["shape"], rank) == elements(kind["shape"], boxes), (name, rank)
                nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)
                assert component["written"][rank] == nbytes


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_are_data_and_never_markup(tmp_path: Path) -> None:
    pages = []
    for folder, names in (("a", ["w"]), ("<b>&amp;.ckpt", HOSTILE)):
        save(tmp_path / folder, dict.fromkeys(names, torch.ones(300)) | {"step": 1})
        pages.append(Page(write_map(tmp_path / folder, tmp_path / "x.html"), tmp_path / folder))
    plain, found = pages
    assert found.tags == plain.tags and found.scripts.keys() == {"data", "drawings", "page"}
    assert {row[0] for row in found.about["components"][0]["tensors"]} == {*HOSTILE}
    assert found.title == found.about["name"] == "<b>&amp;.ckpt"
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    for name in ("drawings", "page"):
        assert found.scripts[name] == plain.scripts[name]
        assert not re.search(markup, found.scripts[name])


def test_the_page_needs_nothing_else(page: Page) -> None:
    assert not page.attributes & {"src", "href", "action", "srcset"} and "default-src 'none'" in page.text
    assert not re.search(r"://|@import|url\(", page.text)


def test_the_command_writes_or_replaces_a_page_but_never_inside_a_checkpoint(
    page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, output = page.checkpoint, tmp_path / "page.html"
    output.write_text("old")
    assert main(["map", str(saved), "-o", str(output)]) == 0
    assert f"{output} shows {saved}" in capsys.readouterr().out
    assert Page(output, saved).about["name"] == saved.name
    refused = (saved / "page.html", "lies inside a checkpoint"), (tmp_path / "no" / "x.html", "No such file")
    for wrong, said in refused:
        assert main(["map", str(saved), "--output", str(wrong)]) == 1
        assert said in capsys.readouterr().err and not wrong.exists()
