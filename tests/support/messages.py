"""Every text that the package raises, warns with or prints: ``python -m tests.support.messages`` writes the list anew.

Slots stand for what is filled in. Texts of one or two words are names and keys, and docstrings are no messages.
"""

from __future__ import annotations

import ast

from tests.support.pool import ROOT

LIST = ROOT / "tests" / "golden" / "messages.txt"
SLOT = "…"


def messages() -> list[str]:
    """Return the texts in order, each once and in one line."""
    found = set()
    for path in (ROOT / "lightning_shardckpt").rglob("*.py"):
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts = (part.value if isinstance(part, ast.Constant) else SLOT for part in node.values)
                found.add("".join(map(str, texts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                found.add(node.value)
    return sorted(text.replace("\n", "\\n") for text in found if len(text.split()) > 2)


if __name__ == "__main__":
    LIST.write_text("\n".join(messages()) + "\n")
