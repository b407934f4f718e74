"""Export a checkpoint to a file for ``torch.load``, with filters, names and dtypes.

A Trainer's has Lightning's keys. That of a nested dict of objects has the keys of the dict, as a file of plain Fabric.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.export.options import Naming, Options, unique
from lightning_shardckpt.export.safetensors_export import ExportSource, conversion
from lightning_shardckpt.export.torch_archive import (
    ZIP64_BYTES,
    ArchivedTensor,
    Plain,
    TorchFileLayout,
    of_torch,
    stored_record,
)
from lightning_shardckpt.format.value_checks import check_unpacked
from lightning_shardckpt.sources.assemble import assemble
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_values import decode_with, no_tensor
from lightning_shardckpt.state.module_versions import METADATA, rename_versions, with_versions
from lightning_shardckpt.state.state_dicts import KEYS, is_told_apart, states_of_checkpoint
from lightning_shardckpt.storage.protocol import File
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.file_filler import Region, fill

_LAYER = re.compile(r"(.*?\.|)(\d+)\.")


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The plan of a torch file; ``changed``: the values that had to become something else."""

    archive: TorchFileLayout
    regions: list[Region]
    changed: list[str]

    @property
    def nbytes(self) -> int:
        """The bytes to write, without those that zip adds."""
        return sum(region.nbytes for region in self.regions)

    @property
    def file_nbytes(self) -> int:
        """The length of the file, but for the directory at its end."""
        return self.regions[-1].end


def plan_torch(source: ExportSource, options: Options, zip64_bytes: int = ZIP64_BYTES) -> TorchFile:
    """A file that ``torch.load`` reads by default; records of ``zip64_bytes`` get the fields of zip64.

    Raises:
        ValueError: if names collide, or an option matches nothing.
        FormatError: for a tensor of a dtype of which torch has none.
    """
    components = source.components()

    def record(component: str, key: str) -> ArchivedTensor:
        spec = components[component].tensors[key]
        dtype = options.written_as(spec.dtype) if component == "model" else spec.dtype
        return stored_record(dtype, spec.shape, (component, key))

    def decoded(value: Any) -> Any:
        return decode_with(of_torch(no_tensor), value)

    plain = Plain()
    checkpoint = assemble(source, record, decoded, optimizers=options.has_optimizer)
    _rename(checkpoint, options.naming)
    for name, value in checkpoint.get("state_dict", {}).items():
        if isinstance(value, ArchivedTensor):
            check_unpacked(value.dtype, repr(name))
    if "model" in components and len({s.holders for s in components["model"].tensors.values()}) > 1:
        for group in (group for one in checkpoint.get("optimizer_states", ()) if one for group in one["param_groups"]):
            group["params"] = in_order_of_layers(group["params"])  # a plain optimizer loads by place
    checkpoint = plain.of(_restore_keys(checkpoint, options.naming))
    archive = TorchFileLayout(checkpoint, zip64_bytes)
    return TorchFile(archive, [_convert_region(source, options, region) for region in archive.regions], plain.changed)


def write_torch(
    source: ExportSource,
    planned: TorchFile,
    file: File,
    advance: Callable[[int], object],
    *,
    tuning: Tuning = TUNING,
) -> None:
    """Fill the file, and tell ``advance`` of the bytes of tensors as they are written."""
    fill(file, planned.regions, source.tensors, planned.archive.head, advance, tuning=tuning)
    fill(file, [planned.archive.end()], source.tensors, None, lambda nbytes: None, tuning=tuning)


def _convert_region(source: ExportSource, options: Options, region: Region) -> Region:
    """The region, with a conversion where the tensor is stored in another dtype."""
    if isinstance(region.content, memoryview) or region.content[0] != "model" or not region.nbytes:
        return region
    stored = source.components()["model"].tensors[region.content[1]].dtype
    written = options.written_as(stored)
    return region if written == stored else replace(region, conversion=conversion(stored, written))


def _restore_keys(checkpoint: dict[str, Any], naming: Naming) -> dict[str, Any]:
    """Return the state with the keys it was saved under, where the names still tell which module they are of."""
    if not is_told_apart(checkpoint):
        return {key: value for key, value in checkpoint.items() if key != KEYS}
    if naming.changes_something:  # modules of which nothing is taken are not there
        names, keys = tuple(checkpoint.get("state_dict", ())), checkpoint[KEYS]
        modules = {key: prefix for key, prefix in keys["modules"].items() if any(n.startswith(prefix) for n in names)}
        checkpoint[KEYS] = {**keys, "modules": modules}
    frozen = {FROZEN: checkpoint[FROZEN]} if FROZEN in checkpoint else {}
    return states_of_checkpoint(checkpoint) | frozen


def _rename(checkpoint: dict[str, Any], naming: Naming) -> None:
    """Leave out the tensors that the filters do not take, and rename the rest."""
    state: Mapping[str, Any] = checkpoint.get("state_dict", {})
    if not naming.changes_something:
        return
    naming.check(state)
    names = unique((name, naming.new(name), id(value)) for name, value in state.items() if naming.takes(name))
    versions = rename_versions(getattr(state, METADATA, None), names)
    checkpoint["state_dict"] = with_versions({new: state[old] for new, old in names.items()}, versions)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [_rename_optimizer(one, naming) for one in checkpoint["optimizer_states"]]


def _rename_optimizer(optimizer: dict[str, Any], naming: Naming) -> dict[str, Any]:
    if not optimizer:  # a Trainer's without one
        return optimizer
    if any(isinstance(param, int) for group in optimizer["param_groups"] for param in group["params"]):
        raise ValueError(
            "an optimizer has numbers for its parameters, so that names cannot be chosen or changed; leave it out"
        )
    groups = [
        {**group, "params": [naming.new(param) for param in group["params"] if naming.takes(param)]}
        for group in optimizer["param_groups"]
    ]
    state = {naming.new(param): of for param, of in optimizer["state"].items() if naming.takes(param)}
    return {"state": state, "param_groups": groups}


def in_order_of_layers(params: list[str]) -> list[str]:
    """Return names that pipeline stages stored one after the other in the model's order: layers ascend in their places.

    >>> in_order_of_layers(["embed", "layers.0.w", "layers.2.w", "layers.1.w", "layers.3.w", "head"])
    ['embed', 'layers.0.w', 'layers.1.w', 'layers.2.w', 'layers.3.w', 'head']

    Raises:
        StateError: where that is not known, since a name that is no layer's lies between layers.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for place, param in enumerate(params):
        layer = _LAYER.match(param) if isinstance(param, str) else None
        if layer is not None:
            places.setdefault(layer[1], []).append((int(layer[2]), place))
    ordered = list(params)
    for layers in places.values():
        for (_, place), (_, old) in zip(sorted(layers, key=lambda one: one[1]), sorted(layers), strict=True):
            ordered[place] = params[old]
        between = params[min(place for _, place in layers) : max(place for _, place in layers)]
        if others := [name for name in between if _LAYER.match(name) is None]:
            raise StateError(
                f"the file would have the optimizer's state in another order than the model: {others[0]!r} is stored "
                "between the layers of pipeline stages, and a plain optimizer loads by place. Leave the optimizer out "
                "(--optimizer false), or resume from the checkpoint itself."
            )
    return ordered
