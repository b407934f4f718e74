"""Measurements as numbers in a JSON file and as tables for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from turns import Facts, Row

_PEERS = {"training": "× other"}
_COUNTED = 0.9  # who reads less has mapped the files, and what is read by that is not counted


@dataclass(frozen=True)
class Column:
    """A fact of every round, of which the median is shown, with how far the rounds were apart and its ratios."""

    fact: str
    title: str
    digits: int = 3
    compared: bool = True


SECONDS, EXTRA = Column("seconds", "seconds"), Column("extra_mb", "extra MB", 0, compared=False)
COLUMNS = {
    "save": (SECONDS, EXTRA),
    "async": (Column("blocked", "blocked"), Column("complete", "complete"), EXTRA),
    "load": (SECONDS, Column("read_ratio", "read/needed", 2, False), EXTRA),
    "reshard": (SECONDS, Column("read_ratio", "read/needed", 2, False), EXTRA),
    "small": (Column("save_us", "save µs", 1), Column("load_us", "load µs", 1), EXTRA),
    "consolidate": (SECONDS, EXTRA),
    "training": (
        Column("ms", "ms a step", 2),
        Column("tokens_s", "tokens/s", 0, False),
        Column("of_peak", "% of peak", 0, False),
        Column("gpu_mb", "peak GPU MB", 0),
    ),
}


def summarise(rows: Sequence[Row]) -> None:
    """Add to every row the medians, the spreads, and medians of the ratios of each round to limit and peer."""
    for row in rows:
        for facts in row["rounds"]:
            if "needed_bytes" in facts and facts["read_bytes"] > _COUNTED * facts["needed_bytes"]:
                facts["read_ratio"] = facts["read_bytes"] / facts["needed_bytes"]
    found = {(row["case"], row["way"]): row for row in rows}
    for row in rows:
        rounds: list[Facts] = row["rounds"]
        row["median"], row["min"], row["max"] = (
            {key: act(facts[key] for facts in rounds) for key in (rounds[0] if rounds else ())}
            for act in (median, min, max)
        )
        for other in ("limit", "peer"):
            of = found.get((row["case"], row[other]))
            row[f"to_{other}"] = _ratios(rounds, of["rounds"] if of is not None else [], COLUMNS[row["section"]])


def _ratios(mine: Sequence[Facts], theirs: Sequence[Facts], columns: Sequence[Column]) -> dict[str, float]:
    if not mine or len(mine) != len(theirs):
        return {}
    keys = [c.fact for c in columns if c.compared and c.fact in mine[0]]
    return {
        k: median(a[k] / b[k] for a, b in zip(mine, theirs, strict=True)) for k in keys if all(b[k] for b in theirs)
    }


def tables(section: str, rows: Sequence[Row]) -> Iterator[str]:
    """One for each case, in Markdown, which is readable as it is."""
    for case, some in groupby(rows, key=lambda row: row["case"]):
        group = list(some)
        known = {key for row in group for key in row["median"]}
        columns = [column for column in COLUMNS[section] if column.fact in known]
        compared = any(row["limit"] or row["peer"] for row in group)
        head = [f"{section}, {case}"]
        for column in columns:
            more = ["min–max", "× limit", _PEERS.get(section, "× DCP")] if column.compared and compared else []
            head += [column.title, *more]
        body = [_cells(row, columns, compared=compared) for row in group]
        yield _markdown([head, *body])
        yield from (f"  {row['way']}: {row[key]}" for row in group for key in ("error", "note") if key in row)


def _cells(row: Row, columns: Sequence[Column], *, compared: bool) -> list[str]:
    cells = [row["way"]]
    for column in columns:
        key, digits = column.fact, column.digits
        is_there = key in row["median"]
        cells.append(f"{row['median'][key]:.{digits}f}" if is_there else "–")
        if column.compared and compared:
            cells.append(f"{row['min'][key]:.{digits}f}–{row['max'][key]:.{digits}f}" if is_there else "")
            cells += [f"{row[to][key]:.2f}" if key in row[to] else "" for to in ("to_limit", "to_peer")]
    return cells


def _markdown(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)]
    return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])])


def _json(found: Mapping[str, Any]) -> str:
    """A line for each row, so that a person can compare two files."""
    parts = []
    for section, values in found.items():
        about = json.dumps(values["about"], ensure_ascii=False)
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in values["rows"])
        parts.append(f'"{section}": {{"about": {about}, "rows": [\n{rows}\n]}}')
    return "{" + ",\n".join(parts) + "}\n"


def store(path: Path, section: str, about: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Put a section in place of what the file had of it; returns all that is in the file then."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found[section] = {"about": dict(about), "rows": list(rows)}
    found = {name: found[name] for name in COLUMNS if name in found}
    new = path.with_name(f"{path.name}.new")
    new.write_text(_json(found))
    os.replace(new, path)
    return found
