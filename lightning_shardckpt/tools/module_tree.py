"""The tree of modules that the names of tensors form, with layers that are alike folded into one node.

Names alone decide: ``a.b.c`` lies in ``a.b``, as ``a/b`` lies in ``a``. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(r"[^./]*[./]|[^./]+")
_DEPTH = 40  # what lies deeper is one name: hostile ones have a million dots


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor by its name; leaves of one ``kind`` (say, dtype and shape) look the same."""

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A module, or several that are alike, or a tensor; sums are over all that it stands for.

    Attributes:
        label: its name below the node above it.
        count: of how many layers it is the first.
        tensors: number of tensors.
        nbytes: their bytes.
        kind: of a tensor, its leaf's ``kind``; empty for modules.
        children: what is below it.
    """

    label: str
    count: int
    tensors: int
    nbytes: int
    kind: str
    children: tuple[Node, ...]


def outline(leaves: Iterable[Leaf]) -> tuple[Node, ...]:
    """Return the modules at the top, in the order in which their names come first.

    >>> [node.label for node in outline(Leaf(f"layers.{i}.weight", "F32", 4) for i in range(3))]
    ['layers.0.weight … layers.2.weight']
    """
    top: _Branch = {}
    for leaf in leaves:
        tokens = _TOKEN.findall(leaf.name) or [""]
        deep = min(len(tokens) - 1, _DEPTH)
        branch = top
        for token in tokens[:deep]:
            branch = branch.setdefault(token, ({}, {}))[0]
        branch.setdefault("".join(tokens[deep:]), ({}, {}))[1]["tensor"] = leaf
    return _nodes(top)


_Branch = dict[str, "tuple[_Branch, dict[str, Leaf]]"]
"""By name the names below it, and the tensor of just that name, if there is one."""


def _nodes(branch: _Branch) -> tuple[Node, ...]:
    found = []
    for token, (below, tensor) in branch.items():
        found += [Node(token, 1, 1, leaf.nbytes, leaf.kind, ()) for leaf in tensor.values()]
        found += [_node(token, _nodes(below))] if below else []
    return tuple(_folded(found))


def _node(token: str, children: tuple[Node, ...]) -> Node:
    only = children[0]
    if len(children) == 1 and (only.count == 1 or not token[0].isdigit()):  # a chain is one node
        label = " … ".join(token + end for end in only.label.split(" … ")) if only.count > 1 else token + only.label
        return Node(label, only.count, only.tensors, only.nbytes, only.kind, only.children)
    return Node(token, 1, sum(c.tensors for c in children), sum(c.nbytes for c in children), "", children)


def _folded(nodes: list[Node]) -> Iterator[Node]:
    """Runs of nodes that are alike and have consecutive numbers become one node each."""
    run: list[Node] = []
    for node in nodes:
        if run and not _follows(run[-1], node):
            yield _one(run)
            run = []
        run.append(node)
    if run:
        yield _one(run)


def _number(node: Node) -> int | None:
    digits = re.match(r"\d{1,9}(?=[./]|$)", node.label)
    return int(digits[0]) if digits and node.count == 1 else None


def _follows(before: Node, node: Node) -> bool:
    a, b = _number(before), _number(node)
    if a is None or b != a + 1:
        return False
    same_rest = before.label[len(str(a)) :] == node.label[len(str(b)) :]
    return same_rest and (before.kind, before.children) == (node.kind, node.children)


def _one(run: list[Node]) -> Node:
    if len(run) == 1:
        return run[0]
    first, last = run[0], run[-1]
    a, b = first.label.rstrip("./"), last.label.rstrip("./")
    sums = sum(node.tensors for node in run), sum(node.nbytes for node in run)
    return Node(f"{a} … {b}", len(run), *sums, first.kind, first.children)


def lines(nodes: tuple[Node, ...], above: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node with its label drawn as a branch; of folded layers, the parts of the first one."""
    for node, after in pairwise([*nodes, None]):
        assert node is not None
        is_last = after is None
        label = node.label.rstrip("./") or node.label
        yield f"{above}{'└─ ' if is_last else '├─ '}{label}" + (f" ({node.count} ×)" if node.count > 1 else ""), node
        yield from lines(node.children, above + ("   " if is_last else "│  "))
