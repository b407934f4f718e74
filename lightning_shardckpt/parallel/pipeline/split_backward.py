"""A backward pass in two parts: first the gradients of inputs, for which the previous stage waits, then of weights.

Both parts follow the autograd graph, so they cover every parameter. The graph has two parts: nodes that lead to an
input, and the rest, which leads to other leaves only. The first part runs the former, and records the gradients
received by the nodes with an edge into the rest. The second part runs these nodes again, for such edges only, and then
the rest.

An edge is deferred to the second part only if no other edge enters the rest at the same node. Leaves below other edges
(a bias used twice) get their whole gradient in the first part, and so do leaves that a Python autograd function uses
together with an input, since its backward cannot run in part.

Cost: autograd keeps the activations of a microbatch until the second part; with non-reentrant activation checkpointing
each part recomputes once. With reentrant checkpointing torch raises in the first part.

Sharded parameters are gathered once for all passes, as copies that are leaves of autograd; their gradients are reduced
after all second parts.
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
from lightning_shardckpt.compat.torch_tensors import without_torch_function

Received = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _Rerun:
    """A node to run again for ``edges`` only, with the gradients that it received in the first part."""

    node: Node
    received: Received
    edges: tuple[GradientEdge, ...]


@dataclass(frozen=True, slots=True)
class DeferredBackward:
    """The second part of a backward pass; keeps the activations alive."""

    reruns: tuple[_Rerun, ...]
    roots: tuple[tuple[GradientEdge, Tensor], ...]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _BackwardSplit:
    """The edges, roots and leaves of the second part; ``early`` are leaves of the first part."""

    edges: dict[Node, tuple[GradientEdge, ...]]
    roots: frozenset[Node]
    leaves: tuple[Tensor, ...]
    early: tuple[Tensor, ...]


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> DeferredBackward:
    """Accumulate the gradients of ``inputs`` into their ``grad``, and return the rest for `backward_weight`.

    Args:
        outputs: of the stage; outputs that require no gradient are ignored.
        gradients: the gradient of each output. They must not be written to before `backward_weight`.
        inputs: leaves. An input that is not reached keeps its ``grad``. If none requires a gradient, the whole backward
            is deferred.
    """
    roots = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    split = _split([edge.node for edge, _ in roots], [get_gradient_edge(tensor).node for tensor in leaves])
    received: dict[Node, Received] = {}
    hooks = [node.register_prehook(_record(received, node)) for node in split.edges]
    try:
        if leaves and roots:
            edges, grads = [edge for edge, _ in roots], [gradient for _, gradient in roots]
            with without_torch_function():  # of copies of parameters, which stand for these
                torch.autograd.backward(edges, grads, inputs=[*leaves, *split.early], retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return DeferredBackward(
        reruns=tuple(_Rerun(node, received[node], edges) for node, edges in split.edges.items() if node in received),
        roots=tuple((edge, gradient) for edge, gradient in roots if edge.node in split.roots),
        leaves=split.leaves,
    )


def backward_weight(deferred: DeferredBackward) -> None:
    """Accumulate the deferred gradients into the leaves' ``grad``. Call it once, as it frees the graph."""
    roots = list(deferred.roots)
    with GraphExecGroup():  # checkpointed regions are recomputed once for all the calls below
        for rerun in deferred.reruns:
            roots += _rerun(rerun)
        if roots:
            edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
            with without_torch_function():  # of copies of parameters, which stand for these
                torch.autograd.backward(edges, grads, inputs=deferred.leaves)


def _rerun(rerun: _Rerun) -> list[tuple[GradientEdge, Tensor]]:
    """Return the gradients at the edges of one node; autograd computes no gradients for its other edges."""
    roots = [(GradientEdge(rerun.node, i), grad) for i, grad in enumerate(rerun.received) if grad is not None]
    if not roots:
        return []
    # Tensor hooks run again, but `received` contains their results already, so it replaces their output.
    hook = rerun.node.register_prehook(lambda _: rerun.received)
    try:
        edges, grads = [edge for edge, _ in roots], [grad for _, grad in roots]
        results = torch.autograd.grad(edges, rerun.edges, grads, allow_unused=True)
    finally:
        hook.remove()
    return [(edge, grad) for edge, grad in zip(rerun.edges, results, strict=True) if grad is not None]


def _record(received: dict[Node, Received], node: Node) -> Callable[[Received], None]:
    def record(gradients: Received) -> None:
        received[node] = gradients

    return record


# ── the graph ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _split(starts: Sequence[Node], sinks: Sequence[Node]) -> _BackwardSplit:
    """Split the graph below ``starts`` into the nodes that lead to ``sinks`` and the rest, in the same order on all
    ranks."""
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
    early = _leaves(_reach(_not_deferrable(entries, parents), _children))
    late = _leaves(node for node in nodes if node not in leading and node not in early)
    above_late = _reach(late, lambda node: parents[node])
    deferred = {node: tuple(edge for edge in edges if edge.node in above_late) for node, edges in entries.items()}
    return _BackwardSplit(
        edges={node: edges for node, edges in deferred.items() if edges},
        roots=frozenset(node for node in starts if node in above_late and node not in leading),
        leaves=tuple(late.values()),
        early=tuple(early.values()),
    )


def _not_deferrable(entries: dict[Node, list[GradientEdge]], parents: dict[Node, set[Node]]) -> list[Node]:
    """Return the nodes of the rest with edges from several nodes, or from a Python autograd function."""
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
    """Return ``starts`` and all nodes that can be reached from them, in the order of the search."""
    reached = dict.fromkeys(starts)
    todo = list(reached)
    while todo:
        for node in neighbours(todo.pop()):
            if node not in reached:
                reached[node] = None
                todo.append(node)
    return reached


def _leaves(nodes: Iterable[Node]) -> dict[Node, Tensor]:
    """Return the nodes that accumulate a gradient, with their leaf tensors."""
    leaves = ((node, accumulated_leaf(node)) for node in nodes)
    return {node: leaf for node, leaf in leaves if leaf is not None}
