"""The measurements as one picture: a panel for each section, all in multiples of the limit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")

OURS, DCP, OTHER, INK, FAINT = "#0072B2", "#8C8C8C", "#CFCFCF", "#222222", "#777777"  # Okabe and Ito's blue, and greys
_BAR, _HEAD, _GAP, _TITLE = 0.2, 0.26, 0.34, 0.42  # inches
_WIDTH, _TOP, _BOTTOM = 12.6, 0.8, 0.45
_LEFT, _COLUMN, _AXES, _NAMES = 0.187, 0.505, 0.196, 0.175  # of the width


@dataclass(frozen=True)
class Group:
    """Rows of a case: the bars that stand together in a panel, under a label if there are several groups."""

    label: str
    case: str
    fact: str = "seconds"
    limit: str = ""


@dataclass(frozen=True)
class Panel:
    """Some of a section's rows; of all ways, or of those named."""

    section: str
    title: str
    groups: tuple[Group, ...]
    unit: str = "s"
    ways: tuple[str, ...] = ()


_SIDES = (
    (
        Panel(
            "save",
            "Save, 2 ranks",
            (
                Group("durable", "2 ranks", limit="limit: O_DIRECT + fsync"),
                Group("without fsync", "2 ranks", limit="limit: write, no fsync"),
            ),
        ),
        Panel(
            "reshard",
            "Load onto another topology",
            (
                Group("4 ranks → 2", "4 → 2, "),
                Group("2 → 4", "2 → 4, "),
                Group("4 → 1", "4 → 1, "),
                Group("rows → columns", "2 → 2, rows"),
                Group("columns → rows", "2 → 2, columns"),
            ),
            ways=("ours", "DCP"),
        ),
        Panel(
            "small",
            "Many small tensors, 2 ranks: µs each",
            (Group("save", "", "save_us"), Group("load", "", "load_us")),
            "µs",
        ),
    ),
    (
        Panel("async", "Asynchronous save, 2 ranks: seconds blocked", (Group("", "2 ranks", "blocked"),)),
        Panel(
            "load",
            "Load, 2 ranks",
            (
                Group("from the page cache", "2 → 2, warm"),
                Group("from the disk", "2 → 2, cold"),
                Group("right after the save", "2 → 2, just saved"),
            ),
        ),
        Panel(
            "consolidate",
            "Consolidate the shards of 4 ranks",
            (Group("rows", "4 ranks, rows"), Group("columns", "4 ranks, columns")),
            ways=(
                "ours",
                "DCP, dcp_to_torch_save",
                "torch, consolidate_safetensors_files",
                "torch, …_files_on_every_rank, 2 ranks",
            ),
        ),
        Panel(
            "remote",
            "S3's protocol, 2 ranks, moto's server beside them",
            (Group("save", "2 ranks", "save_s"), Group("load", "2 ranks", "load_s")),
        ),
    ),
)


@dataclass(frozen=True)
class Bar:
    """A way in multiples of the limit, round by round, with the median of what was measured."""

    way: str
    ratios: Sequence[float]
    value: str


def draw(results: Mapping[str, Any], path: Path) -> str:
    """Write the picture; returns its path, or why there is none."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return "no picture: it needs matplotlib, pip install -e '.[bench]'"
    sides = [[(panel, _groups(results, panel)) for panel in side] for side in _SIDES]
    sides = [[(panel, groups) for panel, groups in side if groups] for side in sides]
    heights = [sum(_height(groups) for _, groups in side) for side in sides]
    heights[0] += _TITLE + 1.5 if "planning" in results else 0
    tall = _TOP + max(*heights, 1.0) + _BOTTOM
    figure = pyplot.figure(figsize=(_WIDTH, tall))
    for number, side in enumerate(sides):
        at, left = tall - _TOP, _LEFT + _COLUMN * number
        for panel, groups in side:
            height = _height(groups)
            box = (left, (at - height + _GAP) / tall, _AXES, (height - _TITLE - _GAP) / tall)
            _bars(figure.add_axes(box), panel, groups)
            at -= height
        if number == 0 and "planning" in results:
            axes = figure.add_axes((left, (at - _TITLE - 1.3) / tall, _AXES, 1.3 / tall))
            _planning(axes, results["planning"]["rows"])
    _heading(figure, results, tall)
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)
    return str(path)


def _groups(results: Mapping[str, Any], panel: Panel) -> list[tuple[str, list[Bar]]]:
    rows = results.get(panel.section, {"rows": []})["rows"]
    found = []
    for group in panel.groups:
        some = [row for row in rows if row["case"].startswith(group.case) and group.fact in row["median"]]
        some = [row for row in some if row["case"] == some[0]["case"]]
        by_way = {row["way"]: row for row in some}
        bars = [
            _bar(row, by_way[row["limit"]], group.fact, panel.unit)
            for row in some
            if row["way"] != row["limit"] and row["limit"] in by_way and row["way"] in (panel.ways or by_way)
            if group.limit in ("", row["limit"])
        ]
        if bars:
            found.append((group.label, bars))
    return found


def _bar(row: Mapping[str, Any], limit: Mapping[str, Any], fact: str, unit: str) -> Bar:
    pairs = zip(row["rounds"], limit["rounds"], strict=False)
    value = row["median"][fact]
    shown = f"{value:.0f}" if value >= 10 else f"{value:.2f}"
    name = row["way"].removeprefix("limit: ").removesuffix(" per rank").replace("…_files_on", "on")
    return Bar(name, [a[fact] / b[fact] for a, b in pairs], f"{shown} {unit}")


def _height(groups: Sequence[tuple[str, Sequence[Bar]]]) -> float:
    inside = sum(_BAR * len(bars) + (_HEAD if name else 0) for name, bars in groups)
    return _TITLE + inside + _GAP


def _lines(groups: Sequence[tuple[str, Sequence[Bar]]]) -> Iterator[tuple[float, str | Bar]]:
    """What stands where, in inches below the top of the axes."""
    at = 0.0
    for name, bars in groups:
        if name:
            yield at + _HEAD * 0.62, name
            at += _HEAD
        for bar in bars:
            yield at + _BAR / 2, bar
            at += _BAR


def _bars(axes: Any, panel: Panel, groups: Sequence[tuple[str, Sequence[Bar]]]) -> None:
    inside = _height(groups) - _TITLE - _GAP
    widest = max(median(bar.ratios) for _, bars in groups for bar in bars)
    axes.set(xlim=(0, max(widest, 1) * 1.03), ylim=(inside, 0))
    left = axes.get_yaxis_transform()
    for at, what in _lines(groups):
        if isinstance(what, str):
            axes.text(
                -0.02, at, what, transform=left, ha="right", va="center", fontsize=8.5, style="italic", color=FAINT
            )
            continue
        ours, ratio = what.way.startswith("ours"), median(what.ratios)
        color = OURS if ours else DCP if what.way.startswith("DCP") else OTHER
        axes.barh(at, ratio, height=_BAR * 0.72, color=color, linewidth=0)
        low, high = min(what.ratios), min(max(what.ratios), max(widest, 1) * 1.03)
        axes.plot([low, high], [at, at], color=INK, linewidth=0.8, solid_capstyle="butt")
        weight = "bold" if ours else "normal"
        style = {"va": "center", "fontsize": 8.5, "fontweight": weight, "color": OURS if ours else INK}
        axes.text(-0.02, at, what.way, transform=left, ha="right", **style)
        axes.text(1.24, at, f"{ratio:.2f} ×", transform=left, ha="right", **style)
        axes.text(1.5, at, what.value, transform=left, ha="right", **{**style, "fontweight": "normal", "color": FAINT})
    axes.axvline(1, color=INK, linewidth=1.1)
    axes.text(1, -0.02, "limit", ha="center", va="bottom", fontsize=7.5, color=INK)
    _title(axes, panel.title)
    axes.axis("off")


def _title(axes: Any, title: str) -> None:
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    names = -_NAMES * _WIDTH * 72
    axes.annotate(title, (0, 1), xytext=(names, 15), **place, fontsize=11, fontweight="bold", color=INK)


def _bare(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(OTHER)
    axes.tick_params(colors=FAINT, labelsize=7.5, length=2)


def _planning(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Seconds over ranks; of the layouts, the slowest."""
    worlds = sorted({int(row["case"].split()[0].replace(",", "")) for row in rows})
    for fact, name, style in (("save_s", "save", "-"), ("load_s", "load", "--")):
        most = [max(r["median"][fact] for r in rows if r["case"] == f"{world:,} ranks") for world in worlds]
        axes.plot(worlds, most, style, color=OURS, marker="o", markersize=4)
        axes.annotate(
            f"{name}\n{most[-1] * 1000:.0f} ms",
            (worlds[-1], most[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=OURS,
        )
    axes.set_xscale("log")
    axes.set_xticks(worlds, [f"{world:,} ranks" for world in worlds])
    axes.minorticks_off()
    axes.set_ylim(0)
    _title(axes, "One rank plans for 1,000 parameters and AdamW")
    axes.set_yticks([])
    _bare(axes)


def _sizes(results: Mapping[str, Any]) -> str:
    sizes = sorted({section["about"]["gb"] for section in results.values()})
    return " to ".join(f"{size:g}" for size in dict.fromkeys((sizes[0], sizes[-1])))


def _heading(figure: Any, results: Mapping[str, Any], tall: float) -> None:
    about = next(iter(results.values()))["about"]
    figure.text(
        0.012, 1 - 0.3 / tall, "How close to what the machine can do", fontsize=16, fontweight="bold", color=INK
    )
    what = f"FSDP2 model and AdamW, {_sizes(results)} GB in all, {about['cores']} cores, torch {about['torch']}; "
    what += "medians of rounds in which all ways take turns; thin lines from the best round to the worst"
    figure.text(0.012, 1 - 0.56 / tall, what, fontsize=9, color=FAINT)
    notes = (
        "Multiples of the limit: plain system calls with the same bytes (save: of the same durability; small tensors: "
    )
    notes += "safetensors save_file; consolidate: cp -r; S3: requests of s3fs)."
    figure.text(0.012, 0.2 / tall, notes, fontsize=8, color=FAINT)
