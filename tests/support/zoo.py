"""Checkpoints of every kind of tensor and cut, for the tools' tests; the oracle is the tensors before the save."""

from __future__ import annotations

import collections
import datetime
import pathlib
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.distributed.ranks import Ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint16)
CUTS: dict[str, list[Any]] = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "twice": [_StridedShard(0, split_factor=2), Shard(0)],
    "swapped": [Shard(1), Shard(0)],
    "last": [Replicate(), Shard(2)],
}
TRAINER_STATE: dict[str, Any] = {
    "epoch": 3,
    "global_step": 7,
    "pytorch-lightning_version": "2.6.6",
    "loops": {"fit_loop": {"state_dict": {}, "done": (1, 2)}},
    "callbacks": {"Best{'mode': 'min'}": {"best": float("inf"), "big": 1 << 70, "seen": {1, 2}, 5: None}},
    "lr_schedulers": [{"milestones": collections.Counter([3, 3, 5]), "_last_lr": [0.5]}],
}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    found = raw.flatten().view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    if dtype in (torch.bfloat16, torch.float32, torch.float64):  # none that a conversion makes zero on some CPUs
        found[(found.double().abs() < torch.finfo(torch.float32).tiny) & (found != 0)] = 1.5
    return found


def whole_tensors() -> dict[str, Tensor]:
    """Name -> tensor; the part before the dot names the cut."""
    found = {}
    for cut in CUTS:
        shape = (13, 7, 5) if cut == "last" else (13, 7)
        for dtype in DTYPES:
            found[f"{cut}.{str(dtype).removeprefix('torch.')}"] = drawn(shape, dtype, len(found))
    found["rows.few"] = drawn((1, 5), torch.float32, 100)
    found["columns.large"] = drawn((600, 130), torch.float32, 101)
    found["both.large"] = drawn((601, 131), torch.float32, 102)
    found["twice.large"] = drawn((601, 64), torch.bfloat16, 103)
    found["plain.scalar"] = drawn((), torch.float64, 104)
    found["plain.empty"] = torch.empty((0, 3), dtype=torch.bfloat16)
    found["plain.fp8"] = drawn((5, 3), torch.float8_e4m3fn, 105)
    found["plain.large"] = drawn((300, 300), torch.int16, 106)
    found["rows.empty"] = torch.empty((0, 4))
    return found


def save(path: str, state: dict[str, Any] | None = None, size_per_shard: float = 0.1) -> None:
    """On 4 ranks as 2 × 2, or alone with whole tensors. An optimizer has the same tensors as its state."""
    ranks = Ranks.of_group(timeout_s=60)
    tensors = whole_tensors()
    if ranks.world > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        tensors = {k: _placed(t, mesh, CUTS.get(k.partition(".")[0])) for k, t in tensors.items()}
    io = ShardCkptIO(size_per_shard=size_per_shard)
    io.attach(ranks, _tied(tensors["rows.float64"]), {"shard": 2, "tensor": 2} if ranks.world > 1 else {})
    model = {**tensors, "tied.float64": tensors["rows.float64"]}
    moments = {k: {"exp_avg": t, "step": torch.tensor(7.0)} for k, t in tensors.items() if k.endswith("large")}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": list(moments)}]}
    average = {"callbacks": {**TRAINER_STATE["callbacks"], "EMA": {"rows.large": tensors["both.large"]}}}
    io.save_checkpoint(
        {**TRAINER_STATE, **average, "state_dict": model, "optimizer_states": [optimizer], **(state or {})}, path
    )


def enumerations() -> dict[str, Tensor]:
    """Name -> which elements of each tensor this rank of 4 has, as positions in the whole tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    found = {}
    for name, tensor in whole_tensors().items():
        positions = torch.arange(tensor.numel()).reshape(tensor.shape)
        placed = _placed(positions, mesh, CUTS.get(name.partition(".")[0]))
        found[name] = placed.to_local() if isinstance(placed, DTensor) else placed
    return found


def _tied(tensor: Tensor) -> torch.nn.Module:
    """A module that has the tensor under two names."""
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    return torch.nn.ModuleDict({n: torch.nn.ParameterDict({"float64": parameter}) for n in ("rows", "tied")})


def _placed(tensor: Tensor, mesh: Any, placements: list[Any] | None) -> Tensor:
    if placements is None:
        return tensor
    if any(isinstance(p, _StridedShard) for p in placements):  # as fully_shard over tensor parallelism makes it
        inner = distribute_tensor(tensor, mesh["tensor"], [Shard(0)], src_data_rank=None).to_local()
        local = inner.chunk(2)[mesh.get_local_rank("shard")]
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, **whole)
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def save_large(path: str, rows: int) -> None:
    """Two matrices of ``rows`` × 4 KiB, one cut into rows and one into columns, in shards of 64 MB."""
    ranks = Ranks.of_group(timeout_s=60)
    mesh = init_device_mesh("cpu", (ranks.world,))
    base = torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024)
    state = {f"dim{d}": distribute_tensor(base, mesh, [Shard(d)], src_data_rank=None) for d in (0, 1)}
    io = ShardCkptIO(size_per_shard=64)
    io.attach(ranks, torch.nn.Module(), {})
    io.save_checkpoint({"state_dict": state, "global_step": 0, "epoch": 0}, path)


def odd_values() -> dict[str, Any]:
    """Hyper-parameters that the default ``torch.load`` refuses, as Lightning would hand them over."""
    return {
        "hyper_parameters": {
            "width": 3,
            "folder": pathlib.PurePosixPath("/data/x"),
            "when": datetime.date(2024, 1, 2),
            "frozen": frozenset({1, 2}),
            "queue": collections.deque([1, 2]),
            "span": range(3),
            "scale": numpy.float32(0.5),
            "array": numpy.arange(3),
            "made_by": lambda x: x,
            "dtype": torch.bfloat16,
        }
    }
