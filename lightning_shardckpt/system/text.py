"""Sizes, shapes, counts, tables and progress as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_QUIET_S = 1.0  # a progress bar appears only for what takes longer


def size_text(nbytes: int) -> str:
    """A size with three digits or so, in binary units.

    >>> size_text(980), size_text(3 << 20), size_text(1536)
    ('980 B', '3.00 MiB', '1.50 KiB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ("KiB", "MiB", "GiB", "TiB", "PiB")
    unit = 0
    while value >= 1000 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {units[unit]}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it.

    >>> shape_text((3, 4)), shape_text(())
    ('3 × 4', 'scalar')
    """
    return " × ".join(map(str, shape)) if shape else "scalar"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun; ``plural`` where an s does not make it.

    >>> count_text(1, "file"), count_text(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ("size",)) -> str:
    """Lines with aligned columns; the columns named in ``right`` are aligned there.

    >>> print(table(("name", "size"), [("a", "10 B"), ("bc", "9 B")]))
    name  size
    a     10 B
    bc     9 B
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Return the same text with escapes for what is not printable: names in a file may hold control characters.

    >>> print(one_line("a\\nb"))
    a\\nb
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Progress:
    """A progress bar on stderr if that is a terminal; called with numbers of bytes that are done.

    Args:
        nbytes: that are to be done, if known.
        quiet_s: how long something takes before the bar appears.
    """

    def __init__(self, nbytes: int | None = None, *, quiet_s: float = _QUIET_S) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with lightning; no stubs

        # disable=None: unless it is a terminal, whose width is asked for again and again
        self._bar = tqdm(
            total=nbytes, unit="B", unit_scale=True, unit_divisor=1024, delay=quiet_s, disable=None, dynamic_ncols=True
        )

    def __call__(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def expect(self, nbytes: int) -> None:
        """Tell how many bytes are to be done, once that is known."""
        self._bar.total = nbytes

    def close(self) -> None:
        """Leave the bar as it is, and end its line."""
        self._bar.close()


@contextmanager
def progress(nbytes: int | None = None, *, quiet_s: float = _QUIET_S) -> Iterator[Progress]:
    """Show a ``Progress``, whose arguments are the same, for as long as the block runs."""
    shown = Progress(nbytes, quiet_s=quiet_s)
    try:
        yield shown
    finally:
        shown.close()
