"""Export a checkpoint to safetensors files for other programs: planned from names alone, then filled.

No torch, unless a dtype is converted: from a checkpoint of this package, nothing else needs it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Protocol

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.export.options import Naming, Options, unique
from lightning_shardckpt.format import safetensors_files
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.safetensors_files import OutputFile, OutputTensor
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.assemble import StoredCheckpoint, StoredState
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.state import hf_directory
from lightning_shardckpt.state.documents import CONFIGS
from lightning_shardckpt.state.json_values import decode_with
from lightning_shardckpt.storage.protocol import Contents, File, NewFile
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.file_filler import DtypeConversion, Region, fill
from lightning_shardckpt.transfer.whole_tensors import StoredTensors
from lightning_shardckpt.transfer.writer import MB

_OPEN_FILES = 64  # at a time; a process may often have 1,024
_LISTED = 5
_OPTIMIZER = "optimizer.json"
_WRITTEN = (".safetensors", ".safetensors.index.json")
_LAST = (".safetensors.index.json", "config.json")
_METADATA = {"format": "pt", "writer": "lightning-shardckpt"}
_MARK, _HEAD_BYTES = b'"writer":"lightning-shardckpt"', 4096  # the metadata come first in a header


class ExportSource(StoredState, Protocol):
    """A checkpoint of any format, opened."""

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in files."""


class ShardedCheckpoint(StoredCheckpoint):
    """An open checkpoint of this package, as an export source."""

    def trainer(self, stored: Callable[[str], Any]) -> dict[str, Any]:
        """The trainer's state, with records of a file for ``torch.load`` in place of tensors."""
        from lightning_shardckpt.export.torch_archive import of_torch  # torch, which other exports do without

        state: dict[str, Any] = decode_with(of_torch(stored), self.document("trainer") or {})
        return state


@dataclass(slots=True)
class Export:
    """The plan of an export: containers with their stems' indexes, other files, and notes for the user."""

    containers: list[OutputFile]
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_export(stored: ExportSource, options: Options) -> Export:
    """Plan the files of an export, and their contents.

    Raises:
        ValueError: if names collide, an option matches nothing, or leaves nothing.
        FormatError: naming a tensor that safetensors cannot hold.
    """
    export = Export([])
    tensors, ties = _model_tensors(stored, options, export)
    export.containers = _lay_out_files("model", tensors, ties, options, export)
    if options.has_optimizer:
        state, document = _optimizer_tensors(stored, options)
        export.containers += _lay_out_files("optimizer", state, {}, options, export)
        export.files[_OPTIMIZER] = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    return export


# ── tensors and their names ───────────────────────────────────────────────────────────────────────────────────────


def _model_tensors(stored: ExportSource, options: Options, export: Export) -> tuple[list[OutputTensor], dict[str, str]]:
    """The tensors of the model, and further names of them: of each, the one under which it is written."""
    component = stored.components().get("model")
    if component is None:
        raise ValueError("the checkpoint has no model")
    naming = options.naming
    names = {**{key: key for key in component.tensors}, **component.aliases}
    taken = {name: key for name, key in names.items() if naming.takes(name)}
    left = sorted(stored.document("model") or ())
    if left:
        export.notes.append(f"state of the model that is not tensors is not in the output: {_some(left)}")
    if options.format == "huggingface":
        model = hf_directory.pick(stored.document("huggingface"), naming.strip_prefix)
        if model is not None:
            replace(naming, mapping=KeyMapping()).check(names)
            return _for_hugging_face(taken, component, model, options, export), {}
        export.notes.append(
            "the checkpoint does not tell of a model of transformers, so there is no config.json, and tensors have "
            "their names in the checkpoint"
        )
    naming.check(names)
    by_key: dict[str, list[str]] = {}
    for name, key in taken.items():
        by_key.setdefault(key, []).append(name)
    unique((name, naming.new(name), key) for name, key in taken.items())
    tensors, ties = list[OutputTensor](), dict[str, str]()
    for key, (first, *others) in by_key.items():
        spec = component.tensors[key]
        tensor = OutputTensor(naming.new(first), options.written_as(spec.dtype), spec.shape, ("model", key))
        tensors.append(tensor)
        ties |= {naming.new(other): tensor.name for other in others if naming.new(other) != tensor.name}
    return _refuse_nothing(tensors), ties


def _for_hugging_face(
    taken: Mapping[str, str], component: Component, model: hf_directory.Model, options: Options, export: Export
) -> list[OutputTensor]:
    """The tensors as ``from_pretrained`` takes them; and the configs."""
    naming = replace(options.naming, include=(), exclude=(), strip_prefix="")
    own: dict[str, list[str]] = {}
    for name, key in taken.items():
        if (found := model.own(name)) is not None:
            own.setdefault(key, []).append(found)
    outside = [name for name in taken if not name.startswith(model.prefix)]
    if outside:
        export.notes.append(f"not of the {model.recorded['class']}, and not in the output: {_some(outside)}")
    model.check_adapter([name for names in own.values() for name in names])
    tensors, parts = [], list[tuple[str, str, object]]()
    for key, names in own.items():
        spec = component.tensors[key]
        for name in model.kept(names):
            whole = OutputTensor(name, options.written_as(spec.dtype), spec.shape, ("model", key))
            for part in model.parts(whole):
                new = OutputTensor(naming.new(part.name), part.dtype, part.shape, part.source, part.box)
                parts.append((part.name, new.name, (key, part.box, name)))
                tensors.append(new)
    naming.check([name for name, _, _ in parts])
    unique(parts)
    floating = (tensor.dtype for tensor in tensors if tensor.dtype in hf_directory.CONFIG_DTYPES)
    export.files |= model.files(next(floating, None), options.dtype is not None)
    return _refuse_nothing(tensors)


def _refuse_nothing(tensors: list[OutputTensor]) -> list[OutputTensor]:
    if not tensors:
        raise ValueError("no tensor of the model is left to write")
    return tensors


def _optimizer_tensors(stored: ExportSource, options: Options) -> tuple[list[OutputTensor], dict[str, Any]]:
    """The state of optimizers that is tensors, ``<n>/<name>/<state>``, and the rest, as FORMAT.md has it."""
    component, document = stored.components().get("optimizer"), stored.document("optimizer")
    if document is None:
        raise ValueError("the checkpoint has no optimizer: it was saved with weights only")
    naming = options.naming
    if naming.changes_something and any(one["numbered"] for one in document.values()):
        raise ValueError("the optimizers have numbers for their parameters, so names cannot be chosen or changed")
    tensors, names = [], list[tuple[str, str, object]]()
    for key, spec in component.tensors.items() if component is not None else ():
        number, _, rest = key.partition("/")
        param, _, state = rest.rpartition("/")
        if naming.takes(param):
            tensors.append(
                OutputTensor(f"{number}/{naming.new(param)}/{state}", spec.dtype, spec.shape, ("optimizer", key))
            )
            names.append((key, tensors[-1].name, key))
    unique(names)
    return tensors, {number: _rename_document(one, naming) for number, one in document.items()}


def _rename_document(optimizer: Mapping[str, Any], naming: Naming) -> dict[str, Any]:
    """An optimizer's document with the new names of the parameters that are taken."""

    def new(item: Mapping[str, Any]) -> dict[str, Any]:
        return {**item, "params": [naming.new(param) for param in item["params"] if naming.takes(param)]}

    groups = {number: new(group) for number, group in optimizer["groups"].items()}
    values = {name: [new(item) for item in shared] for name, shared in optimizer["values"].items()}
    return {**optimizer, "groups": groups, "values": values}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lay_out_files(
    stem: str, tensors: list[OutputTensor], ties: Mapping[str, str], options: Options, export: Export
) -> list[OutputFile]:
    """The files of a model or an optimizer; their index, if there may be several, becomes one of the other files."""
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
        here = {tensor.name for tensor in group}
        also = {other: of for other, of in ties.items() if of in here and other != "format"}
        files.append(safetensors_files.plan_file(name, group, {**_METADATA, **also}))
    if len(files) > 1 or options.files == "one_file_per_tensor":
        export.files[f"{stem}.safetensors.index.json"] = safetensors_files.build_index(files)
    return files


def write_file(
    stored: ExportSource, export: Export, file: File, advance: Callable[[int], Any], *, tuning: Tuning = TUNING
) -> None:
    """Fill the one file of an export, and tell ``advance`` of the bytes as they are written."""
    fill(file, _regions(stored, export.containers), stored.tensors, None, advance, tuning=tuning)


def write_directory(
    stored: ExportSource, export: Export, new: NewFile, advance: Callable[[int], Any], *, tuning: Tuning = TUNING
) -> None:
    """Write all files of an export into an empty directory; the one that makes it whole comes last."""
    ours = {one.name for one in export.containers}
    for name in export.files:
        if name in ours:
            raise FormatError(f"two files would be called {name!r}")
    containers = deque(export.containers)
    while containers:
        with ExitStack() as stack:
            batch, files = list[OutputFile](), list[File]()
            while containers and len(batch) < _OPEN_FILES:
                batch.append(containers.popleft())
                files.append(stack.enter_context(new(batch[-1].name, _file_nbytes(batch[-1]))))
                if not isinstance(files[-1], int):
                    break  # its parts are in memory
            fill(files, _regions(stored, batch), stored.tensors, None, advance, tuning=tuning)
    for name, content in sorted(export.files.items(), key=lambda one: (one[0] in _LAST, one[0].endswith(_LAST))):
        with new(name, len(content)) as file:
            fill(file, [Region(0, len(content), 0, memoryview(content))], stored.tensors, None, lambda nbytes: None)


def _file_nbytes(one: OutputFile) -> int:
    return len(one.header) + sum(tensor.nbytes for tensor in one.tensors)


def nbytes(export: Export) -> int:
    """Return how much there is to write, but for headers and small files."""
    return sum(tensor.nbytes for one in export.containers for tensor in one.tensors)


def file_nbytes(export: Export) -> int:
    """Return how long the one file of an export is."""
    return sum(map(_file_nbytes, export.containers))


def _regions(stored: ExportSource, batch: Sequence[OutputFile]) -> list[Region]:
    """Return the regions of some files, by number."""
    regions: list[Region] = []
    for number, one in enumerate(batch):
        regions.append(Region(0, len(one.header), 0, memoryview(one.header), number))
        for tensor, begin in zip(one.tensors, one.begins, strict=True):
            change = _conversion(stored.tensors.spec(*tensor.source).dtype, tensor)
            regions.append(Region(begin, tensor.nbytes, 0, tensor.source, number, change, tensor.box))
    return regions


def _conversion(stored: str, tensor: OutputTensor) -> DtypeConversion | None:
    return None if stored == tensor.dtype or not prod(tensor.shape) else conversion(stored, tensor.dtype)


@cache
def conversion(stored: str, written: str) -> DtypeConversion:
    """Return how bytes of one dtype become those of another, as torch's ``Tensor.to`` does it.

    Args:
        stored: the one dtype, as safetensors calls it.
        written: the other one.
    """
    import torch  # it takes two seconds, and nothing else here needs it

    from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, host_bytes

    def convert(data: memoryview) -> memoryview:
        return host_bytes(torch.frombuffer(data, dtype=TORCH_DTYPES[stored]).to(TORCH_DTYPES[written]))

    return DtypeConversion(convert, DTYPE_BYTES[stored], DTYPE_BYTES[written])


def is_replaceable(contents: Contents) -> bool:
    """Return whether a directory holds nothing but files that an export may have written."""
    if not all(name in (*CONFIGS, _OPTIMIZER) or name.endswith(_WRITTEN) for name in contents.names):
        return False
    tensors = [name for name in contents.names if name.endswith(_WRITTEN[0])]
    return not contents.names or (bool(tensors) and all(_is_of_an_export(contents.head, name) for name in tensors))


def _is_of_an_export(head: Callable[[str, int], bytes], name: str) -> bool:
    """Return whether a file of safetensors says that an export wrote it."""
    start = head(name, 8 + _HEAD_BYTES)
    return _MARK in start[8 : 8 + int.from_bytes(start[:8], "little")]
