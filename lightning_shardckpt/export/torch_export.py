"""Plan of a file for ``torch.load``, with selection, renaming and dtypes.

The file of a Trainer's checkpoint has Lightning's keys. The file of a nested dict of objects has the keys of the dict,
like a file of plain Fabric. ``torch.save`` writes it without the bytes of its tensors, which are then filled in; so it
has no checksums of zip. Values that ``torch.load`` would refuse by default become plain ones.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_shardckpt.compat.torch_tensors import fake_tensors
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.whole_files import Export, Options, Region, WholeFile, plan_conversion
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.source import Source, assemble
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_tree import Dropped, Pickled, decode, refuse_tensor
from lightning_shardckpt.state.state_dicts import KEYS, has_places, states_of_checkpoint
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, dtype_name, host_bytes
from lightning_shardckpt.system.text import list_some

_LAYER = re.compile(r"(.*?\.|)(\d+)\.")
_LOCAL_HEADER_BYTES = 30  # of a record of a zip archive, before its name and its extra field


def plan_torch(source: Source, options: Options) -> Export:
    """Plan a file that ``torch.load`` reads by default.

    Raises:
        ValueError: if names collide, or an option matches no tensor.
    """
    source, make = options.select(source), fake_tensors()
    stored = dict[int, tuple[torch.Tensor, Region]]()  # by id of the fake tensor: it, and its bytes

    def record(component: str, key: str) -> torch.Tensor:
        one = source.table[component][key]
        dtype = options.output_dtype(one.spec.dtype) if component == "model" else one.spec.dtype
        fake = make(one.spec.shape, TORCH_DTYPES[dtype])
        conversion = plan_conversion(one.spec.dtype, dtype)
        stored[id(fake)] = fake, Region(0, fake.nbytes, (one.component, one.key), conversion=conversion)
        return fake

    def decode_plain(value: Any) -> Any:
        return decode(value, refuse_tensor, makes_configs=False)

    checkpoint = assemble(source, record, decode_plain, optimizers=options.has_optimizer)
    model = source.components().get("model")
    if model is not None and len({spec.holders for spec in model.tensors.values()}) > 1:  # pipeline stages
        for optimizer in filter(None, checkpoint.get("optimizer_states", ())):
            for group in optimizer["param_groups"]:
                group["params"] = sort_by_layer(group["params"])  # a plain optimizer loads by position
    plain = PlainValues()
    checkpoint = plain.convert(_restore_keys(checkpoint, options.mapping))
    regions = list[Region]()
    for key, tensor in {id(tensor): tensor for tensor in _tensors_in(checkpoint)}.items():
        regions.append(stored[key][1] if key in stored else Region(0, tensor.nbytes, host_bytes(tensor)))
    notes = []
    if plain.changed:
        listed = list_some(plain.changed, between="\n  ")
        notes = [f"Values that `torch.load` would refuse by default are not in the file as they were:\n  {listed}"]
    nbytes = sum(region.nbytes for region in regions)
    return Export([WholeFile("", nbytes, partial(_begin, checkpoint, regions))], notes=notes)


def _begin(checkpoint: Any, regions: list[Region], file: int) -> list[Region]:
    """Write a file without the bytes of its tensors; ``regions`` are in the order in which ``torch.save`` counts."""
    with open(file, "wb", closefd=False) as unfilled, torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            torch.save(checkpoint, unfilled)
        except RuntimeError as error:  # its archive is not whole, because a write failed
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    begins = _find_records(file, regions)
    return [replace(region, begin=begin) for region, begin in zip(regions, begins, strict=True)]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value in the order in which they are pickled. They have storages of their own."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _find_records(file: int, regions: list[Region]) -> list[int]:
    """Return where the bytes of each tensor begin in a file of ``torch.save``."""
    begins = []
    with open(file, "rb", closefd=False) as raw, zipfile.ZipFile(raw) as archive:
        infos = [archive.getinfo(f"archive/data/{number}") for number in range(len(regions))]
        if [info.file_size for info in infos] != [region.nbytes for region in regions]:
            raise StateError("torch.save wrote other tensors than were planned: please report this")
        for info in infos:
            raw.seek(info.header_offset + _LOCAL_HEADER_BYTES - 4)
            name_bytes, extra_bytes = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            begins.append(info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    return begins


def _restore_keys(checkpoint: dict[str, Any], mapping: KeyMapping) -> dict[str, Any]:
    """Return the state under the keys of the save, if the names are still those of the save."""
    if not has_places(checkpoint) or not mapping.is_empty:
        return {key: value for key, value in checkpoint.items() if key != KEYS}
    frozen = {FROZEN: checkpoint[FROZEN]} if FROZEN in checkpoint else {}
    return states_of_checkpoint(checkpoint) | frozen


def sort_by_layer(params: list[str]) -> list[str]:
    """Return the names in the model's order; the input has them in the order of pipeline stages.

    The names of layers are sorted by their numbers among their positions; other names stay.

    >>> sort_by_layer(["embed", "layers.0.w", "layers.2.w", "layers.1.w", "layers.3.w", "head"])
    ['embed', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.3.w', 'head']
    """
    positions: dict[str, list[tuple[int, int]]] = {}  # of layers: (number of the layer, position)
    for position, param in enumerate(params):
        layer = _LAYER.match(param) if isinstance(param, str) else None
        if layer is not None:
            positions.setdefault(layer[1], []).append((int(layer[2]), position))
    ordered = list(params)
    for layers in positions.values():
        by_position = sorted(layers, key=lambda layer: layer[1])
        for (_, position), (_, old) in zip(by_position, sorted(layers), strict=True):
            ordered[position] = params[old]
        between = params[min(position for _, position in layers) : max(position for _, position in layers)]
        if others := [name for name in between if _LAYER.match(name) is None]:
            raise StateError(
                f"the file would have the optimizer's state in another order than the model: {others[0]!r} is stored "
                "between the layers of pipeline stages, and a plain optimizer loads by position. Leave the optimizer "
                "out (--optimizer false), or resume from the checkpoint itself."
            )
    return ordered


# ── plain values ──────────────────────────────────────────────────────────────────────────────────────────────────────

_VERSIONS = "_metadata"  # attribute of a state dict: the versions of modules, which ``Module.load_state_dict`` reads
_MAX_INT_BITS = 2000  # weights_only=True reads no integer of 256 bytes or more
_LOADABLE = (type(None), bool, float, str, complex, bytes, torch.dtype, torch.device)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)  # like the others: exactly these classes, not subclasses


class PlainValues:
    """Converts values to types that ``torch.load`` reads by default; ``changed`` describes the values that differ.

    Subclasses of containers become the containers, frozensets sets, deques lists, numpy arrays tensors, and all other
    objects text. Values that the checkpoint lacks are left out; in a list, None replaces them.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []

    def convert(self, value: Any, path: str = "") -> Any:
        """Return a value converted to types that ``weights_only=True`` allows; containers are copied."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return _with_own_storage(value)
        if kind in _LOADABLE or (kind is int and value.bit_length() < _MAX_INT_BITS):
            return value
        if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
            return self.convert(number, path)
        if isinstance(value, Dropped):
            reason = "as it is pickled" if isinstance(value, Pickled) else "as it was when the checkpoint was saved"
            self.changed.append(f"{path}: left out, {reason}: {value.type_name}")
            return None
        new: Any = str(value)
        if isinstance(value, dict):
            new = {} if kind not in _CONTAINERS else kind()
            for key, item in value.items():
                where = f"{path}/{key}" if path else str(key)
                key, plain = self._member(key, where), self.convert(item, where)
                if not isinstance(item, Dropped):
                    new[key] = plain
            if (versions := getattr(value, _VERSIONS, None)) is not None:  # a module's state dict
                vars(new)[_VERSIONS] = self.convert(versions, f"{path}/{_VERSIONS}")
        elif isinstance(value, list | tuple | deque):
            items = [self.convert(item, f"{path}/{i}") for i, item in enumerate(value)]
            new = kind(items) if kind in _CONTAINERS else items
        elif isinstance(value, set | frozenset):
            new = {self._member(item, path) for item in value if not isinstance(item, Dropped)}
        elif isinstance(value, np.ndarray):
            with suppress(TypeError, ValueError):  # torch has no dtype for it
                new = torch.tensor(np.ascontiguousarray(value))
        if type(new) is not kind:
            self.changed.append(f"{path}: {kind.__name__} became {type(new).__name__}")
        return new

    def _member(self, value: Any, path: str) -> Any:
        """Return a converted key or member of a set; text for one that can't be hashed any more."""
        new = self.convert(value, path)
        return str(value) if isinstance(new, set) else new


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy if it is a part of a larger storage, or not contiguous."""
    dtype_name(tensor, "beside the model and the optimizers")  # raises an error for one without plain memory
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.detach().clone(memory_format=torch.contiguous_format)
