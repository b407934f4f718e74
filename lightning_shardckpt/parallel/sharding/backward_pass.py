"""Backward passes through parameters of ``fully_shard``: gradients, hooks, and a comparison of the ranks."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class BackwardPass:
    """What a running backward has found, by the ids of sharded parameters."""

    used: set[int] = field(default_factory=set)  # those of which this rank has a gradient
    filled: dict[int, bool] = field(default_factory=dict)  # those that got zeros; whether they had a gradient before
    rows: dict[int, Tensor] = field(default_factory=dict)  # the reduced gradients of uses outside of units
    aside: list[tuple[ShardedTensor, Tensor | None, dict[int, Any] | None]] = field(default_factory=list)
    """Parameters with hooks, their earlier gradients, and their hooks that torch must not call."""


class Passes:
    """The forwards and backwards of all units, which the ranks compare after each backward.

    A hook of a parameter must get the reduced gradient of all batches, once; torch would call it for each of several
    reductions, or never. So the earlier gradient and the hooks of such a parameter are set aside until the end.

    Attributes:
        peers: the ranks of each axis that parameters are sharded or replicated over, the shard axis first.
        units: each sharded parameter and the name of its unit, by id, in the same order on all ranks.
        on_end: functions that are called at the end of a backward, with whether it raised an error.
    """

    def __init__(self, peers: Sequence[Peers]) -> None:
        self.peers, self.on_end = peers, list[Callable[[bool], None]]()
        self.units = dict[int, tuple[ShardedTensor, str]]()
        self._backward: BackwardPass | None = None
        self._trail_hash, self._last_entry = 0, ""

    def record(self, entry: str) -> None:
        """Record a forward or backward of a unit."""
        self._trail_hash, self._last_entry = zlib.crc32(entry.encode(), self._trail_hash), entry

    def begin_backward(self) -> BackwardPass:
        """Return the running backward; the first call in a backward begins it."""
        if self._backward is None:
            self._backward = BackwardPass()
            for leaf in with_hooks(leaf for leaf, _ in self.units.values()):
                self._backward.aside.append((leaf, leaf.grad, hooks := accumulation_hooks(leaf)))
                leaf.grad = None
                if hooks:
                    set_accumulation_hooks(leaf, OrderedDict())
            after_backward(lambda: after_backward(self._end_backward))  # torch may queue its own end later
        return self._backward

    def add_rows(self, leaf: ShardedTensor, reduced: DTensor | None) -> None:
        """Take the reduced gradient of a use outside of units; None if no rank has one. Called in a backward."""
        backward = self.begin_backward()
        if reduced is not None:
            rows, before = rows_of(reduced), backward.rows.get(id(leaf))
            backward.rows[id(leaf)] = rows if before is None else before.add_(rows)
            backward.used.add(id(leaf))

    def _end_backward(self) -> None:
        """Compare the units that the ranks ran, remove gradients that no rank has computed, and call hooks.

        Collective: every rank of the mesh must call it, after every backward.
        """
        backward = self.begin_backward()
        for end in self.on_end:
            end(False)
        aside = {id(leaf) for leaf, _, _ in backward.aside}
        for leaf in with_hooks(
            leaf for leaf, _ in self.units.values()
        ):  # a new one, which torch has called for a part of the gradient or not at all
            if id(leaf) not in aside or accumulation_hooks(leaf):
                refuse(self.units[id(leaf)][1], "has a parameter that got a hook in a backward")
        unused = {number for number, had in backward.filled.items() if not had and number not in backward.used}
        if self.compare(len(unused), self.peers):
            used = torch.tensor([number not in unused for number in self.units], dtype=torch.uint8)
            for peers in self.peers:
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=peers.reads)
            for (leaf, _), is_used in zip(self.units.values(), used.tolist(), strict=True):
                if not is_used:
                    leaf.grad = None
        hooked, self._backward = self._restore(backward), None
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
            for leaf, before in self._restore(backward):
                _add_gradient(leaf, before)

    def _restore(self, backward: BackwardPass) -> list[tuple[ShardedTensor, Tensor | None]]:
        """Complete the gradients of parameters without hooks, and restore the hooks of others.

        Returns:
            The parameters with hooks that have got a gradient, and the earlier gradients, which are not added yet.
        """
        for number, rows in backward.rows.items():
            leaf = self.units[number][0]
            _add_gradient(leaf, new_like(leaf, rows))
        hooked = []
        for leaf, before, hooks in reversed(backward.aside):
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
