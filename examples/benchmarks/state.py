"""The state that is saved: a sharded model with its optimizer, every value of which follows from its name and place.

So any rank of any topology can tell alone whether a load brought back what was saved.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import AdamW, Optimizer
from turns import device

LAYERS = 16
_BYTES = 12  # of a parameter: itself and AdamW's two moments, in float32
_EXACT = 0xFFFFFF  # integers up to this one are exact in float32


class Layer(nn.Module):
    """The parameters of a layer of Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = round(8 * width / 3 / 16) * 16
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)


class Llama(nn.Module):
    """147 parameters with ``gb`` GB of values and AdamW state."""

    def __init__(self, gb: float) -> None:
        super().__init__()
        wanted = gb * 1e9 / _BYTES
        width = max(int((wanted / (LAYERS * 12 + 16)) ** 0.5) // 16 * 16, 16)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(width)
        rest = (wanted - sum(p.numel() for p in self.parameters())) / 2 / width
        words = max(int(rest) // 16 * 16, 16)
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)


class State:
    """A live model and optimizer on one rank, and what ways keep beside them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.kept: dict[str, Any] = {}
        """What a way makes once: a CheckpointIO, a stager."""
        self.fill()

    def tensors(self) -> dict[str, DTensor]:
        """Live parameters and moments; the optimizer's change when a load replaces them."""
        found: dict[str, Any] = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters() if self.optimizer is not None else ():
            for key, value in self.optimizer.state[parameter].items():
                if value.ndim:
                    found[f"optimizer.{name}.{key}"] = value
        return found

    def flat(self) -> dict[str, Tensor]:
        """The tensors with AdamW's step counters: what the peers are given, made for them outside of their time."""
        steps: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters() if self.optimizer is not None else ():
            steps[f"optimizer.{name}.step"] = self.optimizer.state[parameter]["step"]
        return {**self.tensors(), **steps}

    def locals(self) -> dict[str, Tensor]:
        """This rank's shards."""
        return {name: tensor.to_local() for name, tensor in self.tensors().items()}

    def pull(self) -> list[Tensor]:
        """Return this rank's shards in CPU memory: themselves, or, of a GPU, copies in memory that is kept."""
        tensors = [*self.locals().values()]
        if tensors[0].is_cpu:
            return tensors
        if "host" not in self.kept:
            self.kept["host"] = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for to, tensor in zip(self.kept["host"], tensors, strict=True):
            to.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        return self.kept["host"]  # type: ignore[no-any-return]

    def push(self, tensors: list[Tensor]) -> None:
        """Give the first of the shards what is in CPU memory, as `pull` returned it."""
        for tensor, host in zip(self.locals().values(), tensors, strict=False):
            if tensor is not host and not tensor.is_cpu:
                tensor.copy_(host, non_blocking=True)
        if device().type == "cuda":
            torch.cuda.synchronize()

    @property
    def nbytes(self) -> int:
        """Of this rank's shards."""
        return sum(tensor.nbytes for tensor in self.locals().values())

    def empty_moments(self) -> dict[Any, Any]:
        """As the optimizer's state is before a resumed run loads it; returns what it was."""
        assert self.optimizer is not None
        was = dict(self.optimizer.state)
        self.optimizer.state.clear()
        return was

    def fill(self) -> None:
        """Give every element its value, also after a load that failed."""
        if self.optimizer is not None and not self.optimizer.state:
            _one_step(self.optimizer)
        for name, tensor in self.tensors().items():
            tensor.to_local().copy_(_values(name, tensor))

    def spoil(self) -> None:
        """Overwrite every element."""
        for tensor in self.locals().values():
            tensor.fill_(-1)

    def check(self) -> None:
        """Raises ValueError if an element has another value than ``fill`` gave it."""
        wrong = [name for name, t in self.tensors().items() if not torch.equal(t.to_local().cpu(), _values(name, t))]
        if wrong:
            raise ValueError(f"{len(wrong)} tensors do not come back as they were saved, such as {wrong[0]}")

    @cached_property
    def arena(self) -> mmap.mmap:
        """A copy of this rank's shards, one after the other, in memory that is page-aligned and was used before."""
        memory = mmap.mmap(-1, -(-self.nbytes // 4096) * 4096)
        memory.madvise(mmap.MADV_HUGEPAGE)
        at = 0
        for tensor in self.pull():
            memory[at : at + tensor.nbytes] = view(tensor)
            at += tensor.nbytes
        return memory


def view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.detach().numpy().reshape(-1).view("uint8"))


def _values(name: str, tensor: DTensor) -> Tensor:
    local, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows, columns = (1, local[0]) if len(local) == 1 else local
    row, column = (0, start[0]) if len(start) == 1 else start
    at = torch.arange(row, row + rows, dtype=torch.int32)[:, None] * tensor.shape[-1]
    at = at + torch.arange(column, column + columns, dtype=torch.int32) + (zlib.crc32(name.encode()) & _EXACT)
    return at.bitwise_and_(_EXACT).to(torch.float32).view(local)


def _one_step(optimizer: Optimizer | None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def llama(gb: float, dim: int = 0) -> State:
    """``gb`` GB in all, cut by FSDP2 along ``dim``, after one step of AdamW."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = Llama(gb)
    cut = {"mesh": mesh, "shard_placement_fn": lambda p: Shard(dim if p.ndim > dim else 0)}
    for layer in model.layers:
        fully_shard(layer, **cut)
    fully_shard(model, **cut)
    model.to_empty(device=device())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    _one_step(optimizer)
    return State(model, optimizer)


def small(count: int) -> State:
    """``count`` parameters of 4 KB."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = nn.Module()
    for number in range(count):
        local = torch.zeros(32 // dist.get_world_size(), 32, device=device())
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        model.register_parameter(f"w{number:06}", nn.Parameter(whole))
    return State(model, None)


def expected(name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor of a name, for who has no process group."""
    at = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int32) + (zlib.crc32(name.encode()) & _EXACT)
    return at.bitwise_and_(_EXACT).to(torch.float32).view(shape)


def wrong_in(found: Mapping[str, Tensor], names: int) -> str:
    """What is wrong with whole tensors by name, of which there must be so many; empty if nothing is."""
    wrong = [name for name, tensor in found.items() if not torch.equal(tensor, expected(name, tuple(tensor.shape)))]
    return f"{len(wrong)} wrong tensors" if wrong else "" if len(found) == names else f"{len(found)} of {names} tensors"
