"""Plan of a file for ``torch.load``, with selection, renaming and dtypes.

The file has Lightning's keys, or those of a nested dict of objects. ``torch.save`` writes it without the bytes of its
tensors, which are then filled in; so it has no checksums of zip.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_shardckpt.compat.torch_tensors import fake_tensors
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.whole_files import Export, Options, WholeFile
from lightning_shardckpt.format.safetensors_header import OutputTensor
from lightning_shardckpt.sources.source import Source, assemble
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_tree import Dropped, decode
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES, dtype_name, host_bytes
from lightning_shardckpt.state.state_dicts import KEYS, states_of_checkpoint
from lightning_shardckpt.storage.local_files import write_at
from lightning_shardckpt.system.text import list_some

_LAYER = re.compile(r"(.*?\.|)(\d+)\.")
_LOCAL_HEADER_BYTES = 30  # of a record of a zip archive, before its name and its extra field


def plan_torch(source: Source, options: Options) -> Export:
    """Plan a file that ``torch.load`` reads by default, or raise a MismatchError as ``Options.select``."""
    export, make = Export(source := options.select(source)), fake_tensors()
    stored = dict[int, tuple[torch.Tensor, OutputTensor]]()  # by id of the fake tensor

    def record(component: str, key: str) -> torch.Tensor:
        dtype = source.table[component][key].spec.dtype
        one = export.tensor(component, key, dtype=options.output_dtype(dtype) if component == "model" else dtype)
        fake = make(one.shape, TORCH_DTYPES[one.dtype])
        stored[id(fake)] = fake, one
        return fake

    decode_plain = partial(decode, makes_configs=False)
    state = assemble(source, record, decode_plain, optimizers=options.has_optimizer)
    changed = list[str]()
    if len({one.spec.holders for one in source.table.get("model", {}).values()}) > 1:  # pipeline stages
        for optimizer in filter(None, state.get("optimizer_states", ())):
            for group in optimizer["param_groups"]:
                group["params"] = sort_by_layer(group["params"])  # a plain optimizer loads by position
    if options.key_mapping.is_empty:  # the names are those of the save: so are the keys
        frozen = {FROZEN: state[FROZEN]} if FROZEN in state else {}
        state = states_of_checkpoint(state) | frozen
    state.pop(KEYS, None)
    checkpoint = to_plain(state, "", changed)
    records = list({id(tensor): tensor for tensor in _tensors_in(checkpoint)}.values())

    def begin(file: int) -> list[int]:
        with open(file, "wb", closefd=False) as unfilled, torch.serialization.skip_data(materialize_fake_tensors=True):
            try:
                torch.save(checkpoint, unfilled)
            except RuntimeError as error:  # its archive is not whole, because a write failed
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        places = dict(zip(map(id, records), _find_records(file, records), strict=True))
        for tensor in records:
            if id(tensor) not in stored:
                write_at(file, host_bytes(tensor), places[id(tensor)])
        return [places[id(tensor)] for tensor in records if id(tensor) in stored]

    export.files.append(WholeFile("", [stored[id(one)][1] for one in records if id(one) in stored], begin))
    if changed:
        note = "Values that `torch.load` would refuse by default are not in the file as they were:\n  "
        export.notes = [note + list_some(changed, between="\n  ")]
    return export


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value in the order in which they are pickled. They have storages of their own."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _find_records(file: int, tensors: list[torch.Tensor]) -> list[int]:
    """Return where the bytes of each tensor begin in a file of ``torch.save``, which numbers them in this order."""
    begins = []
    with open(file, "rb", closefd=False) as raw, zipfile.ZipFile(raw) as archive:
        for number, tensor in enumerate(tensors):
            info = archive.getinfo(f"archive/data/{number}")
            if info.file_size != tensor.nbytes:
                raise StateError("torch.save wrote other tensors than were planned: please report this")
            raw.seek(info.header_offset + _LOCAL_HEADER_BYTES - 4)
            name_bytes, extra_bytes = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            begins.append(info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    return begins


def sort_by_layer(params: list[str]) -> list[str]:
    """Return the names in the model's order; the input has them in the order of pipeline stages.

    The names of layers are sorted by their numbers among their positions; other names stay.

    >>> sort_by_layer(["embed", "layers.0.w", "layers.2.w", "layers.1.w", "layers.3.w", "head"])
    ['embed', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.3.w', 'head']
    """
    layers = [_LAYER.match(param) if isinstance(param, str) else None for param in params]
    ordered = list(params)
    for prefix in {layer[1] for layer in layers if layer}:
        places = [place for place, layer in enumerate(layers) if layer and layer[1] == prefix]
        if others := [place for place in range(places[0], places[-1]) if layers[place] is None]:
            raise StateError(
                f"the file would have the optimizer's state in another order than the model: {params[others[0]]!r} is "
                "stored between the layers of pipeline stages, and a plain optimizer loads by position. Leave the "
                "optimizer out (--optimizer false), or resume from the checkpoint itself."
            )
        by_number = sorted(places, key=lambda place: int(layers[place][2]))  # type: ignore[index]  # of a layer
        for place, old in zip(places, by_number, strict=True):
            ordered[place] = params[old]
    return ordered


_VERSIONS = "_metadata"  # attribute of a state dict: the versions of modules, which ``Module.load_state_dict`` reads
_MAX_INT_BITS = 2000  # weights_only=True reads no integer of 256 bytes or more
_LOADABLE = (type(None), bool, float, str, complex, bytes, torch.dtype, torch.device)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)  # like the others: exactly these classes, not subclasses


def to_plain(value: Any, path: str, changed: list[str]) -> Any:
    """Return a value converted to types that ``torch.load`` reads by default; containers are copied.

    Subclasses of containers become the containers, frozensets sets, deques lists, numpy arrays tensors, and all other
    objects text. Values that the checkpoint lacks are left out. What differs is added to ``changed``, with its path.
    """
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if isinstance(value, torch.Tensor):
        dtype_name(value, "beside the model and the optimizers")  # raises an error for one without plain memory
        has_own_storage = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        return value if has_own_storage else value.detach().clone(memory_format=torch.contiguous_format)
    if kind in _LOADABLE or (kind is int and value.bit_length() < _MAX_INT_BITS):
        return value
    if isinstance(value, Dropped):
        changed.append(f"{path}: left out, {value!r}")
        return None
    if isinstance(value, dict):
        new: Any = kind() if kind in _CONTAINERS else {}
        for key, item in value.items():
            where = f"{path}/{key}" if path else str(key)
            plain = to_plain(item, where, changed)
            if not isinstance(item, Dropped):
                new[_to_member(key, where, changed)] = plain
        if (versions := getattr(value, _VERSIONS, None)) is not None:  # a module's state dict
            vars(new)[_VERSIONS] = to_plain(versions, f"{path}/{_VERSIONS}", changed)
    elif isinstance(value, list | tuple | deque):
        items = [to_plain(item, f"{path}/{i}", changed) for i, item in enumerate(value)]
        new = kind(items) if kind in _CONTAINERS else items
    elif isinstance(value, set | frozenset):
        new = {_to_member(item, path, changed) for item in value if not isinstance(item, Dropped)}
    else:
        new = str(value)
        if isinstance(value, np.ndarray):
            with suppress(TypeError, ValueError):  # torch has no dtype for it
                new = torch.tensor(np.ascontiguousarray(value))
    if type(new) is not kind:
        changed.append(f"{path}: {kind.__name__} became {type(new).__name__}")
    return new


def _to_member(value: Any, path: str, changed: list[str]) -> Any:
    """Return a converted key or member of a set; text for one that can't be hashed any more."""
    new = to_plain(value, path, changed)
    return str(value) if isinstance(new, set) else new
