"""Let autograd keep notes in place of whole parameters, and see whether these change before its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_tensors import memory_id, version_of
from lightning_shardckpt.parallel.tensors.placement import ASSIGNMENTS


class _Other(NamedTuple):
    """A tensor that is no parameter, as it was saved; autograd checks no version of what hooks have packed."""

    tensor: Tensor
    version: int


class SavedParameters:
    """What operations on whole parameters save for their backward: a note of each, or the tensor.

    Autograd sees no change of a parameter whose memory it does not have, and would compute other gradients: that is an
    error here, as it is for plain tensors.

    Args:
        name: of the module that has the parameters, for messages.
        leaves: the parameters.
        wholes: the same, gathered.
        again: for each parameter that torch's engine frees, what gives its memory in a backward; None for others.
    """

    def __init__(
        self,
        name: str,
        leaves: Sequence[Tensor],
        wholes: Sequence[Tensor],
        again: Sequence[Callable[[], Tensor] | None],
    ) -> None:
        self._name, self._leaves, self._again = name, leaves, again  # without `wholes`, whose memory is to be freed
        self._places = {_memory(whole): n for n, whole in enumerate(wholes)}
        self._states: list[tuple[int, int]] = []
        self._outer: SavedParameters | None = None  # those of the unit around this one

    def context(self) -> AbstractContextManager[Any]:
        """A context for the operations. Checkpointing and offloading save in their own way: then it does nothing."""
        if saves_elsewhere():
            return nullcontext()
        self._outer = _saved_parameters(packing_hook())
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """Call when the forward is done: from now on, parameters must not change."""
        self._states = [self._state(n) for n in range(len(self._leaves))]

    def _state(self, n: int) -> tuple[int, int]:
        """What tells whether a backward would get other values; ``data`` changes those that are gathered again, too."""
        if self._again[n] is not None:
            return version_of(self._leaves[n]), 0
        return state_of(self._leaves[n])

    def _pack(self, tensor: Tensor) -> Any:
        n = self._places.get(_memory(tensor))
        if n is None and self._outer is not None:
            return self._outer._pack(tensor)
        if n is None:
            return _Other(tensor.detach(), version_of(tensor))  # autograd would keep itself alive by the tensor itself
        local, spec = local_tensor(tensor), spec_of(tensor) if isinstance(tensor, DTensor) else None
        if self._again[n] is None:
            return self, n, spec, local.detach()
        return self, n, spec, (local.size(), local.stride(), local.storage_offset())

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Other):
            if version_of(kept.tensor) != kept.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"one of shape {tuple(kept.tensor.shape)} that {self._name or 'the module'} computed with is at "
                    f"version {version_of(kept.tensor)} instead of {kept.version}."
                )
            return kept.tensor
        owner, n, spec, found = kept
        if owner._states and owner._state(n) != owner._states[n]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {owner._name or 'the module'}, of shape {tuple(owner._leaves[n].shape)}. Change it "
                "before the forward or after the backward."
            )
        again = owner._again[n]
        memory = None if again is None else local_tensor(again())  # with gradients enabled, it gives a copy
        with torch.no_grad():
            local: Tensor = found if memory is None else memory.as_strided(*found)
            return local if spec is None else new_dtensor(local, spec)


def saves_elsewhere() -> bool:
    """Return whether checkpointing, offloading or the user saves tensors in another way here."""
    hook = packing_hook()
    return hook is not None and _saved_parameters(hook) is None


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Return what differs after a change of a tensor's values, in place or by an assignment to ``data``.

    It changes on all ranks or on none. Addresses are no part of it: a rank without rows has none, and new memory may be
    where other memory was before. No communication.
    """
    return version_of(local_tensor(tensor)), tensor.__dict__.get(ASSIGNMENTS, 0)


def _saved_parameters(hook: Any) -> SavedParameters | None:
    """What a hook that packs tensors belongs to, if it is ours."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SavedParameters) else None


def _memory(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return memory_id(local) if local.layout == torch.strided else 0
