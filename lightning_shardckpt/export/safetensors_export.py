"""Export to safetensors files for other programs: planned from the indexes alone, then filled.

Exporting a checkpoint of this package needs torch only if dtypes are converted.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.export.options import Options, check_unique, new_names, rename_params
from lightning_shardckpt.format import safetensors_files
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.safetensors_files import OutputFile, OutputTensor
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state import hf_directory
from lightning_shardckpt.state.documents import CONFIGS
from lightning_shardckpt.storage.local.local_outputs import NewFile
from lightning_shardckpt.storage.local.posix import write_at
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.file_filler import DtypeConversion, Region, fill
from lightning_shardckpt.transfer.writer import MB

_OPEN_FILES = 64  # at a time; the usual limit of a process is 1,024
_OPTIMIZER = "optimizer.json"
_SUFFIXES = (".safetensors", ".safetensors.index.json")
_WRITTEN_LAST = (".safetensors.index.json", "config.json")
_METADATA = {"format": "pt", "writer": "lightning-shardckpt"}
_WRITER_ENTRY, _HEAD_BYTES = b'"writer":"lightning-shardckpt"', 4096  # the metadata come first in a header


@dataclass(slots=True)
class Export:
    """The plan of an export: safetensors files, the content of other files by name, and notes for the user."""

    tensor_files: list[OutputFile]
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_export(stored: Source, options: Options) -> Export:
    """Plan the files of an export, and their contents.

    Raises:
        ValueError: if names collide, an option matches no tensor, or no tensor is selected.
        FormatError: naming a tensor that safetensors cannot hold.
    """
    export = Export([])
    tensors, ties = _model_tensors(stored, options, export)
    export.tensor_files = _plan_files("model", tensors, ties, options, export)
    if options.has_optimizer:
        state, document = _optimizer_tensors(stored, options)
        export.tensor_files += _plan_files("optimizer", state, {}, options, export)
        export.files[_OPTIMIZER] = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    return export


# ── tensors and their names ───────────────────────────────────────────────────────────────────────────────────────


def _model_tensors(stored: Source, options: Options, export: Export) -> tuple[list[OutputTensor], dict[str, str]]:
    """Return the tensors of the model, and its ties: further name -> name under which the tensor is written."""
    component = stored.components().get("model")
    if component is None:
        raise ValueError("the checkpoint has no model")
    keys = {**{key: key for key in component.tensors}, **component.aliases}
    names = new_names(options.mapping, keys)
    other_state = sorted(stored.document("model") or ())
    if other_state:
        listed = list_some([*map(repr, other_state)], 5)
        export.notes.append(f"state of the model that is not tensors is not in the output: {listed}")
    if options.format == "huggingface":
        model = hf_directory.pick_model(stored.document("huggingface"), names)
        if model is not None:
            for name, new in names.items():
                if name != new:
                    raise ValueError(
                        f"from_pretrained takes the weights of {model.recorded['class']} by their names: for format "
                        f"'huggingface', key_mapping can leave {name!r} out, but not rename it to {new!r}"
                    )
            return _hugging_face_tensors({name: keys[name] for name in names}, component, model, options, export), {}
        export.notes.append(
            "the checkpoint has no record of a model of transformers, so there is no config.json, and tensors have "
            "their names in the checkpoint"
        )
    new_by_key: dict[str, list[str]] = {}
    for name, new in names.items():
        new_by_key.setdefault(keys[name], []).append(new)
    check_unique((name, new, keys[name]) for name, new in names.items())
    tensors, ties = list[OutputTensor](), dict[str, str]()
    for key, (first, *others) in new_by_key.items():
        spec = component.tensors[key]
        tensors.append(OutputTensor(first, options.output_dtype(spec.dtype), spec.shape, ("model", key)))
        ties |= {other: first for other in others if other != first}
    return _check_not_empty(tensors), ties


def _hugging_face_tensors(
    selected: Mapping[str, str], component: Component, model: hf_directory.Model, options: Options, export: Export
) -> list[OutputTensor]:
    """Return the tensors that ``from_pretrained`` expects, and add the configs to ``export.files``."""
    names_by_key: dict[str, list[str]] = {}
    for name, key in selected.items():
        if (model_name := model.own(name)) is not None:
            names_by_key.setdefault(key, []).append(model_name)
    outside = [name for name in selected if not name.startswith(model.prefix)]
    if outside:
        listed = list_some([*map(repr, outside)], 5)
        export.notes.append(f"not of the {model.recorded['class']}, and not in the output: {listed}")
    model.check_adapter([name for names in names_by_key.values() for name in names])
    tensors, written = [], list[tuple[str, str, object]]()
    for key, names in names_by_key.items():
        spec = component.tensors[key]
        for name in model.output_names(names):
            whole = OutputTensor(name, options.output_dtype(spec.dtype), spec.shape, ("model", key))
            for part in model.parts(whole):
                written.append((name, part.name, (key, part.box, name)))
                tensors.append(part)
    check_unique(written)
    floating = (tensor.dtype for tensor in tensors if tensor.dtype in hf_directory.CONFIG_DTYPES)
    export.files |= model.files(next(floating, None), options.dtype is not None)
    return _check_not_empty(tensors)


def _check_not_empty(tensors: list[OutputTensor]) -> list[OutputTensor]:
    if not tensors:
        raise ValueError("no tensor of the model is left to write")
    return tensors


def _optimizer_tensors(stored: Source, options: Options) -> tuple[list[OutputTensor], dict[str, Any]]:
    """Return the optimizers' tensors, named ``<n>/<name>/<state>``, and their other state, as in FORMAT.md."""
    component, document = stored.components().get("optimizer"), stored.document("optimizer")
    if document is None:
        raise ValueError("the checkpoint has no optimizer: it was saved with weights only")
    if not options.mapping.is_empty and any(optimizer["numbered"] for optimizer in document.values()):
        raise ValueError("the optimizers have numbers for their parameters, so names cannot be chosen or changed")
    tensors, names = [], list[tuple[str, str, object]]()
    for key, spec in component.tensors.items() if component is not None else ():
        number, _, rest = key.partition("/")
        param, _, state = rest.rpartition("/")
        if (new := options.mapping(param)) is not None:
            tensors.append(OutputTensor(f"{number}/{new}/{state}", spec.dtype, spec.shape, ("optimizer", key)))
            names.append((key, tensors[-1].name, key))
    check_unique(names)
    return tensors, {number: _rename_document(optimizer, options.mapping) for number, optimizer in document.items()}


def _rename_document(optimizer: Mapping[str, Any], mapping: KeyMapping) -> dict[str, Any]:
    """Return an optimizer's document with the selected parameters under their new names."""

    def rename(item: Mapping[str, Any]) -> dict[str, Any]:
        return {**item, "params": rename_params(mapping, item["params"])}

    groups = {number: rename(group) for number, group in optimizer["groups"].items()}
    values = {name: [rename(item) for item in shared] for name, shared in optimizer["values"].items()}
    return {**optimizer, "groups": groups, "values": values}


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan_files(
    stem: str, tensors: list[OutputTensor], ties: Mapping[str, str], options: Options, export: Export
) -> list[OutputFile]:
    """Return the files of a model or an optimizer; add their index to ``export.files`` if there may be several."""
    if options.files == "chunks":
        groups = safetensors_files.group_by_size(tensors, int(options.chunk_mb * MB)) or [[]]
        names = safetensors_files.name_chunks(stem, len(groups))
    elif options.files == "one_file":
        groups, names = [tensors], [f"{stem}.safetensors"]
    else:
        groups = [[tensor] for tensor in tensors]
        names = [safetensors_files.name_tensor_file(stem, tensor.name) for tensor in tensors]
    files = []
    for name, group in zip(names, groups, strict=True):
        group_names = {tensor.name for tensor in group}
        group_ties = {name: written for name, written in ties.items() if written in group_names and name != "format"}
        files.append(safetensors_files.plan_file(name, group, {**_METADATA, **group_ties}))
    if len(files) > 1 or options.files == "one_file_per_tensor":
        export.files[f"{stem}.safetensors.index.json"] = safetensors_files.build_index(files)
    return files


def write_file(
    stored: Source, export: Export, file: int, advance: Callable[[int], Any], *, tuning: Tuning = TUNING
) -> None:
    """Fill the single file of an export; call ``advance`` with the number of bytes that were written.

    Raises:
        CorruptionError: naming file, tensor and rank.
    """
    fill(file, _regions(stored, export.tensor_files), stored.tensors, advance, tuning=tuning)


def write_directory(
    stored: Source, export: Export, create: NewFile, advance: Callable[[int], Any], *, tuning: Tuning = TUNING
) -> None:
    """Write all files of an export into an empty directory; the file that completes it is written last.

    Args:
        stored: the checkpoint.
        export: the plan.
        create: creates a file in the directory.
        advance: called with the number of bytes that were written.
        tuning: buffer sizes and the number of threads.

    Raises:
        CorruptionError: naming file, tensor and rank.
        FormatError: if two files would have the same name.
    """
    tensor_file_names = {file.name for file in export.tensor_files}
    for name in export.files:
        if name in tensor_file_names:
            raise FormatError(f"two files would be called {name!r}")
    remaining = deque(export.tensor_files)
    while remaining:
        with ExitStack() as stack:
            batch, files = list[OutputFile](), list[int]()
            while remaining and len(batch) < _OPEN_FILES:
                batch.append(remaining.popleft())
                files.append(stack.enter_context(create(batch[-1].name)))
            fill(files, _regions(stored, batch), stored.tensors, advance, tuning=tuning)
    for name in sorted(export.files, key=lambda name: (name in _WRITTEN_LAST, name.endswith(_WRITTEN_LAST))):
        content = export.files[name]
        with create(name) as file:
            write_at(file, memoryview(content), 0)


def tensor_nbytes(export: Export) -> int:
    """Return the size of all tensors of an export in bytes."""
    return sum(tensor.nbytes for file in export.tensor_files for tensor in file.tensors)


def _regions(stored: Source, batch: Sequence[OutputFile]) -> list[Region]:
    """Return the regions of some files, which are numbered in the order of ``batch``."""
    regions: list[Region] = []
    for number, file in enumerate(batch):
        regions.append(Region(0, len(file.header), memoryview(file.header), number))
        for tensor, begin in zip(file.tensors, file.begins, strict=True):
            stored_dtype = stored.tensors.spec(*tensor.source).dtype
            is_converted = stored_dtype != tensor.dtype and prod(tensor.shape) > 0
            conversion = plan_conversion(stored_dtype, tensor.dtype) if is_converted else None
            regions.append(Region(begin, tensor.nbytes, tensor.source, number, conversion, tensor.box))
    return regions


@cache
def plan_conversion(stored: str, written: str) -> DtypeConversion:
    """Return the conversion of bytes from one dtype to another, with the results of torch's ``Tensor.to``."""
    import torch  # imported here, since it takes two seconds and exports without a conversion don't need it

    from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, host_bytes

    def convert(data: memoryview) -> memoryview:
        return host_bytes(torch.frombuffer(data, dtype=TORCH_DTYPES[stored]).to(TORCH_DTYPES[written]))

    return DtypeConversion(convert, DTYPE_BYTES[stored], DTYPE_BYTES[written])


def is_replaceable(directory: str) -> bool:
    """Return True if a directory is empty, or an earlier export wrote all its files."""
    names = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    others = {os.path.join(directory, name) for name in (*CONFIGS, _OPTIMIZER)}
    if not all(name in others or name.endswith(_SUFFIXES) for name in names):
        return False
    tensor_files = [name for name in names if name.endswith(_SUFFIXES[0])]
    return all(map(_was_exported, tensor_files)) if tensor_files else not names


def _was_exported(path: str) -> bool:
    """Return True if the metadata of a safetensors file name an export as its writer."""
    with open(path, "rb") as file:
        start = file.read(8 + _HEAD_BYTES)
    return _WRITER_ENTRY in start[8 : 8 + int.from_bytes(start[:8], "little")]
