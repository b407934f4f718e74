"""Backward passes through parameters of ``fully_shard``: gradients, hooks, and a comparison of the ranks."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, rows_of
from lightning_shardckpt.compat.torch_autograd import after_backward, in_backward
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    set_accumulation_hooks,
    with_hooks,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placement import Peers
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor, new_like
from lightning_shardckpt.parallel.tensors.values import REMEDY


class Passes:
    """The forwards and backwards of all units, which the ranks compare after each backward.

    Args:
        peers: the ranks of each axis that parameters are sharded or replicated over, the shard axis first.

    Attributes:
        peers: as given.
        on_end: functions that are called at the end of a backward, with whether it raised an error.
    """

    def __init__(self, peers: Sequence[Peers]) -> None:
        self.peers, self.on_end = peers, list[Callable[[bool], None]]()
        self._leaves, self._units = list[ShardedTensor](), dict[int, str]()
        self._backward: BackwardPass | None = None
        self._trail_hash, self._last_entry = 0, ""

    def add(self, leaf: ShardedTensor, unit: str) -> None:
        """Add a parameter, in the same order on all ranks."""
        self._leaves.append(leaf)
        self._units[id(leaf)] = unit

    def record(self, entry: str) -> None:
        """Record a forward or backward of a unit."""
        self._trail_hash, self._last_entry = zlib.crc32(entry.encode(), self._trail_hash), entry

    def begin_backward(self) -> BackwardPass:
        """Return the running backward; the first call in a backward begins it."""
        if self._backward is None:
            self._backward = BackwardPass(self._leaves, self._units)
            after_backward(lambda: after_backward(self._end_backward))  # torch may queue its own end later
        return self._backward

    def _end_backward(self) -> None:
        """Compare the units that the ranks ran, remove gradients that no rank has computed, and call hooks.

        Collective: every rank of the mesh must call it, after every backward.
        """
        backward = self._backward
        assert backward is not None
        for end in self.on_end:
            end(False)
        backward.refuse_late_hooks()
        if self.compare(len(backward.unused), self.peers):
            backward.remove_unused(self.peers)
        hooked, self._backward = backward.restore(), None
        _call_hooks(hooked)

    def compare(self, unused: float, axes: Sequence[Peers]) -> float:
        """Compare the recorded units of the ranks of ``axes``; return the maximum of ``unused``. Collective."""
        done, before = self._last_entry, self._trail_hash
        self._trail_hash, self._last_entry = 0, ""
        for peers in axes:
            unused = max(numbers[0] for numbers in peers.compare(done, float(unused), before=before))
        self.peers[0].end_step(is_alike=True)
        return unused

    def recover(self) -> None:
        """Discard the state of a backward that raised an error."""
        if self._backward is not None and not in_backward():
            backward, self._backward = self._backward, None
            self._trail_hash, self._last_entry = 0, ""
            self.peers[0].end_step(is_alike=False)
            for end in self.on_end:
                end(True)
            for leaf, before in backward.restore():
                _add_gradient(leaf, before)


class BackwardPass:
    """One backward through parameters that ``fully_shard`` gathers.

    A hook of a parameter must get the reduced gradient of all batches, once; torch would call it for each of several
    reductions, or never. So the earlier gradient and the hooks of such a parameter are set aside until the end.

    Args:
        leaves: the sharded parameters, in the same order on all ranks.
        units: the name of the unit of each, by the id of the parameter.
    """

    def __init__(self, leaves: Sequence[ShardedTensor], units: Mapping[int, str]) -> None:
        self._leaves, self._units = leaves, units
        self._used, self._filled = set[int](), dict[int, bool]()  # filled: whether there was a gradient before
        self._direct = dict[int, tuple[ShardedTensor, Tensor]]()
        self._aside = list[tuple[ShardedTensor, Tensor | None, dict[int, Any] | None]]()
        for leaf in with_hooks(leaves):
            self._aside.append((leaf, leaf.grad, hooks := accumulation_hooks(leaf)))
            leaf.grad = None
            if hooks:
                set_accumulation_hooks(leaf, OrderedDict())

    def use(self, leaf: ShardedTensor) -> None:
        """Record that this rank has a gradient of a parameter."""
        self._used.add(id(leaf))

    def fill(self, leaf: ShardedTensor) -> None:
        """Record that zeros stand for a gradient that this rank does not have."""
        if id(leaf) not in self._filled:
            self._filled[id(leaf)] = leaf.grad is not None

    def add_rows(self, leaf: ShardedTensor, reduced: DTensor) -> None:
        """Take the reduced gradient of a use outside of units, which all ranks have."""
        rows, (_, before) = rows_of(reduced), self._direct.get(id(leaf), (leaf, None))
        self._direct[id(leaf)] = leaf, rows if before is None else before.add_(rows)
        self.use(leaf)

    def refuse_late_hooks(self) -> None:
        """Raise if a parameter got a hook in the backward, which torch has called for a part of the gradient or not."""
        aside = {id(leaf) for leaf, _, _ in self._aside}
        for leaf in with_hooks(self._leaves):
            if id(leaf) not in aside or accumulation_hooks(leaf):
                refuse(self._units[id(leaf)], "has a parameter that got a hook in a backward")

    @property
    def unused(self) -> set[int]:
        """The ids of parameters whose gradients are nothing but zeros that this rank has filled in."""
        return {number for number, had in self._filled.items() if not had and number not in self._used}

    def remove_unused(self, axes: Sequence[Peers]) -> None:
        """Remove the gradients that no rank has computed. Collective: every rank of the axes must call it."""
        unused = self.unused
        used = torch.tensor([id(leaf) not in unused for leaf in self._leaves], dtype=torch.uint8)
        for peers in axes:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=peers.reads)
        for leaf, is_used in zip(self._leaves, used.tolist(), strict=True):
            if not is_used:
                leaf.grad = None

    def restore(self) -> list[tuple[ShardedTensor, Tensor | None]]:
        """Complete the gradients of parameters without hooks, and restore the hooks of others.

        Returns:
            The parameters with hooks that have got a gradient, and the earlier gradients, which are not added yet.
        """
        for leaf, rows in self._direct.values():
            _add_gradient(leaf, new_like(leaf, rows))
        hooked = []
        for leaf, before, hooks in reversed(self._aside):
            if hooks:
                set_accumulation_hooks(leaf, hooks)
            if leaf.grad is None:
                leaf.grad = before
            else:
                hooked.append((leaf, before))
        return hooked


@torch.no_grad()
def _call_hooks(hooked: Sequence[tuple[ShardedTensor, Tensor | None]]) -> None:
    """Call the hooks of parameters with the gradients that a backward has reduced, and add these to earlier ones."""
    for leaf, before in hooked:
        gradient: Any = leaf.grad
        for hook in list((gradient_hooks(leaf) or {}).values()):
            new = hook(gradient)
            gradient = gradient if new is None else new
        leaf.grad = before
        _add_gradient(leaf, gradient)
    for leaf, _ in hooked:
        for hook in list((accumulation_hooks(leaf) or {}).values()):
            hook(leaf)


def refuse(unit: str, what: str) -> NoReturn:
    """Raise for a unit, by its name; the root has none."""
    where = f"the module {unit}" if unit else "the module"
    raise UnsupportedCodeError(f"{where} {what}, which fully_shard cannot follow. {REMEDY}")


def _add_gradient(leaf: ShardedTensor, gradient: Tensor | None) -> None:
    """Add a gradient to the one that a leaf has, whose memory it keeps."""
    if leaf.grad is None:
        leaf.grad = gradient
    elif gradient is not None:
        with torch.no_grad():
            local_tensor(leaf.grad).add_(local_tensor(gradient))
