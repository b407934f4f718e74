"""The README and the pages of docs/, in the order in which a reader meets them, and their blocks of code.

A block without a language is a drawing. Nothing here runs one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.pool import ROOT

DOCS = ROOT / "docs" / "pages"
SET_UP = "python3.11 -m venv .venv"


@dataclass(frozen=True)
class Block:
    """A block of code: its language, and where its first line is."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def world(self) -> int:
        """How many processes the Trainer of the block asks for."""
        found = re.search(r"devices=(\d+)", self.code)
        return int(found[1]) if found else 1


def pages() -> list[Path]:
    """Return the README, and the pages of the site in the order of its menu."""
    _, _, menu = (ROOT / "docs" / "mkdocs.yml").read_text().partition("\nnav:\n")
    return [ROOT / "README.md", *(DOCS / name for name in re.findall(r"^ *- (\S+\.md)$", menu, re.MULTILINE))]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]) for match in found]


def prose(page: Path) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def table(page: Path, head: str) -> list[list[str]]:
    """Return the rows of the table of a page whose first line begins like this, as the texts of their cells."""
    _, found, rest = page.read_text().partition(head)
    assert found, f"{page} has no table {head!r}"
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
