"""Export to a file for ``torch.load``, with selection, renaming and dtypes.

The file of a Trainer's checkpoint has Lightning's keys. The file of a nested dict of objects has the keys of the dict,
like a file of plain Fabric. ``torch.save`` writes it without the bytes of its tensors, which are then filled in; so it
has no checksums of zip.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_shardckpt.compat.torch_tensors import fake_tensors
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.options import Options, check_unique, new_names, rename_params
from lightning_shardckpt.export.plain_values import Simplifier
from lightning_shardckpt.export.safetensors_export import plan_conversion
from lightning_shardckpt.format.value_checks import check_unpacked
from lightning_shardckpt.sources.assemble import assemble
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_tree import decode, refuse_tensor
from lightning_shardckpt.state.module_versions import METADATA, add_versions, rename_versions
from lightning_shardckpt.state.state_dicts import KEYS, has_places, states_of_checkpoint
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, host_bytes
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.file_filler import Region, fill

_LAYER = re.compile(r"(.*?\.|)(\d+)\.")
_LOCAL_HEADER_BYTES = 30  # of a record of a zip archive, before its name and its extra field


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The plan of a torch file.

    Attributes:
        checkpoint: the value to save, with fake tensors for stored ones.
        regions: the bytes of its tensors, in the order in which ``torch.save`` numbers them; all begin at 0.
        changed: descriptions of values that had to be converted or left out.
    """

    checkpoint: Any
    regions: list[Region]
    changed: list[str]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(region.nbytes for region in self.regions)


def plan_torch(source: Source, options: Options) -> TorchFile:
    """Plan a file that ``torch.load`` reads by default.

    Args:
        source: the checkpoint.
        options: the options of the export.

    Raises:
        ValueError: if names collide, or an option matches no tensor.
        FormatError: if a tensor has a dtype that torch lacks.
    """
    components, make = source.components(), fake_tensors()
    stored = dict[int, tuple[torch.Tensor, str, Region]]()  # by id of the fake tensor: it, its stored dtype, its bytes

    def record(component: str, key: str) -> torch.Tensor:
        spec = components[component].tensors[key]
        dtype = options.output_dtype(spec.dtype) if component == "model" else spec.dtype
        fake = make(spec.shape, TORCH_DTYPES.get(dtype, torch.uint8))
        region = Region(0, fake.nbytes, (component, key))
        if dtype != spec.dtype and region.nbytes:
            region = replace(region, conversion=plan_conversion(spec.dtype, dtype))
        stored[id(fake)] = fake, dtype, region
        return fake

    def decode_plain(value: Any) -> Any:
        return decode(value, refuse_tensor, makes_configs=False)

    simplifier = Simplifier()
    checkpoint = assemble(source, record, decode_plain, optimizers=options.has_optimizer)
    _rename(checkpoint, options.mapping)
    for name, value in checkpoint.get("state_dict", {}).items():
        if id(value) in stored:
            check_unpacked(stored[id(value)][1], repr(name))
    if "model" in components and len({s.holders for s in components["model"].tensors.values()}) > 1:
        for optimizer in filter(None, checkpoint.get("optimizer_states", ())):
            for group in optimizer["param_groups"]:
                group["params"] = sort_by_layer(group["params"])  # a plain optimizer loads by position
    checkpoint = simplifier.simplify(_restore_keys(checkpoint, options.mapping))
    tensors = {id(tensor): tensor for tensor in _tensors_in(checkpoint)}
    regions = [stored[key][2] if key in stored else _region_of(tensor) for key, tensor in tensors.items()]
    return TorchFile(checkpoint, regions, simplifier.changed)


def write_torch(
    source: Source,
    plan: TorchFile,
    file: int,
    advance: Callable[[int], object],
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Write the planned file; call ``advance`` with the number of bytes that were written.

    Raises:
        CorruptionError: naming file, tensor and rank.
    """
    with open(file, "wb", closefd=False) as unfilled, torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(plan.checkpoint, unfilled)
    begins = _find_records(file, plan.regions)
    regions = [replace(region, begin=begin) for region, begin in zip(plan.regions, begins, strict=True)]
    fill(file, regions, source.tensors, advance, tuning=tuning)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value in the order in which they are pickled. They have storages of their own."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _region_of(tensor: torch.Tensor) -> Region:
    content = host_bytes(tensor)
    return Region(0, len(content), content)


def _find_records(file: int, regions: list[Region]) -> list[int]:
    """Return where the bytes of each tensor begin in a file of ``torch.save``."""
    begins = []
    with open(file, "rb", closefd=False) as raw, zipfile.ZipFile(raw) as archive:
        count = sum("/data/" in name for name in archive.namelist())
        sizes = [archive.getinfo(f"archive/data/{number}").file_size for number in range(count)]
        if sizes != [region.nbytes for region in regions]:
            raise StateError("torch.save wrote other tensors than were planned: please report this")
        for number in range(count):
            header = archive.getinfo(f"archive/data/{number}").header_offset
            raw.seek(header + _LOCAL_HEADER_BYTES - 4)
            name_bytes, extra_bytes = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            begins.append(header + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    return begins


def _restore_keys(checkpoint: dict[str, Any], mapping: KeyMapping) -> dict[str, Any]:
    """Return the state under the keys of the save, if the names still determine the module of each tensor."""
    if not has_places(checkpoint):
        return {key: value for key, value in checkpoint.items() if key != KEYS}
    if not mapping.is_empty:  # modules without a selected tensor are left out
        names, keys = tuple(checkpoint.get("state_dict", ())), checkpoint[KEYS]
        modules = {key: prefix for key, prefix in keys["modules"].items() if any(n.startswith(prefix) for n in names)}
        checkpoint[KEYS] = {**keys, "modules": modules}
    frozen = {FROZEN: checkpoint[FROZEN]} if FROZEN in checkpoint else {}
    return states_of_checkpoint(checkpoint) | frozen


def _rename(checkpoint: dict[str, Any], mapping: KeyMapping) -> None:
    """Remove the tensors that are left out, and rename the others, in place."""
    state: Mapping[str, Any] = checkpoint.get("state_dict", {})
    if mapping.is_empty:
        return
    names = check_unique((name, new, id(state[name])) for name, new in new_names(mapping, state).items())
    versions = rename_versions(getattr(state, METADATA, None), names)
    checkpoint["state_dict"] = add_versions({new: state[old] for new, old in names.items()}, versions)
    if "optimizer_states" in checkpoint:
        states = checkpoint["optimizer_states"]
        checkpoint["optimizer_states"] = [_rename_optimizer(state, mapping) for state in states]


def _rename_optimizer(optimizer: dict[str, Any], mapping: KeyMapping) -> dict[str, Any]:
    if not optimizer:  # of a Trainer without an optimizer
        return optimizer
    if any(isinstance(param, int) for group in optimizer["param_groups"] for param in group["params"]):
        raise ValueError(
            "an optimizer has numbers for its parameters, so that names cannot be chosen or changed; leave it out"
        )
    groups = [{**group, "params": rename_params(mapping, group["params"])} for group in optimizer["param_groups"]]
    named = [(mapping(param), values) for param, values in optimizer["state"].items()]
    state = {new: values for new, values in named if new is not None}
    return {"state": state, "param_groups": groups}


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
