"""Ask autograd what runs, and which nodes of a graph accumulate gradients.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node


def accumulated_leaf(node: Node) -> Tensor | None:
    """The leaf whose gradient a node accumulates; None for other nodes.

    Relies on the name of the nodes that torch makes for leaves, and on their attribute ``variable``.
    """
    if node.name() != "torch::autograd::AccumulateGrad":
        return None
    return cast(Tensor, cast(Any, node).variable)


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread.

    Relies on ``torch._C._current_graph_task_id``.
    """
    return bool(torch._C._current_graph_task_id() != -1)
