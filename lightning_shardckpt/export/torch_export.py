"""Export to a file for ``torch.load``, with selection, renaming and dtypes.

The file of a Trainer's checkpoint has Lightning's keys. The file of a nested dict of objects has the keys of the dict,
like a file of plain Fabric.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.options import Options, check_unique, new_names, rename_params
from lightning_shardckpt.export.safetensors_export import plan_conversion
from lightning_shardckpt.export.torch_archive import (
    ZIP64_BYTES,
    ArchivedTensor,
    Simplifier,
    TorchFileLayout,
    archive_stored,
)
from lightning_shardckpt.format.value_checks import check_unpacked
from lightning_shardckpt.sources.assemble import assemble
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_tree import decode, refuse_tensor
from lightning_shardckpt.state.module_versions import METADATA, add_versions, rename_versions
from lightning_shardckpt.state.state_dicts import KEYS, has_places, states_of_checkpoint
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.file_filler import Region, fill

_LAYER = re.compile(r"(.*?\.|)(\d+)\.")


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The plan of a torch file; ``changed`` describes values that had to be converted or left out."""

    archive: TorchFileLayout
    regions: list[Region]
    changed: list[str]

    @property
    def nbytes(self) -> int:
        """Size of the content in bytes, without zip's own bytes."""
        return sum(region.nbytes for region in self.regions)


def plan_torch(source: Source, options: Options, zip64_bytes: int = ZIP64_BYTES) -> TorchFile:
    """Plan a file that ``torch.load`` reads by default.

    Args:
        source: the checkpoint.
        options: the options of the export.
        zip64_bytes: records of this size or more get zip64 fields.

    Raises:
        ValueError: if names collide, or an option matches no tensor.
        FormatError: if a tensor has a dtype that torch lacks.
    """
    components = source.components()

    def record(component: str, key: str) -> ArchivedTensor:
        spec = components[component].tensors[key]
        dtype = options.output_dtype(spec.dtype) if component == "model" else spec.dtype
        return archive_stored(dtype, spec.shape, (component, key))

    def decode_plain(value: Any) -> Any:
        return decode(value, refuse_tensor, makes_configs=False)

    simplifier = Simplifier()
    checkpoint = assemble(source, record, decode_plain, optimizers=options.has_optimizer)
    _rename(checkpoint, options.mapping)
    for name, value in checkpoint.get("state_dict", {}).items():
        if isinstance(value, ArchivedTensor):
            check_unpacked(value.dtype, repr(name))
    if "model" in components and len({s.holders for s in components["model"].tensors.values()}) > 1:
        for optimizer in filter(None, checkpoint.get("optimizer_states", ())):
            for group in optimizer["param_groups"]:
                group["params"] = sort_by_layer(group["params"])  # a plain optimizer loads by position
    checkpoint = simplifier.simplify(_restore_keys(checkpoint, options.mapping))
    archive = TorchFileLayout(checkpoint, zip64_bytes)
    regions = [_convert_region(source, options, region) for region in archive.regions]
    return TorchFile(archive, regions, simplifier.changed)


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
    fill(file, plan.regions, source.tensors, plan.archive.head, advance, tuning=tuning)
    fill(file, [plan.archive.end()], source.tensors, None, lambda nbytes: None, tuning=tuning)


def _convert_region(source: Source, options: Options, region: Region) -> Region:
    """Return the region, with a conversion if the tensor is stored in another dtype."""
    if isinstance(region.content, memoryview) or region.content[0] != "model" or not region.nbytes:
        return region
    stored = source.components()["model"].tensors[region.content[1]].dtype
    written = options.output_dtype(stored)
    return region if written == stored else replace(region, conversion=plan_conversion(stored, written))


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
