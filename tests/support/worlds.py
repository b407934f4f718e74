"""Worlds of any size in one process: every rank plans and writes by itself, only without torch and processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Literal

import numpy

from lightning_shardckpt.format.index import ROOT_NAME, Component, FileInfo, RootIndex, TensorSpec, root_to_json
from lightning_shardckpt.format.layout import REPLICATED, Axis, Box, DimShard, Layout, Part, Shape, parts_of_rank
from lightning_shardckpt.format.plan import Piece, byte_runs, plan_load, plan_save
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, checksum
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.transfer.reader import Checkpoint, ReadSizes, Request, fetch
from lightning_shardckpt.transfer.writer import plan_files, write_component

SAVE_ID = "5afe" * 8
PATH = "/runs/step-3.ckpt"
_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

Array = numpy.ndarray
How = Literal["verified", "unverified"]


def mesh(*sizes: int, cuts: tuple[DimShard, ...] = (), order: tuple[int, ...] | None = None) -> Layout:
    """A row-major mesh."""
    axes = tuple(Axis(f"axis{i}", n, prod(sizes[i + 1 :])) for i, n in enumerate(sizes))
    return Layout(axes, cuts, order)


# Name -> layout of matrices, layout of everything else, ranks. Matrices are (out, in).
TOPOLOGIES: dict[str, tuple[Layout, Layout, int]] = {
    "single": (REPLICATED, REPLICATED, 1),
    "ddp3": (REPLICATED, REPLICATED, 3),
    **{f"fsdp{n}": (mesh(n, cuts=(DimShard(0, 0),)), mesh(n, cuts=(DimShard(0, 0),)), n) for n in (3, 8)},
    "tp2 columns": (mesh(2, cuts=(DimShard(0, 0),)), REPLICATED, 2),
    "tp3 rows": (mesh(3, cuts=(DimShard(0, 1),)), REPLICATED, 3),
    "hsdp2x2": (mesh(2, 2, cuts=(DimShard(1, 0),)), mesh(2, 2, cuts=(DimShard(1, 0),)), 4),
    "fsdp2xtp2": (mesh(2, 2, cuts=(DimShard(1, 0), DimShard(0, 0))), mesh(2, 2, cuts=(DimShard(0, 0),)), 4),
    "fsdp3xtp2 rows": (mesh(3, 2, cuts=(DimShard(0, 0), DimShard(1, 1))), mesh(3, 2, cuts=(DimShard(0, 0),)), 6),
    "hsdp2x2xtp2": (mesh(2, 2, 2, cuts=(DimShard(2, 0), DimShard(1, 0))), mesh(2, 2, 2, cuts=(DimShard(1, 0),)), 8),
    "packed tp2": (mesh(2, cuts=(DimShard(0, 0, 3),)), REPLICATED, 2),
    "permuted": (mesh(2, 2, cuts=(DimShard(1, 0), DimShard(0, 0)), order=(3, 1, 0, 2)), REPLICATED, 4),
}
MATRICES: dict[str, tuple[Shape, str]] = {
    "embed": ((257, 96), "F32"),  # large enough to be shared by its replicas
    "qkv": ((9, 7), "BF16"),
    "short": ((2, 5), "F64"),
    "conv": ((6, 3, 2), "C128"),
    "one": ((1, 1), "U8"),
}
OTHERS: dict[str, tuple[Shape, str]] = {
    "bias": ((7,), "F32"),
    "norm": ((3,), "F16"),
    "scalar": ((), "I64"),
    "empty": ((0, 4), "F32"),
    "long": ((40_000,), "F8_E4M3"),
}


def table(topology: str) -> dict[str, TensorSpec]:
    matrices, others, world = TOPOLOGIES[topology]
    found = {}
    for names, cut in ((MATRICES, matrices), (OTHERS, others)):
        for key, (shape, dtype) in names.items():
            fits = all(c.dim < len(shape) for c in cut.cuts)
            found[key] = TensorSpec(dtype, shape, cut if fits else REPLICATED, ((0, world),), key == "norm")
    return found


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def whole(key: str, spec: TensorSpec) -> Array:
    """The value of a tensor: the same bytes for the same name, size and dtype."""
    itemsize = DTYPE_BYTES[spec.dtype]
    return numpy.frombuffer(_bytes(key, prod(spec.shape) * itemsize), _TYPES[itemsize]).reshape(spec.shape)


@lru_cache(maxsize=64)
def _bytes(key: str, nbytes: int) -> bytes:
    return hashlib.shake_128(key.encode()).digest(nbytes)


def empty_local(parts: tuple[Part, ...], like: Array) -> Array:
    shape: Shape = tuple(map(max, zip(*(p.local.stop for p in parts), strict=True))) if parts else (0,) * like.ndim
    return numpy.zeros(shape if like.ndim else (), like.dtype)


def local(key: str, spec: TensorSpec, rank: int) -> Array:
    """What ``rank`` has of a tensor in its memory."""
    full, parts = whole(key, spec), parts_of_rank(spec.layout, spec.shape, rank)
    found = empty_local(parts, full)
    for part in parts:
        found[at(part.local)] = full[at(part.box)]
    return found


def content(array: Array) -> memoryview:
    """The row-major bytes of an array, its own memory if that is contiguous."""
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return memoryview(flat)


def save(
    storage: Storage,
    tables: Mapping[str, Mapping[str, TensorSpec]],
    world: int,
    *,
    path: str = PATH,
    size_per_shard: float = 1024,
    save_id: str = SAVE_ID,
    documents: Mapping[str, bytes] | None = None,
    **root: object,
) -> list[list[Piece]]:
    """Save a world's tensors at ``path``; the pieces that each rank wrote."""
    draft = storage.draft(path, save_id)
    draft.begin()
    components = {}
    written: list[list[Piece]] = [[] for _ in range(world)]
    for name, tensors in tables.items():
        indexes: dict[int, FileInfo] = {}
        for rank in range(world):
            pieces = plan_save(tensors, rank)
            written[rank] += pieces

            def stage(piece: Piece, rank: int = rank) -> memoryview:
                return content(local(piece.key, piece.spec, rank)[at(piece.part.local)])

            files = plan_files(name, rank, pieces, size_per_shard)
            if files:
                indexes[rank] = write_component(draft, name, rank, save_id, files, stage)
        components[name] = Component(dict(tensors), {}, indexes)
    infos = {}
    for name, text in (documents or {}).items():
        draft.write(name, [text])
        infos[name] = FileInfo(name, len(text), checksum(text))
    draft.write(ROOT_NAME, [root_to_json(RootIndex(save_id, world, components, infos, **root))])  # type: ignore[arg-type]
    draft.publish()
    return written


def requests(checkpoint: Checkpoint, key: str, wanted: tuple[Part, ...], target: Array) -> list[Request]:
    spec = checkpoint.root.components["model"].tensors[key]
    found = []
    for overlap in plan_load(spec, checkpoint.replicas("model")[key], wanted):
        entry = checkpoint.entry("model", key, overlap)
        checkpoint.check_file("model", overlap.writer, entry.file)
        runs = byte_runs(overlap, target.shape, DTYPE_BYTES[spec.dtype])
        found.append(Request(key, overlap.writer, entry, runs, content(target)))
    return found


def load(
    checkpoint: Checkpoint,
    key: str,
    layout: Layout,
    rank: int,
    how: How = "verified",
    sizes: ReadSizes | None = None,
) -> Array:
    """What ``rank`` of another world reads of a model's tensor into its memory."""
    spec = checkpoint.root.components["model"].tensors[key]
    parts = parts_of_rank(layout, spec.shape, rank)
    found = empty_local(parts, numpy.zeros((1,) * len(spec.shape), _TYPES[DTYPE_BYTES[spec.dtype]]))
    wanted = requests(checkpoint, key, parts, found)
    fetch(checkpoint.path, checkpoint.reader, wanted, verify=how == "verified", sizes=sizes)
    return found
