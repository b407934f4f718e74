"""What was observed of a training run, as values: per rank, per step and moment, entries by section and name.

Written as JSON lines by the ranks of a run (``recording``), and read again to be compared. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Phase = Literal["restored", "before", "after"]
"""A moment of a step: its state loaded from a checkpoint, before the training step, after the optimizer's step."""

_OWN = ("metrics", "precision", "schedulers", "module", "datamodule", "callbacks")
RESTORED: tuple[str, ...] = ("weights", "buffers", "optimizer", "param_groups", *_OWN)
BEFORE: tuple[str, ...] = ("logger", "validation", "batch", "samples", "random", "param_groups", "counters")
AFTER: tuple[str, ...] = (
    *("loss", "logged", "gradients", "optimizer", "weights", "buffers", *_OWN),
    *("param_groups", "random", "counters"),
)
SECTIONS: dict[Phase, tuple[str, ...]] = {"restored": RESTORED, "before": BEFORE, "after": AFTER}
"""The sections of each moment, causes before what follows from them."""


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """A box of a tensor: where it begins, its lengths, its part in the tensor's digest, and moments of its elements.

    The digest is 16 hex digits. Moments: the sum of squares, then projections on fixed pseudo-random vectors; over
    boxes they add up to the whole's.
    """

    start: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: str
    moments: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as one rank has it: dtype, global shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[BoxRecord, ...]


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """A value as text, which may be a digest; and as a number, if it is one.

    ``shared``: that it is meant to be equal on all ranks, whatever their number.
    """

    text: str
    number: float | None = None
    shared: bool = True


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """The digest of every sample of a batch, whatever its place in it."""

    rows: tuple[str, ...]


Entry = TensorRecord | ValueRecord | RowsRecord
Sections = Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True, slots=True)
class Setting:
    """Who recorded: its rank, of how many; its share of the data, of how many; the strategy and its precision."""

    rank: int
    world: int
    data_rank: int
    data_size: int
    strategy: str
    precision: str


@dataclass(slots=True)
class RankRecords:
    """All that one rank recorded.

    Attributes:
        began_from: the checkpoint that the script itself named.
        unobserved: the reason, by name.
        ended: that training ended by itself, after so many batches.
    """

    setting: Setting
    began_from: str | None = None
    moments: dict[tuple[int, Phase], Sections] = field(default_factory=dict)
    unobserved: dict[str, str] = field(default_factory=dict)
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a recorder has to do.

    Attributes:
        records: the folder for the files of all ranks.
        own_saves: the folder into which the checkpoints of the script's own callbacks go instead.
        root_dir: the folder in place of ``default_root_dir`` and of the directories of loggers.
        first_step: batches that were trained before this run.
        last_step: the batch after which the run is ended, counted from the beginning of training.
        save_to: where to save a checkpoint after the last one; None for none.
        resume_from: the checkpoint from which to begin; None for what the script says.
    """

    records: str
    own_saves: str
    root_dir: str
    first_step: int
    last_step: int
    save_to: str | None = None
    resume_from: str | None = None

    def to_json(self) -> str:
        """Return the plan as a JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        """Inverse of ``to_json``."""
        return cls(**json.loads(text))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rank_file(folder: str, rank: int) -> Path:
    """Return the path of a rank's records."""
    return Path(folder, f"rank-{rank:05}.jsonl")


def setting_line(setting: Setting, began_from: str | None) -> str:
    """Return the first line of a rank's file; ``began_from`` is the checkpoint that the script itself named."""
    return json.dumps({"setting": asdict(setting), "began_from": began_from})


def moment_line(step: int, phase: Phase, sections: Sections) -> str:
    """Return the line of a moment."""
    found = {section: {name: _to_json(e) for name, e in entries.items()} for section, entries in sections.items()}
    return json.dumps({"step": step, "phase": phase, "sections": found}, separators=(",", ":"))


def unobserved_line(unobserved: Mapping[str, str]) -> str:
    """Return a line of what cannot be observed, with the reason by name."""
    return json.dumps({"unobserved": dict(unobserved)})


def ended_line(step: int) -> str:
    """Return the line of a training that ended by itself after so many batches."""
    return json.dumps({"ended": step})


def read_records(folder: str) -> list[RankRecords]:
    """Read the records of all ranks of a run, in the order of ranks; none if none recorded."""
    return [_read(path) for path in sorted(Path(folder).glob("rank-*.jsonl")) if path.stat().st_size]


def last_step(records: RankRecords) -> int:
    """Return how many batches were trained."""
    return max((step for step, _ in records.moments), default=0) if records.ended is None else records.ended


def _read(path: Path) -> RankRecords:
    whole = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))  # it may be killed
    lines: Iterator[dict[str, Any]] = map(json.loads, whole)
    about = next(lines)
    found = RankRecords(Setting(**about["setting"]), about["began_from"])
    for line in lines:
        if "phase" in line:
            found.moments[line["step"], line["phase"]] = {
                section: {name: _from_json(entry) for name, entry in entries.items()}
                for section, entries in line["sections"].items()
            }
        found.unobserved.update(line.get("unobserved", {}))
        found.ended = line.get("ended", found.ended)
    return found


def _to_json(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ValueRecord):
        return {"value": [entry.text, entry.number, entry.shared]}
    if isinstance(entry, RowsRecord):
        return {"rows": entry.rows}
    boxes = [[box.start, box.lengths, box.digest, box.moments] for box in entry.boxes]
    return {"tensor": [entry.dtype, entry.shape, boxes]}


def _from_json(found: dict[str, Any]) -> Entry:
    if "value" in found:
        return ValueRecord(*found["value"])
    if "rows" in found:
        return RowsRecord(tuple(found["rows"]))
    dtype, shape, boxes = found["tensor"]
    return TensorRecord(
        dtype, tuple(shape), tuple(BoxRecord(tuple(a), tuple(b), digest, tuple(m)) for a, b, digest, m in boxes)
    )
