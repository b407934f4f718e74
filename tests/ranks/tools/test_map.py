"""The page says what the checkpoint says: its data are compared with the indexes, its arithmetic with ``layout.py``.

Its script runs under node, and the whole page in Chromium, where these are installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lightning_shardckpt.cli import main
from lightning_shardckpt.format.file_names import FileInfo, rank_index_name
from lightning_shardckpt.format.index import ROOT_NAME, Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Axis, DimShard, Layout, parts_of_rank
from lightning_shardckpt.format.root_index_json import root_to_json
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.tools.explain import explain
from lightning_shardckpt.tools.map import write_map
from lightning_shardckpt.tools.module_tree import Leaf, Node, outline
from lightning_shardckpt.tools.ownership import boxes_of
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support import worlds, zoo
from tests.support.pool import run_ranks

NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")
HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "${x}`\\", "a\u2028\"'&lt;", "<!--data-->"]
HOSTILE += ["__proto__", "constructor.x", "a" * 5000, ".".join("a" * 300)]


class Page(HTMLParser):
    """The scripts of a page by id, its other elements, and all that it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: dict[str | None, str] = {}
        self.tags: list[str] = []
        self.references: list[str | None] = []
        self.title = ""
        self._within: str | None = None
        self._id: str | None = None
        self.feed(path.read_text(encoding="utf-8"))
        self.about = json.loads(self.scripts["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._within, self._id = tag, dict(attrs).get("id")
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self._within = None

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts[self._id] = self.scripts.get(self._id, "") + data
        if self._within == "title":
            self.title += data

    def layout(self, number: int) -> tuple[Layout, Any]:
        one = self.about["layouts"][number]
        axes, cuts = tuple(Axis(*axis) for axis in one["axes"]), tuple(DimShard(*cut) for cut in one["cuts"])
        order = tuple(one["order"]) if "order" in one else None
        return Layout(axes, cuts, order), tuple(map(tuple, one["holders"]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of cuts, on 4 ranks, in several files each."""
    path = tmp_path_factory.mktemp("map") / "zoo.ckpt"
    run_ranks(4, zoo.save, str(path))
    return path


@pytest.fixture(scope="module")
def page(saved: Path) -> Page:
    return Page(write_map(saved, saved.parent / "zoo.html", onto="fsdp=3"))


@pytest.fixture(scope="module")
def checkpoint(saved: Path) -> Checkpoint:
    return Checkpoint(LocalStorage(), str(saved))


# ── the data ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_holds_every_tensor_with_its_layout(page: Page, checkpoint: Checkpoint) -> None:
    for component in page.about["components"]:
        stored = checkpoint.root.components[component["name"]]
        found = {}
        for name, dtype, shape, number, _, *aliases in component["tensors"]:
            layout, holders = page.layout(number)
            pinned = stored.tensors[name].pinned  # the page does not say it
            found[name] = TensorSpec(dtype, tuple(shape), layout, holders, pinned)
            also = [alias for alias, of in stored.aliases.items() if of == name]
            assert aliases == ([also] if also else [])
        assert found == stored.tensors
    about = {key: page.about[key] for key in ("name", "step", "epoch", "world", "saveId", "problems")}
    save_id = checkpoint.root.save_id
    assert about == {"name": "zoo.ckpt", "step": 7, "epoch": 3, "world": 4, "saveId": save_id, "problems": []}


def test_sums_per_rank_are_those_of_memory_and_of_the_files(page: Page, checkpoint: Checkpoint) -> None:
    for component in page.about["components"]:
        name = component["name"]
        tensors = checkpoint.root.components[name].tensors.values()
        for rank in range(4):
            held = sum(
                part.box.numel * DTYPE_BYTES[spec.dtype]
                for spec in tensors
                for part in parts_of_rank(spec.layout, spec.shape, rank)
                if any(a <= rank < b for a, b in spec.holders)
            )
            written = 0
            if rank in checkpoint.root.components[name].indexes:
                written = sum(e.nbytes for es in checkpoint.index(name, rank).shards.values() for e in es)
            assert (component["held"][rank], component["written"][rank]) == (held, written)


def test_the_file_of_every_slice_is_known(page: Page, checkpoint: Checkpoint) -> None:
    several = 0
    for component in page.about["components"]:
        names = [row[0] for row in component["tensors"]]
        for rank, files in component["files"].items():
            index = checkpoint.index(component["name"], int(rank))
            assert files["names"] == list(index.files)
            several += "of" in files
            for key, entries in index.shards.items():
                numbers = files["of"][str(names.index(key))] if "of" in files else 0
                found = numbers if isinstance(numbers, list) else [numbers]
                assert {files["names"][i] for i in found} == {entry.file for entry in entries}
    assert several, "so that ranks with several files are among them"


def test_a_resume_costs_what_explain_says(page: Page, saved: Path) -> None:
    expected = explain(saved, "fsdp=3")
    found = page.about["onto"]
    assert [(r["needed"], r["read"], dict(r["parts"])) for r in found["ranks"]] == [
        (r["needs"], r["reads"], r["from"]) for r in expected["ranks"]
    ]
    assert (found["topology"], found["read"]) == ("shard 3", expected["totals"]["reads"])


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────


def root_only(path: Path, root: RootIndex) -> Path:
    path.mkdir()
    (path / ROOT_NAME).write_bytes(root_to_json(root))
    return path


def component(tensors: dict[str, TensorSpec], world: int, nbytes: int = 200_000) -> Component:
    """Without the files of its indexes."""
    infos = {r: FileInfo(rank_index_name("model", r), nbytes, "0" * 16) for r in range(world)}
    return Component(tensors, {}, infos)


def test_names_are_data_and_never_markup(tmp_path: Path) -> None:
    spec = TensorSpec("F32", (4,), REPLICATED, ((0, 1),))
    hostile, software = component(dict.fromkeys(HOSTILE, spec), 1), {HOSTILE[0]: HOSTILE[1]}
    root = RootIndex("0" * 32, 1, {"model": hostile}, {}, software=software)
    harmless = root_only(tmp_path / "a", RootIndex("0" * 32, 1, {"model": component({"w": spec}, 1)}, {}))
    path = root_only(tmp_path / "<b>&amp;.ckpt", root)
    found, plain = (Page(write_map(p, tmp_path / "x.html")) for p in (path, harmless))
    assert found.tags == plain.tags and found.scripts.keys() == {"data", "geometry", "page"}
    assert [row[0] for row in found.about["components"][0]["tensors"]] == HOSTILE
    assert found.about["software"] == [HOSTILE[:2]]
    assert found.title == found.about["name"] == "<b>&amp;.ckpt"
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    for name in ("geometry", "page"):
        assert found.scripts[name] == plain.scripts[name]
        assert not re.search(markup, found.scripts[name])


def test_the_page_needs_nothing_else(page: Page, saved: Path) -> None:
    assert page.references == []
    text = (saved.parent / "zoo.html").read_text()
    assert "default-src 'none'" in text and "://" not in text and "@import" not in text and "url(" not in text


def large(ranks: tuple[int, int, int], layers: int) -> RootIndex:
    """A transformer of 9 tensors per layer on replicate × shard × tensor, with the state of Adam."""
    world = prod(ranks)
    axes = tuple(Axis(n, size, prod(ranks[i + 1 :])) for i, (n, size) in enumerate(zip("rst", ranks, strict=True)))
    columns, rows = Layout(axes, (DimShard(2, 0), DimShard(1, 0))), Layout(axes, (DimShard(1, 0), DimShard(2, 1)))
    shapes = {"norm1": (4096,), "q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    shapes |= {"norm2": (4096,), "gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    layout = {1: Layout(axes[:2], (DimShard(1, 0),)), 2: columns}
    found: dict[str, dict[str, TensorSpec]] = {"model": {}, "optimizer": {}}
    for i in range(layers):
        for name, shape in shapes.items():
            spec = TensorSpec("BF16", shape, rows if name in ("o", "down") else layout[len(shape)], ((0, world),))
            found["model"][f"model.layers.{i}.{name}.weight"] = spec
            for moment in ("exp_avg", "exp_avg_sq"):
                found["optimizer"][f"0/model.layers.{i}.{name}.weight/{moment}"] = spec
    return RootIndex("0" * 32, world, {n: component(t, world) for n, t in found.items()}, {})


def test_a_thousand_tensors_on_a_thousand_ranks_are_a_small_page(tmp_path: Path) -> None:
    path = root_only(tmp_path / "large.ckpt", large((2, 64, 8), 38))
    file = write_map(path, tmp_path / "large.html")
    found = Page(file).about
    assert sum(len(c["tensors"]) for c in found["components"]) > 1000 and found["world"] == 1024
    assert file.stat().st_size < 500_000
    assert not found["indexesRead"] and found["problems"] == [], "200 MB of indexes are left alone"


def test_indexes_that_cannot_be_read_are_told_and_the_rest_is_drawn(tmp_path: Path) -> None:
    path = root_only(tmp_path / "broken.ckpt", large((1, 2, 8), 1))
    found = Page(write_map(path, tmp_path / "broken.html")).about
    assert found["indexesRead"] and len(found["problems"]) == 6 and found["problems"][-1] == "… and 27 more"
    assert "model-meta-dist-00000.index.json: the file is missing" in found["problems"][0]


def test_the_command_writes_or_replaces_a_page_but_never_inside_a_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "page.html"
    output.write_text("old")
    assert main(["map", str(saved), "-o", str(output), "--onto", "tp=2"]) == 0
    assert f"{output} shows {saved}" in capsys.readouterr().out
    assert Page(output).about["onto"]["topology"] == "tensor 2"
    refused = (saved / "page.html", "lies inside a checkpoint"), (tmp_path / "no" / "x.html", "No such file")
    for wrong, said in refused:
        assert main(["map", str(saved), "--output", str(wrong)]) == 1
        assert said in capsys.readouterr().err and not wrong.exists()
    assert main(["map", str(tmp_path), "-o", str(output)]) == 1
    assert "Traceback" not in capsys.readouterr().err


# ── its script ────────────────────────────────────────────────────────────────────────────────────────────────────

ALL_BOXES = """
const about = JSON.parse(require("fs").readFileSync(0));
const found = about.components.map(({ tensors }) => tensors.map(([name, dtype, shape, number, writer]) => {
  const layout = about.layouts[number], held = heldBoxes(layout, shape, shardsOf(layout));
  const boxes = writtenBoxes(held, writer);
  const cut = new Set(layout.cuts.map(([, dim]) => dim));
  if (writer < 0) cut.add(-1 - writer);
  const fold = foldOf(shape, cut);
  const areas = [held, boxes].map((all) => all.flatMap((box) => rectangles(box, shape, fold)));
  return { name, boxes, rows: fold.rows, columns: fold.columns, alike: fold.alike, areas };
}));
console.log(JSON.stringify(found));
"""


def run_script(page: Page, script: str, given: Any) -> Any:
    assert NODE is not None
    command = [NODE, "-e", page.scripts["geometry"] + script]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def boxes_in_python(spec: TensorSpec, replica: int | None) -> list[Any]:
    found = boxes_of(spec, replica)
    return sorted([list(one.box.start), list(one.box.stop), one.writer, list(one.holders)] for one in found)


Named = dict[str, dict[str, Any]]


def compare_boxes(page: Page, tensors: Named, chosen: Named) -> None:
    names = [component["name"] for component in page.about["components"]]
    assert sorted(names) == sorted(tensors)
    for rows, name in zip(run_script(page, ALL_BOXES, page.about), names, strict=True):
        specs = tensors[name]
        assert [row["name"] for row in rows] == list(specs)
        for row, (key, spec) in zip(rows, specs.items(), strict=True):
            found = sorted([box["start"], box["stop"], box["ranks"][0], box["holders"]] for box in row["boxes"])
            assert found == boxes_in_python(spec, chosen[name][key]), key
            assert row["rows"] * row["columns"] * row["alike"] == prod(spec.shape)
            for areas in row["areas"]:  # of each slice that is alike they cover the drawing, without overlaps
                dropped = row["alike"] if spec.shape else 1
                assert sum((b - a) * (d - c) for a, b, c, d in areas) * dropped == prod(spec.shape), key
                assert all(0 <= a < b <= row["rows"] and 0 <= c < d <= row["columns"] for a, b, c, d in areas), key


needs_node = pytest.mark.skipif(NODE is None, reason="node runs the page's script")


@needs_node
def test_the_boxes_on_the_page_are_those_of_the_checkpoint(page: Page, checkpoint: Checkpoint) -> None:
    tensors = {name: c.tensors for name, c in checkpoint.root.components.items()}
    compare_boxes(page, tensors, {name: checkpoint.replicas(name) for name in tensors})


ODD_LAYOUTS = [
    (worlds.mesh(2, 3, cuts=(DimShard(1, 0), DimShard(0, 0))), (10, 7)),
    (worlds.mesh(2, 3, cuts=(DimShard(0, 0, 3), DimShard(1, 0))), (22, 5)),
    (worlds.mesh(2, 3, cuts=(DimShard(1, 1, 4), DimShard(0, 2))), (3, 17, 5)),
    (worlds.mesh(3, 2, cuts=(DimShard(0, 0), DimShard(1, 1)), order=(5, 3, 1, 0, 2, 4)), (7, 7)),
    (worlds.mesh(6, cuts=(DimShard(0, 0),)), (4, 4)),  # two ranks have nothing
    (worlds.mesh(2, 3, cuts=(DimShard(1, 0),)), (600, 300)),  # replicas share it
    (worlds.mesh(2, 3, cuts=(DimShard(1, 1),)), (3, 64, 900)),
    (worlds.mesh(6), (64, 3000)),
    (worlds.mesh(6), ()),
    (worlds.mesh(6, cuts=(DimShard(0, 1),)), (0, 6)),
    (worlds.mesh(6, cuts=(DimShard(0, 3),)), (2, 3, 4, 12)),
]


@needs_node
def test_the_boxes_of_odd_layouts_are_right_too(tmp_path: Path) -> None:
    specs = {f"t{i}": TensorSpec("F32", shape, layout, ((0, 6),)) for i, (layout, shape) in enumerate(ODD_LAYOUTS)}
    worlds.save(LocalStorage(), {"model": specs}, 6, path=str(tmp_path / "odd.ckpt"))
    with Checkpoint(LocalStorage(), str(tmp_path / "odd.ckpt")) as checkpoint:
        chosen = checkpoint.replicas("model")
        assert None in chosen.values(), "so that shares are among them"
        found = Page(write_map(tmp_path / "odd.ckpt", tmp_path / "odd.html"))
        compare_boxes(found, {"model": specs}, {"model": chosen})


NAMES = [f"{p}layers.{i}.{n}" for p in ("", "net.") for i in range(3) for n in ("norm", "mlp.up", "mlp.down")]
NAMES += ["net.head.weight", "net.head", "a.", "0/w.0/exp_avg", "0/w.1/exp_avg", "experts.1.w", "experts.3.w"]
NAMES += ["", "a..b", "__proto__"]


def as_python(node: dict[str, Any]) -> list[Any]:
    """A node of the page as [names of the layers that it folds, all tensors in it]."""
    run = [one["label"] for one in node.get("run", [])]
    first = node["run"][0] if run else node
    return [len(run) or 1, sorted(t["name"] for t in node["tensors"]), [as_python(c) for c in first["children"]]]


@needs_node
def test_the_page_folds_the_layers_that_inspect_folds(page: Page) -> None:
    tensors = [{"name": name, "dtype": "F32", "shape": [2], "number": 0} for name in NAMES]
    script = 'console.log(JSON.stringify(treeOf(JSON.parse(require("fs").readFileSync(0)))))'
    found = [as_python(node) for node in run_script(page, script, tensors)]

    def folds(nodes: list[Any]) -> list[tuple[int, int]]:
        return sorted(x for n in nodes for x in [*([(n[0], len(n[1]))] if n[0] > 1 else []), *folds(n[2])])

    def folds_of(nodes: tuple[Node, ...]) -> list[tuple[int, int]]:
        here = [(n.count, n.tensors) for n in nodes if n.count > 1]
        return sorted(here + [x for n in nodes for x in folds_of(n.children)])

    expected = folds_of(outline([Leaf(name, "F32 2", 8) for name in NAMES]))
    assert folds(found) == expected and (3, 9) in expected
    assert sorted(name for node in found for name in node[1]) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium shows the page")
def test_a_browser_draws_the_page_without_an_error(saved: Path, tmp_path: Path) -> None:
    file = write_map(saved, tmp_path / "page.html", onto="tp=2")
    check = """<script>
addEventListener("load", () => { try {
  pin(1);
  document.querySelector("[data-by=written]").click();
  $("sort").value = "size";
  $("sort").dispatchEvent(new Event("change"));
  const canvas = document.querySelector("canvas.tensor");
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  document.title = `fine: ${document.querySelectorAll("figure").length} ${$("tip").textContent}`;
} catch (error) { document.title = `error: ${error.stack}`; } });
addEventListener("error", (event) => { document.title = `error: ${event.message}`; });
</script>"""
    file.write_text(file.read_text().replace('<script id="geometry">', check + '<script id="geometry">'))
    assert CHROMIUM is not None
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stderr[-2000:]
    count = len(zoo.whole_tensors())
    assert title[1].startswith(f"fine: {count + 5} "), title[1]
    largest = "both.large [0:301, 0:66]79,464 bytes, held by rank 0 — shard 0 · tensor 0written by rank 0"
    assert largest in title[1]
