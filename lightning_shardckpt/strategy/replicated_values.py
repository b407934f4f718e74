"""Parameters that are not sharded, and buffers: every data-parallel rank must have the same.

A number of a rank's own batch (a learning rate, a running mean) makes them drift apart without an error, and a
checkpoint has those of one rank. So a few of them are compared, in turn, where the ranks meet anyway. Statistics of
norms are those of the first rank, see ``parallel.sharding.batch_norm``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_modules import (
    NormWithStatistics,
    buffer_slots,
    non_persistent_buffers,
    parameter_slots,
)
from lightning_shardckpt.distributed.host_numbers import Copied, gathered
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.system.tensor_digest import bit_digest
from lightning_shardckpt.system.tuning import TUNING, Tuning

Slots = Mapping[str, Tensor | None]

_LOOK_AGAIN = 100  # digests until values are listed anew: for a thousand modules it takes milliseconds


@dataclass(frozen=True, slots=True)
class Look:
    """What was looked at together.

    Attributes:
        tensors: by their FQNs.
        digest: of all of them, a number that differs where one of them does, but for chance; on its way to the host.
    """

    tensors: list[tuple[str, Tensor]]
    digest: Copied


@dataclass(slots=True)
class ReplicatedValues:
    """The plain values of some modules, of which the next few are looked at.

    Every rank must look at the same ones, so all of them must call the same methods.
    """

    roots: list[nn.Module] = field(default_factory=list)
    tuning: Tuning = TUNING
    _slots: list[tuple[str, Slots, str]] = field(default_factory=list)
    _next: int = 0
    _digests: int = 0  # since it was looked for what there is

    def add(self, root: nn.Module) -> None:
        """Look at the values of this module, too."""
        self.roots.append(root)
        self.begin()

    def begin(self) -> None:
        """Look for what the modules have now; call when an epoch begins."""
        self._slots, self._next = [slot for root in self.roots for slot in _slots_of(root)], 0
        self._digests = 0

    def look(self, device: torch.device) -> Look:
        """Return the next values and their digest, which is computed on ``device``; the host does not wait for it."""
        self._digests += 1
        if self._digests > _LOOK_AGAIN:  # a script has no epochs, and its modules may get new buffers
            at = self._next
            self.begin()
            self._next = at % max(len(self._slots), 1)
        tensors = list(self._following())
        return Look(tensors, Copied(_digest([tensor for _, tensor in tensors], device)))

    def _following(self) -> Iterator[tuple[str, Tensor]]:
        size = 0
        for _ in range(min(len(self._slots), self.tuning.compared_tensors)):
            fqn, slots, name = self._slots[self._next]
            value = slots.get(name)
            self._next = (self._next + 1) % len(self._slots)
            if _is_plain(value) and value.layout == torch.strided and value.numel():
                yield fqn, value
                size += value.nbytes
                if size >= self.tuning.compared_bytes:
                    return


def refuse(look: Look, group: dist.ProcessGroup) -> None:
    """Raise, naming what differs of what was looked at, in this or another data-parallel group.

    Collective: every rank of the world must call it, with its data-parallel group.

    Raises:
        UnsupportedCodeError: on every rank.
    """
    own = torch.tensor([int(_digest([tensor], tensor.device)) for _, tensor in look.tensors])
    differs = (gathered(own, group) != own).any(0).tolist()
    wrong = [name for (name, _), bad in zip(look.tensors, differs, strict=True) if bad]
    names = wrong or [f"one of {', '.join(name for name, _ in look.tensors)}, on other ranks,"]
    raise UnsupportedCodeError(
        f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} differs between the data-parallel ranks, which "
        "each compute it from their own batches: the model is not that of one process, and a checkpoint would have "
        "one rank's. Reduce what is computed from a batch (self.all_gather(x).mean(0), "
        "self.trainer.strategy.reduce(x)) before it is used; for a buffer that may be a rank's own, "
        "register_buffer(…, persistent=False)."
    )


def _slots_of(root: nn.Module) -> Iterator[tuple[str, Slots, str]]:
    """Each value by its FQN, the dict in which its module has it, and its name there: it may be assigned anew."""
    for prefix, module in root.named_modules():
        kept: list[tuple[Slots, Collection[str]]] = [(parameter_slots(module), parameter_slots(module))]
        if not isinstance(module, NormWithStatistics):
            kept.append((buffer_slots(module), buffer_slots(module).keys() - non_persistent_buffers(module)))
        for slots, names in kept:
            for name in sorted(names):
                if _is_plain(slots[name]):
                    yield f"{prefix}.{name}" if prefix else name, slots, name


def _is_plain(value: Tensor | None) -> TypeGuard[Tensor]:
    return type(value) in (Tensor, nn.Parameter)


@torch.no_grad()
def _digest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """A digest of the bits of tensors in their order, positive."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        total = total * 31 + bit_digest(tensor).to(device)
    return total & ((1 << 61) - 1)
