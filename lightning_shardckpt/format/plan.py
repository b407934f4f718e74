"""Plans of saves and loads: the rank that writes each box, and the boxes that a loader reads; without communication.

The choice of the writer is part of the format (FORMAT.md, "Writers"): a loader repeats it to find the index to open.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import sub
from typing import NamedTuple

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, Component, TensorSpec
from lightning_shardckpt.format.layout import Box, Part, find_unheld_shards, parts_of_shard, replicas, shards_meeting
from lightning_shardckpt.format.value_checks import DIGITS, DTYPE_BYTES, checksum, shown

SPLIT_BYTES = 16 * 1024
"""A shard is divided among its replicas if each gets at least this much; one replica writes a smaller shard."""

Tensors = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that one rank writes, and its position in the writer's local tensor."""

    key: str
    spec: TensorSpec
    part: Part
    writer: int

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return self.part.box.numel * DTYPE_BYTES[self.spec.dtype]


class _Sharing(NamedTuple):
    """The replicas of the lowest holder's shard, the bytes / the number of shards, and the dim that replicas share."""

    replica_count: int
    nbytes: int
    dim: int | None = None


@lru_cache(maxsize=16384)
def _sharing(spec: TensorSpec) -> _Sharing:
    count = len(replicas(spec.layout, spec.holders, spec.layout.shard(spec.holders[0][0])))
    nbytes = prod(spec.shape) * DTYPE_BYTES[spec.dtype] // prod(spec.layout.shards)
    if spec.pinned or count == 1 or nbytes < count * SPLIT_BYTES:
        return _Sharing(count, nbytes)
    lengths = list(spec.shape)
    for cut, size in zip(spec.layout.cuts, spec.layout.shards, strict=True):
        block = -(-lengths[cut.dim] // cut.blocks)
        lengths[cut.dim] = -(-block // size)
    dims = (dim for dim, n in enumerate(lengths) if n and -(-n // count) * count * 8 <= n * 9)  # 1/8 above the mean
    return _Sharing(count, nbytes, next(dims, None))


def choose_replicas(tensors: Tensors) -> dict[str, int | None]:
    """Return for each tensor the number of the replica that writes each shard, or None if all replicas share the work.

    Tensors of one layout that are not shared are assigned, the largest first, to the replica with the fewest bytes so
    far.
    """
    loads: dict[tuple[object, object], list[tuple[int, int]]] = {}  # by layout and holders
    specs = {id(spec): spec for spec in tensors.values()}  # equal tensors share one spec object
    sharing = {spec_id: _sharing(spec) for spec_id, spec in specs.items()}
    replica_of = {key: 0 if sharing[id(spec)].dim is None else None for key, spec in tensors.items()}
    to_assign = [
        (-sharing[id(spec)].nbytes, key)
        for key, spec in tensors.items()
        if replica_of[key] is not None and not spec.pinned and sharing[id(spec)].replica_count > 1
    ]
    for minus_nbytes, key in sorted(to_assign):
        spec = tensors[key]
        heap = loads.setdefault((spec.layout, spec.holders), [])
        if not heap:  # at most one replica per tensor is needed
            heap += [(0, i) for i in range(min(sharing[id(spec)].replica_count, len(tensors)))]
        load, replica = heap[0]
        heapq.heapreplace(heap, (load - minus_nbytes, replica))
        replica_of[key] = replica
    return replica_of


def _share(spec: TensorSpec, part: Part, count: int, number: int) -> Part:
    """Return piece ``number`` of ``count`` of a part of a tensor that replicas share; it may be empty."""
    dim = _sharing(spec).dim
    assert dim is not None
    length = part.box.shape[dim]
    low, high = length * number // count, length * (number + 1) // count
    start, stop, at = list(part.box.start), list(part.box.stop), list(part.at)
    start[dim], stop[dim], at[dim] = start[dim] + low, part.box.start[dim] + high, at[dim] + low
    return Part(Box(tuple(start), tuple(stop)), tuple(at))


def plan_save(tensors: Tensors, rank: int) -> list[Piece]:
    """Return the boxes that ``rank`` writes."""
    replica_of = choose_replicas(tensors)
    pieces: list[Piece] = []
    parts_of: dict[tuple[int, int | None], list[Part]] = {}
    for key, spec in tensors.items():
        case = id(spec), replica_of[key]  # equal tensors share one spec object
        if case not in parts_of:
            parts_of[case] = _parts_to_write(spec, replica_of[key], rank)
        pieces += [Piece(key, spec, part, rank) for part in parts_of[case]]
    return pieces


def _parts_to_write(spec: TensorSpec, replica: int | None, rank: int) -> list[Part]:
    if prod(spec.shape) == 0:
        return [Part(Box.whole(spec.shape), (0,) * len(spec.shape))] if rank == spec.holders[0][0] else []
    if not any(a <= rank < b for a, b in spec.holders):
        return []
    shard = spec.layout.shard(rank)
    group = replicas(spec.layout, spec.holders, shard)
    parts = parts_of_shard(spec.layout, spec.shape, shard)
    if replica is not None:
        return list(parts) if group[replica % len(group)] == rank else []
    shares = [_share(spec, part, len(group), bisect_left(group, rank)) for part in parts]
    return [share for share in shares if share.box.numel]


def split_into_files(pieces: list[Piece], limit_bytes: int) -> list[list[Piece]]:
    """Group pieces into shard files of at most ``limit_bytes`` of data, by first fit; a larger piece gets its own file.

    The widest elements come first, so that all are aligned without gaps. A file holds one box of a tensor, since its
    header is keyed by name.
    """
    files: list[tuple[list[Piece], set[str]]] = []
    sizes: list[int] = []
    first_open = 0
    for piece in sorted(pieces, key=lambda piece: (-DTYPE_BYTES[piece.spec.dtype], piece.key, piece.part.box)):
        nbytes = piece.nbytes
        for i in range(first_open, len(files)):
            if sizes[i] + nbytes <= limit_bytes and piece.key not in files[i][1]:
                break
        else:
            i = len(files)
            files.append(([], set()))
            sizes.append(0)
        files[i][0].append(piece)
        files[i][1].add(piece.key)
        sizes[i] += nbytes
        while first_open < len(files) and sizes[first_open] >= limit_bytes:
            first_open += 1
    return [file_pieces for file_pieces, _ in files]


def table_digest(tables: Mapping[str, Component]) -> str:
    """Return a digest of a rank's tensor tables; ranks with equal digests need not exchange their tables."""
    reprs: dict[int, str] = {}  # equal tensors share one spec object
    rows: list[object] = [[name, sorted(table.aliases.items())] for name, table in sorted(tables.items())]
    for component, table in sorted(tables.items()):
        for key, spec in sorted(table.tensors.items()):
            if id(spec) not in reprs:
                reprs[id(spec)] = repr((spec.dtype, spec.shape, spec.layout, spec.pinned))
            rows.append((component, key, reprs[id(spec)]))
    return checksum(json.dumps(rows).encode())


def check_plausible(component: Component, where: str) -> None:
    """Raise a FormatError if the indexes have no room for a tensor's checksums, before memory is allocated for it."""
    index_nbytes = sum(info.nbytes for info in component.indexes.values())
    left = index_nbytes // DIGITS * MAX_BLOCK_BYTES
    for key, spec in component.tensors.items():
        left -= prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        if left < 0:
            raise FormatError(
                f"{where}: the checksums of {shown(key)}, {spec.dtype} {spec.shape}, do not fit into indexes of "
                f"{index_nbytes} bytes"
            )


def check_cover(component: str, tensors: Tensors) -> None:
    """Raise a FormatError for the first tensor with a gap. Boxes never overlap, so each shard only needs a holder."""
    specs = dict[int, tuple[str, TensorSpec]]()  # equal tensors share one spec object
    for key, spec in tensors.items():
        specs.setdefault(id(spec), (key, spec))
    for key, spec in specs.values():
        for shard in find_unheld_shards(spec.layout, spec.holders):
            for part in parts_of_shard(spec.layout, spec.shape, shard):
                raise FormatError(
                    f"{component}: the boxes of {key!r}, shape {spec.shape}, do not tile it: none of the ranks "
                    f"{spec.holders} has the box {part.box.start}..{part.box.stop}"
                )


class Overlap(NamedTuple):
    """The region ``common`` of a stored box that a loader needs, and its position in the loader's local tensor."""

    writer: int
    stored: Box
    common: Box
    local: Box


def plan_load(spec: TensorSpec, replica: int | None, targets: tuple[Part, ...]) -> Iterator[Overlap]:
    """Yield the stored boxes that meet the target parts of a tensor, without enumerating the others.

    A caller that looks up each box as it is yielded does no more work than there are stored boxes, even if a hostile
    index describes many more.
    """
    for target in targets:
        for shard in shards_meeting(spec.layout, spec.shape, target.box) if target.box.numel else ():
            group = replicas(spec.layout, spec.holders, shard)
            for part in parts_of_shard(spec.layout, spec.shape, shard):
                if part.box.intersect(target.box) is not None:
                    for stored, writer in _stored_boxes(spec, replica, group, part, target.box):
                        if (common := stored.intersect(target.box)) is not None:
                            yield Overlap(writer, stored, common, common.within(target.box).shift(target.at))


def _stored_boxes(
    spec: TensorSpec, replica: int | None, group: Sequence[int], part: Part, target: Box
) -> Iterator[tuple[Box, int]]:
    """Yield the stored boxes of a part that may meet ``target``, each with the rank of ``group`` that wrote it."""
    if replica is not None:
        yield part.box, group[replica % len(group)]
        return
    dim, count = _sharing(spec).dim, len(group)
    assert dim is not None
    length, start = part.box.shape[dim], part.box.start[dim]
    low, high = max(target.start[dim] - start, 0), min(target.stop[dim] - start, length)
    for number in range(max(-(-(low + 1) * count // length) - 1, 0), -(-high * count // length)):
        yield _share(spec, part, count, number).box, group[number]


class ByteRuns(NamedTuple):
    """Runs of ``length`` bytes of a stored box, in the row-major array of a target.

    The first begins at byte ``source`` of the box and ``at`` of the target. ``dims``, outermost first, have the number
    of steps and the bytes of one in the box and in the target.
    """

    source: int
    at: int
    length: int
    dims: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Length of the region in bytes."""
        return self.length * prod([count for count, _, _ in self.dims]) if self.dims else self.length


def byte_runs(overlap: Overlap, local_shape: tuple[int, ...], itemsize: int) -> ByteRuns:
    """Return the runs of a region of elements of ``itemsize`` bytes, in as few dims as possible."""
    source = at = 0
    pitch = step = itemsize  # bytes from one index to the next in the box and in the target
    dims = [(itemsize, 1, 1)]  # of bytes, innermost first
    start = map(sub, overlap.common.start, overlap.stored.start)
    extents = zip(overlap.common.shape, start, overlap.local.start, overlap.stored.shape, local_shape, strict=True)
    for count, first, local_first, stored_length, local_length in reversed(list(extents)):
        source, at = source + first * pitch, at + local_first * step
        inner_count, inner_pitch, inner_step = dims[-1]
        if (pitch, step) == (inner_count * inner_pitch, inner_count * inner_step):
            dims[-1] = (count * inner_count, inner_pitch, inner_step)
        elif count > 1:
            dims.append((count, pitch, step))
        pitch, step = pitch * stored_length, step * local_length
    return ByteRuns(source, at, dims[0][0], tuple(dims[:0:-1]))
