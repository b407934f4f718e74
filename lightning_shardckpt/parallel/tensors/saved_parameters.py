"""Hooks for saved tensors that keep a reference to a sharded parameter in place of the gathered one.

They also detect changes of parameters between the forward and the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_tensors import memory_id, version_of
from lightning_shardckpt.parallel.tensors.placement import ASSIGNMENTS


class _SavedActivation(NamedTuple):
    """A tensor other than a parameter. Autograd does not check the version of tensors that hooks have packed."""

    tensor: Tensor
    version: int


class SavedParameters:
    """Packs and unpacks the tensors that operations on gathered parameters save for their backward.

    Autograd can't see changes of a parameter whose memory it does not keep, and would compute wrong gradients. As for
    plain tensors, a change is an error.

    ``regather`` returns the memory of a parameter in a backward, if torch's engine frees it; it is None for others.
    """

    def __init__(
        self,
        name: str,
        leaves: Sequence[Tensor],
        wholes: Sequence[Tensor],
        regather: Sequence[Callable[[], Tensor] | None],
    ) -> None:
        self._name, self._leaves, self._regather = name, leaves, regather  # not `wholes`, whose memory is to be freed
        self._numbers = {_memory(whole): n for n, whole in enumerate(wholes)}
        self._versions: list[tuple[int, int]] = []
        self._outer: SavedParameters | None = None  # of the unit around this one

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the hooks as a context; an empty one where checkpointing or offloading has its own hooks."""
        if uses_other_hooks():
            return nullcontext()
        self._outer = _owner_of(packing_hook())
        return saved_tensors_hooks(self._pack, self._unpack)

    def end_forward(self) -> None:
        """End the forward: from now on, parameters must not change."""
        self._versions = [self._key(n) for n in range(len(self._leaves))]

    def _key(self, n: int) -> tuple[int, int]:
        """Return a key that changes if the backward would get other values."""
        if self._regather[n] is not None:  # sees what was assigned to ``data``, as a plain leaf does
            return version_of(self._leaves[n]), 0
        return version_key(self._leaves[n])

    def _pack(self, tensor: Tensor) -> Any:
        n = self._numbers.get(_memory(tensor))
        if n is None and self._outer is not None:
            return self._outer._pack(tensor)
        if n is None:
            return _SavedActivation(tensor.detach(), version_of(tensor))  # not itself: the graph would form a cycle
        local, spec = local_tensor(tensor), spec_of(tensor) if isinstance(tensor, DTensor) else None
        if self._regather[n] is None:
            return self, n, spec, local.detach()
        return self, n, spec, (local.size(), local.stride(), local.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedActivation):
            if version_of(packed.tensor) != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"one of shape {tuple(packed.tensor.shape)} that {self._name or 'the module'} computed with is at "
                    f"version {version_of(packed.tensor)} instead of {packed.version}."
                )
            return packed.tensor
        owner, n, spec, saved = packed
        if owner._versions and owner._key(n) != owner._versions[n]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {owner._name or 'the module'}, of shape {tuple(owner._leaves[n].shape)}. Change it "
                "before the forward or after the backward."
            )
        regather = owner._regather[n]
        memory = None if regather is None else local_tensor(regather())  # not under no_grad: then it would not copy
        with torch.no_grad():
            local: Tensor = saved if memory is None else memory.as_strided(*saved)
            return local if spec is None else new_dtensor(local, spec)


def uses_other_hooks() -> bool:
    """Return whether hooks for saved tensors of checkpointing, offloading or the user are in place."""
    hook = packing_hook()
    return hook is not None and _owner_of(hook) is None


def version_key(tensor: Tensor) -> tuple[int, int]:
    """Return a key that changes with a tensor's values, in place or by an assignment to ``data``. No communication.

    It changes on all ranks or on none; for an inference tensor, which has no version, always. It has no address: a rank
    without rows has none, and freed memory is reused.
    """
    local = local_tensor(tensor)
    if local.is_inference():
        return next(_keys), 0
    return version_of(local), tensor.__dict__.get(ASSIGNMENTS, 0)


_keys = count(-1, -1)


def _owner_of(hook: Any) -> SavedParameters | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SavedParameters) else None


def _memory(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return memory_id(local) if local.layout == torch.strided else 0
