"""Let autograd keep notes in place of whole parameters, and gather these again when its backward asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_tensors import memory_id, version_of


class SavedParameters:
    """What operations on gathered parameters save for their backward: a note of each, or the tensor.

    Autograd sees no change of a parameter whose memory it does not have, and would compute other gradients: that is an
    error here, as it is for plain tensors.

    Args:
        name: of who gathered, for messages.
        leaves: the parameters.
        wholes: the same, gathered.
        gather: gathers them again, without history; called once in a backward. None to keep what is gathered.
        elsewhere: for each parameter that torch's engine frees, what gives its memory in a backward; None for others.
    """

    def __init__(
        self,
        name: str,
        leaves: Sequence[Tensor],
        wholes: Sequence[Tensor],
        gather: Callable[[], list[Tensor]] | None,
        elsewhere: Sequence[Callable[[], Tensor] | None],
    ) -> None:
        self._name, self._leaves, self._gather = name, leaves, gather  # without `wholes`, whose memory is to be freed
        self._places = {_memory(whole): n for n, whole in enumerate(wholes)}
        self._elsewhere = elsewhere
        self._again: list[Tensor] = []
        self._versions: list[int] = []
        self._outer: SavedParameters | None = None  # those of the unit around this one
        gathered = [whole for whole, other in zip(wholes, elsewhere, strict=True) if other is None]
        for node in {whole.grad_fn for whole in gathered if whole.grad_fn is not None} if gather is not None else ():
            node.register_hook(lambda *_, again=self._again: again.clear())  # autograd has gone through the unit

    def context(self) -> AbstractContextManager[Any]:
        """A context for the operations. Checkpointing and offloading save in their own way: then it does nothing."""
        if saves_elsewhere():
            return nullcontext()
        self._outer = _saved_parameters(packing_hook())
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """Call when the forward is done: from now on, parameters must not change."""
        self._versions = [version_of(leaf) for leaf in self._leaves]

    def _pack(self, tensor: Tensor) -> Any:
        n = self._places.get(_memory(tensor))
        if n is None and self._outer is not None:
            return None, self._outer, self._outer._pack(tensor)
        if n is None:
            return tensor.detach()  # autograd would keep itself alive, if it were the tensor
        if self._gather is None and self._elsewhere[n] is None:
            return n, tensor.detach()
        local = local_tensor(tensor)
        spec = spec_of(tensor) if isinstance(tensor, DTensor) else None
        return n, spec, local.size(), local.stride(), local.storage_offset()

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        n, *rest = kept
        if n is None:
            outer, packed = rest
            return outer._unpack(packed)  # type: ignore[no-any-return]  # a Tensor
        leaf = self._leaves[n]
        if self._versions and version_of(leaf) != self._versions[n]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {self._name or 'the module'}, of shape {tuple(leaf.shape)}. Change it before the "
                "forward or after the backward."
            )
        elsewhere = self._elsewhere[n]
        if elsewhere is not None:
            return _like_saved(elsewhere(), *rest)
        if self._gather is None:
            found: Tensor = rest[0]
            return found
        with torch.no_grad():
            if not self._again:
                self._again.extend(self._gather())
            return _like_saved(self._again[n], *rest)


def saves_elsewhere() -> bool:
    """Return whether checkpointing, offloading or the user saves tensors in another way here."""
    hook = packing_hook()
    return hook is not None and _saved_parameters(hook) is None


def _saved_parameters(hook: Any) -> SavedParameters | None:
    """What a hook that packs tensors belongs to, if it is ours."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SavedParameters) else None


def _like_saved(whole: Tensor, spec: Any, *geometry: Any) -> Tensor:
    """A view of a whole parameter as the tensor that was saved."""
    with torch.no_grad():
        found = local_tensor(whole).as_strided(*geometry)
        return found if spec is None else new_dtensor(found, spec)


def _memory(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return memory_id(local) if local.layout == torch.strided else 0
