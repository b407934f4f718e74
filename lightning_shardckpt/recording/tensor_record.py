"""Records of live tensors: digests of the boxes that this rank has, and moments that add up over boxes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.box_digest import RunsOfBox
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.crc64 import crc64_text
from lightning_shardckpt.state.compound_tensors import is_compound, take_apart
from lightning_shardckpt.state.dtensor_layout import local_views
from lightning_shardckpt.tools.run_records import BoxRecord, Entry, TensorRecord, ValueRecord

_PROJECTIONS = 4  # of 16 bits of an element's key each
_SEED = 0xD6E8FEB86659FD93


@torch.no_grad()
def tensor_entries(name: str, tensor: torch.Tensor) -> dict[str, Entry]:
    """Return the record of a tensor by its name; of a compound one, of what is inside.

    Raises:
        StateError: for what has no elements in boxes: lazy, sparse and nested tensors, partial sums.
    """
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise StateError("a lazy, meta, nested or sparse tensor has no elements that could be digested")
    if not is_compound(tensor):
        return {name: _record(tensor)}
    inside, records = take_apart(name, tensor)
    entries: dict[str, Entry] = {key: ValueRecord(checksum(repr(record).encode())) for key, record in records.items()}
    return entries | {key: _record(of) for key, of in inside.items()}


def _record(tensor: torch.Tensor) -> TensorRecord:
    boxes = []
    for box, view in local_views(tensor):
        local = view.detach().cpu().contiguous().reshape(-1)
        part = RunsOfBox.of(box, tuple(tensor.shape), local.element_size()).part(_bytes(local).data)
        boxes.append(BoxRecord(box.start, box.shape, crc64_text(part), _moments(local, box)))
    return TensorRecord(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(boxes))


def _moments(local: torch.Tensor, box: Box) -> tuple[float, ...]:
    if local.is_complex():
        return ()
    values: NDArray[np.float64] = local.double().numpy()
    keys = _element_keys(box.start, box.shape)
    weights = [((keys >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.float64) for i in range(_PROJECTIONS)]
    with np.errstate(all="ignore"):  # what is not finite shows in the sums
        sums = [float(values @ values)] + [float(values @ (of / 32767.5 - 1)) for of in weights]
    return tuple(sums)


def _element_keys(start: Shape, lengths: Shape) -> NDArray[np.uint64]:
    """Return a pseudo-random number for each element of a box, by its place in the whole tensor."""
    keys = np.full((1,) * len(lengths), _SEED, np.uint64)
    for dim, (first, length) in enumerate(zip(start, lengths, strict=True)):
        places = np.arange(first, first + length, dtype=np.uint64).reshape([-1] + [1] * (len(lengths) - dim - 1))
        keys = _mixed(keys ^ (places + np.uint64(dim + 1)) * np.uint64(0x9E3779B97F4A7C15))
    return keys.reshape(-1)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@torch.no_grad()
def row_digests(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return a digest of each row (along dim 0) of a plain tensor, whatever its place."""
    local = tensor.detach().cpu().contiguous()
    return tuple(checksum(_bytes(row.reshape(-1)).tobytes()) for row in local)


def _bytes(flat: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found
