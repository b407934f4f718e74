"""Plan who writes which box and who reads which bytes: pure functions of the tensors' specs, without any exchange.

The choice of the writer is part of the format (FORMAT.md, "Writers"): a loader repeats it to know whose index to open.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import MAX_BLOCK_BYTES, Component, TensorSpec
from lightning_shardckpt.format.layout import Holders, Layout, Part, parts_of_shard, replicas, shards_meeting, unheld
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, shown

SPLIT_BYTES = 16 * 1024
"""A shard is divided among its replicas where each gets at least this much; a smaller one goes to one replica."""

_CHECKSUM_BYTES = 18  # in the JSON of an index, with its quotes

Tensors = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that one rank writes. ``part`` says where it lies in the local tensor of the writer's shard."""

    key: str
    spec: TensorSpec
    part: Part
    writer: int

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return self.part.box.numel * DTYPE_BYTES[self.spec.dtype]


def choose_replicas(tensors: Tensors) -> dict[str, int | None]:
    """Choose for every tensor the replica that writes each shard, by position among its replicas; None: all share.

    Tensors of one layout that are not shared are dealt, the largest first, to the replica with the fewest bytes so
    far, by nominal size (global bytes / number of shards), so that every rank gets the same answer whatever its own
    shard.
    """
    loads: dict[tuple[Layout, Holders], list[tuple[int, int]]] = {}
    kinds = {id(spec): spec for spec in tensors.values()}  # tensors that are alike share their spec
    count_of = {kind: _replica_count(spec) for kind, spec in kinds.items()}
    size_of = {kind: _nominal_bytes(spec) for kind, spec in kinds.items()}
    shared = {kind for kind, spec in kinds.items() if _is_shared(spec, count_of[kind], size_of[kind])}
    dealt = {kind for kind, spec in kinds.items() if kind not in shared and count_of[kind] > 1 and not spec.pinned}
    chosen: dict[str, int | None] = {key: None if id(spec) in shared else 0 for key, spec in tensors.items()}
    to_deal = (key for key, spec in tensors.items() if id(spec) in dealt)
    for key in sorted(to_deal, key=lambda k: (-size_of[id(tensors[k])], k)):
        spec, kind = tensors[key], id(tensors[key])
        heap = loads.setdefault((spec.layout, spec.holders), [])
        if not heap:  # more replicas than tensors are never needed
            heap += [(0, i) for i in range(min(count_of[kind], len(tensors)))]
        load, replica = heap[0]
        heapq.heapreplace(heap, (load + size_of[kind], replica))
        chosen[key] = replica
    return chosen


def _is_shared(spec: TensorSpec, count: int, nominal: int) -> bool:
    if spec.pinned or count == 1 or nominal < count * SPLIT_BYTES:
        return False
    return _divided_dim(spec, count) is not None


def _nominal_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype] // prod(spec.layout.shards)


def _replica_count(spec: TensorSpec) -> int:
    """Return how many ranks hold the shard of the lowest holder; in a proper mesh, every shard has as many."""
    return len(replicas(spec.layout, spec.holders, spec.layout.shard(spec.holders[0][0])))


@lru_cache(maxsize=16384)
def _divided_dim(spec: TensorSpec, count: int) -> int | None:
    """The first dim of a part that divides by ``count`` with pieces at most 1/8 above the mean; None if no dim does."""
    lengths = list(spec.shape)
    for cut, size in zip(spec.layout.cuts, spec.layout.shards, strict=True):
        block = -(-lengths[cut.dim] // cut.blocks)
        lengths[cut.dim] = -(-block // size)
    return next((d for d, n in enumerate(lengths) if n and -(-n // count) * count * 8 <= n * 9), None)


def _share(part: Part, dim: int, count: int, number: int) -> Part | None:
    """Piece ``number`` of ``count`` of a part along ``dim``; None if it is empty."""
    length = part.box.shape[dim]
    low, high = length * number // count, length * (number + 1) // count
    if low == high:
        return None
    start, stop, at = list(part.box.start), list(part.box.stop), list(part.at)
    start[dim], stop[dim], at[dim] = start[dim] + low, part.box.start[dim] + high, at[dim] + low
    return Part(Box(tuple(start), tuple(stop)), tuple(at))


def plan_save(tensors: Tensors, rank: int) -> list[Piece]:
    """The boxes that ``rank`` writes, in the order in which they are stored."""
    chosen = choose_replicas(tensors)
    mine: list[Piece] = []
    parts: dict[tuple[int, int | None], list[Part]] = {}
    for key, spec in tensors.items():
        kind = id(spec), chosen[key]  # tensors that are alike share their spec
        if kind not in parts:
            parts[kind] = _written_by(spec, chosen[key], rank)
        mine += [Piece(key, spec, part, rank) for part in parts[kind]]
    return sorted(mine, key=_stored_order)


def _stored_order(piece: Piece) -> tuple[int, str, Box]:
    """Wide elements first, so that all are aligned without gaps."""
    return -DTYPE_BYTES[piece.spec.dtype], piece.key, piece.part.box


def _written_by(spec: TensorSpec, replica: int | None, rank: int) -> list[Part]:
    if prod(spec.shape) == 0:
        return [Part(Box.whole(spec.shape), (0,) * len(spec.shape))] if rank == spec.holders[0][0] else []
    if not any(a <= rank < b for a, b in spec.holders):
        return []
    shard = spec.layout.shard(rank)
    group = replicas(spec.layout, spec.holders, shard)
    parts = parts_of_shard(spec.layout, spec.shape, shard)
    if replica is not None:
        return list(parts) if group[replica % len(group)] == rank else []
    dim, number = _divided_dim(spec, _replica_count(spec)), group.index(rank)
    assert dim is not None
    shares = [_share(part, dim, len(group), number) for part in parts]
    return [share for share in shares if share is not None]


def split_into_files(pieces: list[Piece], limit_bytes: int) -> list[list[Piece]]:
    """Pieces grouped into shard files of at most ``limit_bytes`` of data, in the order in which they are stored.

    First fit. A piece that is larger gets a file of its own. A file holds one box of a tensor, since its header is
    keyed by name.
    """
    files: list[tuple[list[Piece], set[str]]] = []
    sizes: list[int] = []
    first_open = 0
    for piece in sorted(pieces, key=_stored_order):
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
    return [found for found, _ in files]


def table_digest(tables: Mapping[str, Component]) -> str:
    """A digest of what a rank knows of the state to save; ranks with the same digest need to exchange nothing."""
    kinds: dict[int, str] = {}  # tensors that are alike share their spec
    rows: list[object] = [[name, sorted(table.aliases.items())] for name, table in sorted(tables.items())]
    for component, table in sorted(tables.items()):
        for key, spec in sorted(table.tensors.items()):
            if id(spec) not in kinds:
                kinds[id(spec)] = repr((spec.dtype, spec.shape, spec.layout, spec.pinned))
            rows.append((component, key, kinds[id(spec)]))
    return checksum(json.dumps(rows).encode())


@lru_cache(maxsize=16384)
def filled_shards(layout: Layout, shape: Shape) -> int:
    """Return how many shards of a tensor have elements, counted without listing them."""
    lengths = [{n: 1} for n in shape]
    for cut in layout.cuts:
        found: dict[int, int] = {}
        for length, count in lengths[cut.dim].items():
            for piece, number in _piece_lengths(length, cut.blocks, layout.axes[cut.axis].size):
                found[piece] = found.get(piece, 0) + count * number
        lengths[cut.dim] = found
    return prod(sum(count for length, count in found.items() if length) for found in lengths)


def _piece_lengths(length: int, blocks: int, parts: int) -> list[tuple[int, int]]:
    """Return what ``_cut`` leaves of ``length`` indices at each of ``parts`` coordinates: (length, their number)."""
    block = max(-(-length // blocks), 1)
    kinds = [(block, length // block), (length % block, 1)]  # of blocks: (length, how many)
    sizes = [max(-(-n // parts), 1) for n, _ in kinds]
    edges = {0, *(n // size + i for (n, _), size in zip(kinds, sizes, strict=True) for i in (0, 1)), parts}
    return [
        (sum(count * max(min(n - at * size, size), 0) for (n, count), size in zip(kinds, sizes, strict=True)), end - at)
        for at, end in pairwise(sorted(edge for edge in edges if edge <= parts))
    ]


def check_plausible(component: Component, where: str) -> None:
    """Make sure that the files can hold what the root index says, before anything is planned or allocated for it.

    Shards with elements are written by different ranks, so each needs an index; and the indexes need room for the
    checksum of every block of the data. Whether the files are what they should be is found when they are read.

    Raises:
        FormatError: naming the first tensor that cannot be stored there.
    """
    room = sum(info.nbytes for info in component.indexes.values())
    most = room // _CHECKSUM_BYTES * MAX_BLOCK_BYTES
    sizes: dict[int, int] = {}  # tensors that are alike share their spec
    for key, spec in component.tensors.items():
        seen = id(spec) in sizes
        if not seen:
            sizes[id(spec)] = prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        nbytes = sizes[id(spec)]
        if nbytes > most:
            raise FormatError(
                f"{where}: the checksums of {shown(key)}, {spec.dtype} {spec.shape}, do not fit into indexes of {room} "
                "bytes"
            )
        most -= nbytes
        count = 0 if seen else filled_shards(spec.layout, spec.shape)
        if count > len(component.indexes):
            raise FormatError(
                f"{where}: the {count} shards of {shown(key)}, {spec.dtype} {spec.shape}, cannot have been written by "
                f"the {len(component.indexes)} ranks that have an index"
            )


def check_cover(component: str, tensors: Tensors) -> None:
    """Make sure that every element of every tensor is written by exactly one rank.

    Boxes of different shards never overlap, nor do the shares of a shard, so it is enough that each shard has a holder.

    Raises:
        FormatError: naming the first tensor that has a gap, and the gap.
    """
    held = set[int]()  # tensors that are alike share their spec
    for key, spec in tensors.items():
        if id(spec) in held:
            continue
        held.add(id(spec))
        for shard in unheld(spec.layout, spec.holders):
            for part in parts_of_shard(spec.layout, spec.shape, shard):
                raise FormatError(
                    f"{component}: the boxes of {key!r}, shape {spec.shape}, do not tile it: none of the ranks "
                    f"{spec.holders} has the box {part.box.start}..{part.box.stop}"
                )


@dataclass(frozen=True, slots=True)
class Overlap:
    """The part of a stored box that a loader needs, and where it lies in the loader's local tensor."""

    writer: int
    stored: Box
    common: Box
    local: Box


def plan_load(spec: TensorSpec, replica: int | None, wanted: tuple[Part, ...]) -> Iterator[Overlap]:
    """The stored boxes that meet the wanted parts of a tensor, found without listing the others, one at a time.

    Empty parts need nothing. Who looks each box up as it comes does no more work than there are stored boxes.
    """
    for want in wanted:
        for shard in shards_meeting(spec.layout, spec.shape, want.box) if want.box.numel else ():
            for part in parts_of_shard(spec.layout, spec.shape, shard):
                if part.box.intersect(want.box) is not None:
                    for stored, writer in _stored(spec, replica, shard, part, want.box):
                        if (common := stored.intersect(want.box)) is not None:
                            yield Overlap(writer, stored, common, common.within(want.box).shift(want.at))


def _stored(spec: TensorSpec, replica: int | None, shard: Shape, part: Part, want: Box) -> Iterator[tuple[Box, int]]:
    """The boxes that a part is stored in, with the rank that wrote each: those that may meet ``want``."""
    group = replicas(spec.layout, spec.holders, shard)
    if replica is not None:
        yield part.box, group[replica % len(group)]
        return
    dim, count = _divided_dim(spec, _replica_count(spec)), len(group)
    assert dim is not None
    length, start = part.box.shape[dim], part.box.start[dim]
    low, high = max(want.start[dim] - start, 0), min(want.stop[dim] - start, length)
    for number in range(max(-(-(low + 1) * count // length) - 1, 0), -(-high * count // length)):
        share = _share(part, dim, count, number)
        if share is not None:
            yield share.box, group[number]


def byte_runs(overlap: Overlap, local_shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int, int]]:
    """(offset in the stored box, offset in local memory, length), all in bytes, ascending in the first.

    ``local_shape`` is the row-major shape of the destination.
    """
    source = overlap.common.within(overlap.stored).runs(overlap.stored.shape)
    target = overlap.local.runs(local_shape)
    (a, a_stop), (b, b_stop) = next(source), next(target)
    while True:
        length = min(a_stop - a, b_stop - b)
        yield a * itemsize, b * itemsize, length * itemsize
        a, b = a + length, b + length
        if a == a_stop:
            a, a_stop = next(source, (-1, -1))
        if b == b_stop:
            b, b_stop = next(target, (-1, -1))
        if a < 0 or b < 0:
            return
