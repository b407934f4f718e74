"""Leaves are found in the autograd graph, and nothing else is."""

from __future__ import annotations

import torch

from lightning_shardckpt.compat.autograd import accumulated_leaf


def test_only_the_nodes_of_leaves_have_one() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2)
    node = (leaf * other).grad_fn
    assert node is not None and accumulated_leaf(node) is None
    below = node.next_functions[0][0]
    assert below is not None and accumulated_leaf(below) is leaf
