"""Leaves are found in the autograd graph, and nothing else is; a backward pass is noticed."""

from __future__ import annotations

import torch

from lightning_shardckpt.compat.autograd import accumulated_leaf, in_backward


def test_only_the_nodes_of_leaves_have_one() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2)
    node = (leaf * other).grad_fn
    assert node is not None and accumulated_leaf(node) is None
    below = node.next_functions[0][0]
    assert below is not None and accumulated_leaf(below) is leaf


def test_a_backward_pass_is_noticed_while_it_runs_and_no_longer() -> None:
    seen: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    out = leaf * 2
    out.register_hook(lambda gradient: seen.append(in_backward()))
    assert not in_backward()
    out.sum().backward()
    assert seen == [True] and not in_backward()
