"""Let autograd keep notes in place of whole parameters, and gather these again when its backward asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.autograd_backward import saves_elsewhere
from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.tensor_subclass import memory_id


def regathered_in_backward(
    wholes: Sequence[Tensor], gather: Callable[[], list[Tensor]]
) -> AbstractContextManager[Any]:
    """A context in which operations on ``wholes`` save a note of each for their backward, and not its memory.

    Checkpointing and offloading save in their own way: under them, this context does nothing.

    Args:
        wholes: gathered parameters, with history.
        gather: gathers them again, without history; called once in a backward.
    """
    if saves_elsewhere():
        return nullcontext()
    places = {_memory(whole): n for n, whole in enumerate(wholes)}
    again: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        n = places.get(_memory(tensor))
        if n is None:
            return tensor.detach()  # autograd would keep itself alive, if it were the tensor
        local = local_tensor(tensor)
        spec = spec_of(tensor) if isinstance(tensor, DTensor) else None
        return n, spec, local.size(), local.stride(), local.storage_offset()

    @torch.no_grad()
    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        n, spec, *geometry = kept
        if not again:
            again.extend(gather())
        whole = again[n]
        if isinstance(whole, DTensor):
            return new_dtensor(local_tensor(whole).as_strided(*geometry), spec)
        found: Tensor = whole.as_strided(*geometry)
        return found

    for node in {whole.grad_fn for whole in wholes if whole.grad_fn is not None}:
        node.register_hook(lambda *_: again.clear())  # autograd has gone through the unit
    return saved_tensors_hooks(pack, unpack)


def _memory(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return memory_id(local) if local.layout == torch.strided else 0
