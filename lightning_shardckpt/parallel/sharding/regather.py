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
from lightning_shardckpt.compat.tensor_subclass import memory_id, version_of


class SavedParameters:
    """What operations on gathered parameters save for their backward: a note of each, or the tensor.

    Autograd sees no change of a parameter whose memory it does not have, and would compute other gradients: that is an
    error here, as it is for plain tensors.

    Args:
        name: of who gathered, for messages.
        leaves: the parameters.
        wholes: the same, gathered.
        gather: gathers them again, without history; called once in a backward. None to keep what is gathered.
    """

    def __init__(
        self,
        name: str,
        leaves: Sequence[Tensor],
        wholes: Sequence[Tensor],
        gather: Callable[[], list[Tensor]] | None,
    ) -> None:
        self._name, self._leaves, self._gather = name, leaves, gather  # without `wholes`, whose memory is to be freed
        self._places = {_memory(whole): n for n, whole in enumerate(wholes)}
        self._again: list[Tensor] = []
        self._versions: list[int] = []
        for node in {whole.grad_fn for whole in wholes if whole.grad_fn is not None} if gather is not None else ():
            node.register_hook(lambda *_, again=self._again: again.clear())  # autograd has gone through the unit

    def context(self) -> AbstractContextManager[Any]:
        """A context for the operations. Checkpointing and offloading save in their own way: then it does nothing."""
        if saves_elsewhere():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """Call when the forward is done: from now on, parameters must not change."""
        self._versions = [version_of(leaf) for leaf in self._leaves]

    def _pack(self, tensor: Tensor) -> Any:
        n = self._places.get(_memory(tensor))
        if n is None:
            return tensor.detach()  # autograd would keep itself alive, if it were the tensor
        if self._gather is None:
            return n, tensor.detach()
        local = local_tensor(tensor)
        spec = spec_of(tensor) if isinstance(tensor, DTensor) else None
        return n, spec, local.size(), local.stride(), local.storage_offset()

    @torch.no_grad()
    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        n, *rest = kept
        leaf = self._leaves[n]
        if self._versions and version_of(leaf) != self._versions[n]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {self._name or 'the module'}, of shape {tuple(leaf.shape)}. Change it before the "
                "forward or after the backward."
            )
        if self._gather is None:
            found: Tensor = rest[0]
            return found
        spec, *geometry = rest
        if not self._again:
            self._again.extend(self._gather())
        whole = self._again[n]
        if isinstance(whole, DTensor):
            return new_dtensor(local_tensor(whole).as_strided(*geometry), spec)
        plain: Tensor = whole.as_strided(*geometry)
        return plain


def _memory(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return memory_id(local) if local.layout == torch.strided else 0
