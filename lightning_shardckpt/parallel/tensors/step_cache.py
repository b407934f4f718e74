"""Remember what was gathered in a step, so that what is used twice is gathered once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_tensors import version_of

_Key = tuple[int, int, bool]
_open: list[dict[int, tuple[DTensor, _Key, Tensor]]] = []


@contextmanager
def step_cache() -> Iterator[None]:
    """Inside, gathered parameters are kept. They are whole ones, so that takes memory until the end."""
    _open.append({})
    try:
        yield
    finally:
        _open.pop()


def recall(leaf: DTensor) -> Tensor | None:
    """Return what was gathered of a parameter in this step, if neither it nor the need of gradients changed since."""
    found = _open[-1].get(id(leaf)) if _open else None
    return found[2] if found is not None and found[1] == _key(leaf) else None


def remember(leaf: DTensor, whole: Tensor) -> None:
    """Keep what was gathered of a parameter until the end of the step."""
    if _open:
        _open[-1][id(leaf)] = leaf, _key(leaf), whole


def _key(leaf: DTensor) -> _Key:
    local = local_tensor(leaf)
    return local.data_ptr(), version_of(local), torch.is_grad_enabled() and leaf.requires_grad
