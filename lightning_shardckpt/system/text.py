"""Sizes, shapes, counts, tables and progress as readable text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def size_text(nbytes: int) -> str:
    """Return a size in binary units, such as "980 B" or "1.5 KiB"."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as readable text, such as "3 × 4", or "scalar"."""
    return " × ".join(map(str, shape)) or "scalar"


def list_some(texts: Sequence[str], most: int = 10, between: str = ", ") -> str:
    """Return the first of many texts in one, and the number of others, such as "a, b, … and 2 more"."""
    more = [f"… and {len(texts) - most:,} more"] if len(texts) > most else []
    return between.join([*texts[:most], *more])


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, such as "1,200 files"; ``plural`` replaces a plural in s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ("size",), *, limit: int | None = None
) -> str:
    """Return lines with columns, those in ``right`` right-aligned; of more than ``limit`` rows, the first and a count.

    >>> print(table(("name", "size"), [("a", "10 B"), ("bc", "9 B"), ("d", "8 B")], limit=2))
    name  size
    a     10 B
    bc     9 B
    … and 1 more: --tensors '*' lists them
    """
    shown = [header, *([one_line(cell) for cell in row] for row in rows[:limit])]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    sides = [">" if name in right else "<" for name in header]
    lines = ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in shown]
    if len(shown) <= len(rows):
        lines.append(f"… and {len(rows) + 1 - len(shown):,} more: --tensors '*' lists them")
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Return the text with escapes for unprintable characters, which names in a file may contain."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def progress(nbytes: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with further bytes of ``nbytes``, for a bar on a terminal after more than a second."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with lightning; no stubs

    # disable=None: no bar unless stderr is a terminal; dynamic_ncols follows its width
    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "disable": None, "dynamic_ncols": True}
    with tqdm(total=nbytes, delay=1.0, **options) as bar:
        yield bar.update
