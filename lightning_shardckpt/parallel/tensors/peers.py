"""The ranks that hold the shards of a tensor, and collectives among them that notice when the ranks disagree.

Ranks that run different code (a layer that only one of them uses, ``if rank == 0: print(weight.norm())``) enter
different collectives. Matched by their order, these would mix tensors in silence, or wait for each other. So ranks
announce, over a process group of its own, what they enter where it is not what they entered in the step before; and
what user code reads by hand, with the line of code that asks.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shardckpt.compat.torch_distributed import (
    Store,
    all_gather_single,
    default_store,
    group_of_name,
    own_view,
)
from lightning_shardckpt.distributed.heartbeat import raise_if_lost
from lightning_shardckpt.distributed.host_numbers import ends_within, host_group, new_gloo_group
from lightning_shardckpt.errors import RankError, UnsupportedCodeError

READ_TIMEOUT_S = 300.0
_FRAMEWORKS = (
    *("torch.", "lightning_shardckpt.compat."),
    *("lightning_shardckpt.parallel.tensors.", "lightning_shardckpt.parallel.sharding."),
)
_LOOK_S = 2.0  # a rank that has waited so long looks whether another one waits elsewhere
_TEXT_BYTES = 240
_known: dict[DeviceMesh, Peers] = {}


@dataclass(slots=True)
class Peers:
    """The ranks of one axis of a mesh. Groups are kept by name, so that nothing outlives their destruction.

    Attributes:
        group_name: of the group for what all ranks do alike: gathers for modules, reductions of gradients.
        reads_name: of the group for what user code asks for.
        timeout_s: how long a read waits for the other ranks.
    """

    group_name: str
    reads_name: str
    timeout_s: float = READ_TIMEOUT_S
    _entered: list[str] = field(default_factory=list)
    _entered_before: list[str] = field(default_factory=list)
    _reads_done: int = 0
    _notices: Store | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return group_of_name(self.group_name)

    @property
    def reads(self) -> dist.ProcessGroup:
        return group_of_name(self.reads_name)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    # --- what all ranks do alike ---

    def enter(self, purpose: str) -> None:
        """Compare over gloo what the ranks do next, unless it is what they did at this place of the step before.

        So a rank that does something else waits here, and those that go on find it, see `wait`.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks do different things.
        """
        place = len(self._entered)
        self._entered.append(purpose)
        if self._entered_before[place : place + 1] != [purpose]:
            self._announce(purpose, (), is_read=False)

    def end_step(self, *, is_alike: bool) -> None:
        """Begin the next step; ``is_alike`` says that the ranks have compared what they did in this one."""
        self._entered_before, self._entered = self._entered if is_alike else [], []

    def compare(self, done: str, *numbers: float) -> list[list[float]]:
        """Return the numbers of every rank, at most four, after comparing what they have done.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks did different things, or one reads a value.
        """
        return self._announce(done, numbers, is_read=False)

    def wait(self, work: dist.Work | None, purpose: str, device: torch.device) -> None:
        """Wait for a collective that all ranks enter; on a GPU its stream does, and this process goes on.

        Raises:
            UnsupportedCodeError: if a rank waits in an announcement that this one does not make, on both. Not on a GPU.
        """
        self._wait(work, purpose, device, number=None)

    # --- what user code asks for ---

    def share(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, each on all of them, for what the line of user code that runs asks for.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks ask for different things.
            RankError: if some rank does not ask within the timeout.
        """
        wide = len(values) > _INLINE
        found = self._announce(what, [float(len(values)), *(() if wide else values)])
        if not wide:
            return [numbers[1 : 1 + len(values)] for numbers in found]
        own = torch.tensor(values, dtype=torch.float64)
        return [part.tolist() for part in self.gather_read(own, what).view(self.size, -1)]

    def announce(self, what: str) -> None:
        """Say to the others what is read here, and hear what they read; raises as `share` does."""
        self._announce(what, ())

    def gather_read(self, flat: Tensor, what: str) -> Tensor:
        """The flat tensors of all ranks after each other, after an `announce`. Collective."""
        group = self.reads if flat.device.type == "cpu" else self.group
        found = flat.new_empty(self.size * flat.numel())
        work = all_gather_single(found, flat.contiguous(), group=group, async_op=True)
        self._wait(work, what, flat.device, number=self._reads_done)
        return found

    def broadcast_read(self, flat: Tensor, what: str) -> None:
        """Give every rank the first one's tensor, in host memory, after an `announce`. Collective."""
        work = dist.broadcast(flat, group=self.reads, group_src=0, async_op=True)
        self._wait(work, what, flat.device, number=self._reads_done)

    def _announce(self, what: str, numbers: Sequence[float], *, is_read: bool = True) -> list[list[float]]:
        self._reads_done += 1
        line = f" ({calling_line()})" if is_read else ""
        marks = [float(self._reads_done), float(zlib.crc32(line.encode())), float(zlib.crc32(what.encode()))]
        own = torch.zeros(len(marks) + 1 + _INLINE, dtype=torch.float64)
        own[: len(marks) + len(numbers)] = torch.tensor([*marks, *numbers], dtype=torch.float64)
        found = own.new_empty(self.size * own.numel())
        work = all_gather_single(found, own, group=self.reads, async_op=True)
        self._wait(work, f"{what}{line}", own.device, number=self._reads_done, is_read=is_read)
        every = found.view(self.size, -1).tolist()
        if any(one[: len(marks)] != every[0][: len(marks)] for one in every):
            self._refuse(f"{what}{line}", is_read=is_read)
        return [one[len(marks) :] for one in every]

    def _refuse(self, what: str, *, is_read: bool) -> None:
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        text = what.encode()[:_TEXT_BYTES]
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = own.new_empty(self.size * _TEXT_BYTES)
        all_gather_single(found, own, group=self.reads)
        said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in found.view(self.size, -1)]
        each = "; ".join(f"rank {rank}: {one}" for rank, one in zip(self.ranks, said, strict=True))
        problem = "the ranks ask for values of different sharded tensors at a time" if is_read else _OTHER_MODULES
        raise UnsupportedCodeError(f"{problem}: {each}. {_ADVICE if is_read else _SAME_MODULES}")

    def _wait(
        self, work: dist.Work | None, what: str, device: torch.device, *, number: int | None, is_read: bool = True
    ) -> None:
        """``number`` of the announcement or the read that this is; None for others. Reads alone have a timeout."""
        assert work is not None  # this rank is in the group
        if device.type != "cpu":  # NCCL aborts the communicator of a wait that times out: a late rank would end the run
            work.wait()
            return
        begun, suspect = time.monotonic(), None
        while not ends_within(work, _LOOK_S):
            raise_if_lost()
            if number is None:
                suspect = self._look_around(what, suspect)
                continue
            self._tell(what, number, is_read=is_read)
            if is_read and time.monotonic() - begun > self.timeout_s:
                raise RankError(
                    f"rank {dist.get_rank()} asks for {what}, but within {self.timeout_s:g} s not all of the ranks "
                    f"{self.ranks} did. {_ADVICE}"
                )

    def _tell(self, what: str, number: int, *, is_read: bool) -> None:
        """Tell ranks that wait elsewhere where this one waits; raise if one has found that it is another place."""
        store, conflict = self._store(), f"conflict/{number}"
        said, advice = ("asks for", _ADVICE) if is_read else ("has come to", _SAME_MODULES)
        store.set(f"waits/{number}/{self.rank}", f"rank {dist.get_rank()} {said} {what}\n{advice}")
        if store.check([conflict]):
            raise UnsupportedCodeError(store.get(conflict).decode())

    def _look_around(self, what: str, suspect: str | None) -> str | None:
        """Return the notice of a rank that waits in an announcement to which this rank, waiting elsewhere, never came.

        Raises:
            UnsupportedCodeError: if that is ``suspect``, found at the look before: not just what is about to end.
        """
        store, following = self._store(), self._reads_done + 1
        waiting = [f"waits/{following}/{rank}" for rank in range(self.size)]
        found = next((key for key in waiting if store.check([key])), None)
        if found is not None and found == suspect:
            said, advice = store.get(found).decode().split("\n")
            message = f"{said}, while rank {dist.get_rank()} waits for it in {what}. {advice}"
            store.set(f"conflict/{following}", message)
            raise UnsupportedCodeError(message)
        return found

    def _store(self) -> Store:
        if self._notices is None:
            self._notices = own_view(default_store(), f"shardckpt-reads-{self.reads_name}")
        return self._notices


_INLINE = 4  # numbers that travel with an announcement
_OTHER_MODULES = "the ranks gather parameters of different modules at a time"
_SAME_MODULES = (
    "All ranks that share parameters must run the same modules in the same order: control flow that depends on a rank, "
    "its batch or its random numbers (layers that are dropped at random) must decide alike on all of them."
)
_ADVICE = (
    "A value of a sharded tensor is computed by all ranks together, so all of them must ask for it, on the same line, "
    "not only rank zero: read it on every rank, and print or log it on one"
)


def build_peers(mesh: DeviceMesh, timeout_s: float = READ_TIMEOUT_S) -> None:
    """Make the groups for reads on every axis of ``mesh``, a mesh of the world.

    Collective: every rank of the world must call it.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    ranks = mesh.mesh
    for dim, name in enumerate(names):
        if ranks.shape[dim] == 1 or name == "pipeline":
            continue
        own = mesh[name]
        for row in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist():
            if dist.get_rank() in row:
                group = new_gloo_group(row, timeout_s=4 * timeout_s)
                _known[own] = Peers(own.get_group().group_name, group.group_name, timeout_s)


def peers_of(mesh: DeviceMesh) -> Peers:
    """Return the ranks of a mesh of one axis, the same object for the same mesh.

    Collective the first time, for a mesh that `build_peers` has not seen.
    """
    found = _known.get(mesh)
    if found is None:
        group = mesh.get_group()
        found = _known[mesh] = Peers(group.group_name, host_group(group).group_name)
    return found


def calling_line() -> str:
    """The line of code, outside of torch and of how it shards, that runs now; as ``file:number``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_FRAMEWORKS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
