"""Run a backward in two parts: first what the stage before waits for, the gradients of parameters later.

Both parts walk the autograd graph itself, so no parameter can be forgotten. The graph falls in two: nodes from which an
input is reached, and the rest, which leads to leaves only. The first part runs the former and notes the gradient that
each of its nodes with an edge into the rest received. The second runs just these nodes again, for those edges only, and
then the rest. An edge stays for the second part if nothing else enters the rest where it does; leaves after other
edges (a bias used twice) get their whole gradient in the first part, which is as right and only less to put off. So do
leaves that a Python autograd function uses together with an input: its backward cannot run in part.

What it costs: autograd keeps a microbatch's activations until the second part, and with non-reentrant activation
checkpointing both parts recompute, each once. With the reentrant kind torch raises in the first part.

Sharded parameters are gathered once for all passes, as copies that are leaves of autograd; their gradients are reduced
when all second parts are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

from lightning_shardckpt.compat.torch_autograd import accumulated_leaf

Received = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _Again:
    """A node to run once more, with what it received in the first part, for ``edges`` only."""

    node: Node
    received: Received
    edges: tuple[GradientEdge, ...]


@dataclass(frozen=True, slots=True)
class DeferredBackward:
    """The rest of a backward after its first part; keeps the activations alive."""

    again: tuple[_Again, ...]
    roots: tuple[tuple[GradientEdge, Tensor], ...]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _BackwardSplit:
    """The edges and leaves that wait for the second part; other leaves are ``early``."""

    edges: dict[Node, tuple[GradientEdge, ...]]
    roots: frozenset[Node]
    leaves: tuple[Tensor, ...]
    early: tuple[Tensor, ...]


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> DeferredBackward:
    """Accumulate the gradients of ``inputs`` into their ``grad`` and return what remains for ``backward_weight``.

    Args:
        outputs: what the stage computed; those without gradient are left out.
        gradients: the gradient of each output. They must not be written to before ``backward_weight``.
        inputs: leaves. One that is not reached keeps its ``grad``; without any that require it, everything remains.
    """
    given = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    plan = _plan([edge.node for edge, _ in given], [get_gradient_edge(tensor).node for tensor in wanted])
    received: dict[Node, Received] = {}
    hooks = [node.register_prehook(_note(received, node)) for node in plan.edges]
    try:
        if wanted and given:
            edges, grads = [edge for edge, _ in given], [gradient for _, gradient in given]
            torch.autograd.backward(edges, grads, inputs=[*wanted, *plan.early], retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return DeferredBackward(
        again=tuple(_Again(node, received[node], edges) for node, edges in plan.edges.items() if node in received),
        roots=tuple((edge, gradient) for edge, gradient in given if edge.node in plan.roots),
        leaves=plan.leaves,
    )


def backward_weight(rest: DeferredBackward) -> None:
    """Accumulate the gradients that remain into the leaves' ``grad``; call it once, as it frees the graph."""
    roots = list(rest.roots)
    with GraphExecGroup():  # checkpointed regions are recomputed once for all the calls below
        for item in rest.again:
            roots += _run_again(item)
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots], inputs=rest.leaves)


def _run_again(item: _Again) -> list[tuple[GradientEdge, Tensor]]:
    """The gradients at the edges of one node; autograd leaves out what only the node's other edges need."""
    given = [(GradientEdge(item.node, i), grad) for i, grad in enumerate(item.received) if grad is not None]
    if not given:
        return []
    # Tensor hooks run again here. What they make of the gradient is in `received` already.
    hook = item.node.register_prehook(lambda _: item.received)
    try:
        edges, grads = [edge for edge, _ in given], [grad for _, grad in given]
        found = torch.autograd.grad(edges, item.edges, grads, allow_unused=True)
    finally:
        hook.remove()
    return [(edge, grad) for edge, grad in zip(item.edges, found, strict=True) if grad is not None]


def _note(received: dict[Node, Received], node: Node) -> Callable[[Received], None]:
    def note(gradients: Received) -> None:
        received[node] = gradients

    return note


# ── the graph ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan(starts: Sequence[Node], sinks: Sequence[Node]) -> _BackwardSplit:
    """Divide the graph below ``starts`` into what leads to ``sinks`` and the rest, in an order that all ranks share."""
    parents: defaultdict[Node, set[Node]] = defaultdict(set)
    nodes = _reach(starts, _children)
    for node in nodes:
        for child in _children(node):
            parents[child].add(node)
    leading = _reach([sink for sink in sinks if sink in nodes], lambda node: parents[node])
    entries = {
        node: list(dict.fromkeys(GradientEdge(child, nr) for child, nr in _edges(node) if child not in leading))
        for node in nodes
        if node in leading and node not in sinks
    }
    early = _leaves(_reach(_not_to_put_off(entries, parents), _children))
    late = _leaves(node for node in nodes if node not in leading and node not in early)
    lasting = _reach(late, lambda node: parents[node])
    edges = {node: tuple(edge for edge in found if edge.node in lasting) for node, found in entries.items()}
    return _BackwardSplit(
        edges={node: found for node, found in edges.items() if found},
        roots=frozenset(node for node in starts if node in lasting and node not in leading),
        leaves=tuple(late.values()),
        early=tuple(early.values()),
    )


def _not_to_put_off(entries: dict[Node, list[GradientEdge]], parents: dict[Node, set[Node]]) -> list[Node]:
    """Return nodes where the rest is entered from several nodes, or from a Python function, which would run again."""
    return [
        edge.node
        for node, edges in entries.items()
        for edge in edges
        if isinstance(cast(object, node), BackwardCFunction) or parents[edge.node] != {node}
    ]


def _edges(node: Node) -> list[tuple[Node, int]]:
    return [(child, nr) for child, nr in node.next_functions if child is not None]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in _edges(node)]


def _reach(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """``starts`` and all that is reached from them, in the order in which it was found."""
    found = dict.fromkeys(starts)
    todo = list(found)
    while todo:
        for node in neighbours(todo.pop()):
            if node not in found:
                found[node] = None
                todo.append(node)
    return found


def _leaves(nodes: Iterable[Node]) -> dict[Node, Tensor]:
    """The leaves among ``nodes``: each node that accumulates a gradient, with the tensor it is for."""
    leaves = ((node, accumulated_leaf(node)) for node in nodes)
    return {node: leaf for node, leaf in leaves if leaf is not None}
