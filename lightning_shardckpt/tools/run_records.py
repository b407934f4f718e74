"""Records of a training run: per rank, step and moment, entries by section and name. No torch.

The ranks of a run write them as JSON lines, one dict each; ``read_records`` reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

Phase = Literal["restored", "before", "after"]
"""A moment of a step: its state loaded from a checkpoint, before the training step, after the optimizer's step."""

_OWN = ("metrics", "precision", "schedulers", "module", "datamodule", "callbacks")
SECTIONS: dict[Phase, tuple[str, ...]] = {
    "restored": ("weights", "buffers", "optimizer", "param_groups", *_OWN),
    "before": ("logger", "validation", "batch", "samples", "random", "param_groups", "counters"),
    "after": (
        *("loss", "logged", "gradients", "optimizer", "weights", "buffers", *_OWN),
        *("param_groups", "random", "counters"),
    ),
}
"""The sections of each moment, causes before their effects."""


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """A box of a tensor: its start, its lengths, the digest of its elements, and their moments.

    Digests and moments of boxes add up to those of the tensor. The moments are the sum of squares, then projections on
    fixed pseudo-random vectors.
    """

    start: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: int
    moments: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One value, one tensor, or the samples of a batch.

    Attributes:
        text: of a value, which may be a digest; the dtype of a tensor.
        number: of a value that is a number.
        shared: whether the value is the same on all ranks, on any topology.
        shape: of a tensor: the global one.
        boxes: of a tensor: those that the rank has.
        rows: of samples: a digest of each.
    """

    text: str
    number: float | None = None
    shared: bool = True
    shape: tuple[int, ...] | None = None
    boxes: tuple[BoxRecord, ...] = ()
    rows: tuple[str, ...] | None = None


Sections = Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True, slots=True)
class Setting:
    """The rank and the world size, the data-parallel rank and size, the strategy and its precision."""

    rank: int
    world: int
    data_rank: int
    data_size: int
    strategy: str
    precision: str


@dataclass(slots=True)
class RankRecords:
    """The records of one rank.

    Attributes:
        setting: the rank and its place.
        began_from: the ``ckpt_path`` of the script itself.
        moments: sections by step and phase.
        unobserved: why something could not be recorded, by name.
        ended: after how many batches training ended by itself; None if it did not.
    """

    setting: Setting
    began_from: str | None = None
    moments: dict[tuple[int, Phase], Sections] = field(default_factory=dict)
    unobserved: dict[str, str] = field(default_factory=dict)
    ended: int | None = None

    @property
    def last_step(self) -> int:
        """The number of batches that were trained."""
        return max((step for step, _ in self.moments), default=0) if self.ended is None else self.ended


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The orders of a recorder.

    Attributes:
        records: the folder for the files of all ranks.
        own_saves: the folder that replaces ``dirpath`` of the script's own ModelCheckpoints.
        root_dir: the folder that replaces ``default_root_dir`` and the directories of loggers.
        first_step: batches that were trained before this run.
        last_step: the batch after which the run ends, counted from the beginning of training.
        save_to: the checkpoint to save after the last batch, if any.
        resume_from: the checkpoint to resume from; None leaves ``ckpt_path`` as the script gives it.
    """

    records: str
    own_saves: str
    root_dir: str
    first_step: int
    last_step: int
    save_to: str | None = None
    resume_from: str | None = None


def rank_file(folder: str, rank: int) -> Path:
    """Return the path of a rank's records."""
    return Path(folder, f"rank-{rank:05}.jsonl")


def to_line(**values: Any) -> str:
    """Return a line of a rank's file: fields of ``RankRecords``, or a moment's ``step``, ``phase`` and ``sections``."""
    return json.dumps(values, default=astuple, separators=(",", ":")) + "\n"


def read_records(folder: str) -> list[RankRecords]:
    """Read the records of all ranks of a run, in the order of ranks; none if none recorded."""
    return [_read(path) for path in sorted(Path(folder).glob("rank-*.jsonl")) if path.stat().st_size]


def _read(path: Path) -> RankRecords:
    whole = (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))  # a kill cuts the last
    first, *lines = map(json.loads, whole)
    records = RankRecords(Setting(*first["setting"]), first["began_from"])
    for line in lines:
        if "phase" in line:
            records.moments[line["step"], line["phase"]] = {
                section: {name: _entry(*values) for name, values in entries.items()}
                for section, entries in line["sections"].items()
            }
        records.unobserved.update(line.get("unobserved", {}))
        records.ended = line.get("ended", records.ended)
    return records


def _entry(text: str, number: float | None, shared: bool, shape: Any, boxes: list[Any], rows: Any) -> Entry:
    of_boxes = tuple(BoxRecord(tuple(at), tuple(of), digest, tuple(moments)) for at, of, digest, moments in boxes)
    of_shape, of_rows = (None if values is None else tuple(values) for values in (shape, rows))
    return Entry(text, number, shared, of_shape, of_boxes, of_rows)
