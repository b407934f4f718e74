"""Plans of whole tensors in files for other programs, and one function that writes them all.

A plan has read no tensor. A file is begun without the bytes of its tensors, which are then filled in. Here are the
plans of safetensors files; torch is needed only if dtypes are converted.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import quote

from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.format.safetensors_header import LENGTH_BYTES, OutputTensor, build_header
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.key_mapping import KeyMapping, map_names
from lightning_shardckpt.sources.source import WINDOW_BYTES, Source, read_windows
from lightning_shardckpt.state import libraries
from lightning_shardckpt.state.documents import CONFIG, CONFIGS, PEFT
from lightning_shardckpt.state.libraries import stored_names
from lightning_shardckpt.storage.local_files import WRITEBACK_BYTES, NewFile, begin_writeback, write_at
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.transfer.writer import MB

Format = Literal["torch", "safetensors", "huggingface", "peft"]
Split = Literal["one_file", "one_file_per_tensor", "chunks"]
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SIZE_PER_SHARD = 5000.0  # of chunks, in MB
_TAKES: dict[str, set[str]] = {
    "torch": {"optimizer", "dtype", "key_mapping"},
    "safetensors": {"split", "size_per_shard", "optimizer", "dtype", "key_mapping"},
    "huggingface": {"size_per_shard", "dtype", "key_mapping"},
    "peft": set(),
}
_ALIGNMENT = 64  # of the first tensor, so that programs that map the file can use it in place
_OPTIMIZER = "optimizer.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_WRITER = {"writer": "lightning-shardckpt"}  # in every safetensors file that a later export may replace
_WRITER_ENTRY, _HEAD_BYTES = json.dumps(_WRITER, separators=(",", ":"))[1:-1].encode(), 4096


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an export, as ``consolidate`` describes them; unknown and contradicting ones are ValueErrors."""

    format: Format = "torch"
    split: Split | None = None
    size_per_shard: float | None = None
    optimizer: bool | None = None
    dtype: str | None = None
    key_mapping: KeyMapping = field(default_factory=KeyMapping)

    def __post_init__(self) -> None:
        choices = {"format": get_args(Format), "split": get_args(Split), "dtype": DTYPES}
        for name, known in choices.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}")
        given = {name for name in ("split", "size_per_shard", "optimizer", "dtype") if getattr(self, name)}
        given |= set() if self.key_mapping.is_empty else {"key_mapping"}
        if refused := sorted(given - _TAKES[self.format]):
            raise ValueError(f"format {self.format!r} takes no {' and no '.join(refused)}")
        if self.size_per_shard is not None and not (self.files == "chunks" and self.size_per_shard > 0):
            raise ValueError(f"size_per_shard is a positive size in MB for split 'chunks', got {self.size_per_shard}")

    @property
    def files(self) -> Split:
        """The split into safetensors files."""
        return self.split or ("chunks" if self.format == "huggingface" else "one_file")

    @property
    def has_optimizer(self) -> bool:
        """True if the optimizers are exported, too."""
        return self.format == "torch" if self.optimizer is None else self.optimizer

    @property
    def is_file(self) -> bool:
        """True if the output is a file, not a directory."""
        is_one = self.format == "safetensors" and self.files == "one_file" and not self.has_optimizer
        return self.format == "torch" or is_one

    def output_dtype(self, dtype: str) -> str:
        """Return the dtype of a model's tensor in the output for its stored dtype, by safetensors names."""
        is_floating = dtype.startswith(("F", "BF"))
        return DTYPES[self.dtype] if self.dtype is not None and is_floating else dtype

    def select(self, stored: Source) -> Source:
        """Return the stored state under the names of the output, or raise a MismatchError of the mapping."""
        selected, problems = map_names(stored, self.key_mapping, optimizers=None if self.has_optimizer else ())
        if problems:
            raise MismatchError(f"{stored.path!r}: " + "\n  ".join(problems))
        return selected


class WholeFile(NamedTuple):
    """A file with tensors in any order, whose sources are in the table of the export.

    ``begin`` writes all but the tensors into the empty file of a descriptor, and returns where each begins.
    """

    name: str
    tensors: Sequence[OutputTensor]
    begin: Callable[[int], Sequence[int]]


@dataclass(slots=True)
class Export:
    """The plan of an export: files with tensors of a source, the content of other files by name, notes for the user."""

    source: Source
    files: list[WholeFile] = field(default_factory=list)
    documents: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def tensor(self, component: str, key: str, name: str = "", dtype: str = "") -> OutputTensor:
        """Return a whole tensor of the source for a file, by default under its key and in its dtype."""
        spec = self.source.table[component][key].spec
        return OutputTensor(name or key, dtype or spec.dtype, spec.shape, (component, key))

    def add(self, name: str, tensors: Iterable[OutputTensor], metadata: Mapping[str, str]) -> None:
        """Add a safetensors file; the widest elements come first, so that every tensor is aligned."""
        ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
        if ordered and ordered[0].dtype == "C128":
            raise FormatError(
                f"{ordered[0].name!r} is complex128, which safetensors lacks; leave it out, or write for torch"
            )
        named = ((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered)
        header, begins = build_header(named, {"format": "pt", **metadata}, alignment=_ALIGNMENT)

        def begin(file: int) -> Sequence[int]:
            write_at(file, memoryview(header), 0)
            return begins

        self.files.append(WholeFile(name, ordered, begin))


def write(
    export: Export,
    create: NewFile,
    advance: Callable[[int], Any] = lambda nbytes: None,
    *,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Write all files of an export, the config last; tensors are read, verified, converted and written by windows.

    ``advance`` is called with the number of bytes that were written.
    """
    for name, tensors, begin in export.files:
        with create(name) as file:
            places, dirty_bytes = [*begin(file)], 0
            wanted = ((*tensor.source, tensor.box) for tensor in tensors)
            for number, data in read_windows(export.source, wanted, window_bytes):
                component, key = tensors[number].source
                data = _convert(data, export.source.table[component][key].spec.dtype, tensors[number].dtype)
                write_at(file, data, places[number])
                places[number] += len(data)
                advance(len(data))
                dirty_bytes += len(data)
                if dirty_bytes >= WRITEBACK_BYTES:
                    begin_writeback(file)
                    dirty_bytes = 0
    for name in sorted(export.documents, key=lambda name: name == CONFIG):
        with create(name) as file:
            write_at(file, memoryview(export.documents[name]), 0)


def _convert(data: memoryview, stored: str, written: str) -> memoryview:
    """Return numbers of one dtype in another, as torch's ``Tensor.to`` converts them."""
    if stored == written:
        return data
    import torch  # imported here, since it takes two seconds and exports without a conversion don't need it

    from lightning_shardckpt.state.local_tensors import TORCH_DTYPES, host_bytes

    return host_bytes(torch.frombuffer(data, dtype=TORCH_DTYPES[stored]).to(TORCH_DTYPES[written]))


def is_replaceable(directory: str) -> bool:
    """Return True if a directory is empty, or an earlier export wrote all its files, as their metadata say."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    documents = {os.path.join(directory, name) for name in (*CONFIGS, _OPTIMIZER)}
    others = [path for path in paths if path not in documents and not path.endswith(".safetensors.index.json")]
    for path in others:
        with open(path, "rb") as file:
            start = file.read(LENGTH_BYTES + _HEAD_BYTES)
        if _WRITER_ENTRY not in start[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(start[:LENGTH_BYTES], "little")]:
            return False
    return bool(others or not paths)


def plan_safetensors(stored: Source, options: Options) -> Export:
    """Plan the files of a model and its optimizers, or of a model of transformers.

    Raises:
        ValueError: if no tensor is selected, or state that is wanted is not stored.
        MismatchError: if an option matches no tensor, or names collide.
    """
    export = Export(source := options.select(stored))
    if "model" not in source.table:
        raise ValueError("the checkpoint has no model")
    component, model = source.component("model"), None
    if options.format == "huggingface":
        model = libraries.pick_model(stored.document("huggingface"), component.names)
        if model is None:
            export.notes.append("there is no config.json: the checkpoint has no record of a model of transformers")
    if model is not None:
        tensors, ties = _add_model(export, stored, model, options), dict[str, str]()
    else:
        dtypes = {key: options.output_dtype(spec.dtype) for key, spec in component.tensors.items()}
        tensors, ties = [export.tensor("model", key, dtype=dtypes[key]) for key in dtypes], component.aliases
    if not tensors:
        raise ValueError("no tensor of the model is left to write")
    if other_state := sorted(source.document("model") or ()):
        listed = list_some([*map(repr, other_state)], 5)
        export.notes.append(f"state of the model that is not tensors is not in the output: {listed}")
    _add_files("model", tensors, ties, options, export)
    if options.has_optimizer:
        if (document := source.document("optimizer")) is None:
            raise ValueError("the checkpoint has no optimizer: it was saved with weights only")
        moments = source.table.get("optimizer", {})  # by <n>/<name>/<state>
        _add_files("optimizer", [export.tensor("optimizer", key) for key in moments], {}, options, export)
        export.documents[_OPTIMIZER] = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    return export


def _add_model(export: Export, stored: Source, model: Mapping[str, Any], options: Options) -> list[OutputTensor]:
    """Return the tensors that ``from_pretrained`` expects, and add the configs to the documents of the export."""
    component, kind = export.source.component("model"), model["class"]
    for name in stored.component("model").names:
        if (new := options.key_mapping(name)) not in (name, None):
            raise ValueError(
                f"from_pretrained takes the weights of {kind} by their names: for format 'huggingface', key_mapping "
                f"can leave {name!r} out, but not rename it to {new!r}"
            )
    if outside := [name for name in component.names if not name.startswith(model["prefix"])]:
        export.notes.append(f"not of the {kind}, and not in the output: {list_some([*map(repr, outside)], 5)}")
    dtype = options.output_dtype
    tensors = list(libraries.list_tensors(model, component.names, component, dtype, refuses_adapters=True))
    if twice := [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]:
        raise ValueError(f"two tensors would be called {twice[0]!r}")
    floating = (tensor.dtype for tensor in tensors if tensor.dtype in libraries.CONFIG_DTYPES)
    export.documents |= libraries.config_files(model, next(floating, None), options.dtype is not None)
    return tensors


def _add_files(
    stem: str, tensors: list[OutputTensor], ties: Mapping[str, str], options: Options, export: Export
) -> None:
    """Add the files of a model or an optimizer to an export, their index if there are several, and ties as metadata."""
    limit = int((options.size_per_shard or _SIZE_PER_SHARD) * MB) if options.files == "chunks" else sys.maxsize
    groups, names = _group_by_size(tensors, limit), [f"{stem}.safetensors"]
    if options.files == "one_file_per_tensor":
        groups = [[tensor] for tensor in tensors]
        names = [f"{stem}.{quote(tensor.name, safe='')}.safetensors" for tensor in tensors]
    elif (count := len(groups)) > 1:  # by the convention of Hugging Face
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name, group in zip(names, groups, strict=True):
        written = {tensor.name for tensor in group}
        group_ties = {name: of for name, of in ties.items() if of in written and name != "format"}
        export.add(name, group, {**_WRITER, **group_ties})
    if len(names) > 1 or options.files == "one_file_per_tensor":
        weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False)
        export.documents[f"{stem}.safetensors.index.json"] = f"{text}\n".encode()


def _group_by_size(tensors: Iterable[OutputTensor], limit: int) -> list[list[OutputTensor]]:
    """Group tensors, in their order, into one or more groups of at most ``limit`` bytes; a larger one gets its own.

    >>> def sized(n): return OutputTensor(str(n), "U8", (n,), ("model", "x"))
    >>> [[t.name for t in group] for group in _group_by_size(map(sized, (3, 4, 20, 5)), 8)]
    [['3', '4'], ['20'], ['5']]
    """
    groups, size = [list[OutputTensor]()], 0
    for tensor in tensors:
        if size + tensor.nbytes > limit and size > 0:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def plan_adapters(stored: Source) -> Export:
    """Plan the files that PEFT's ``save_pretrained`` writes, in folders for adapters other than "default"."""
    export, where, document = Export(stored), f"checkpoint {stored.path!r}", stored.document("peft")
    if document is None:
        raise FormatError(f"{where} has no adapters of PEFT: no {PEFT}, which is saved with a module that PEFT wrapped")
    adapters = document["adapters"]
    if len({one["prefix"] for one in adapters}) != 1:
        listed = ", ".join(f"{one['name']!r} of the model {one['prefix']!r}" for one in adapters)
        raise FormatError(f"{where} does not have adapters of exactly one model: it has {listed}")
    keys = stored.component("model").names
    for one in adapters:
        folder = "" if one["name"] == "default" else f"{one['name']}/"
        names = stored_names(one, keys.keys())
        if not any(".lora_" in name or name.startswith("lora_") for name in names):
            raise FormatError(f"{where} has no tensors of adapter {one['name']!r} below {one['prefix']!r}")
        export.add(folder + ADAPTER_WEIGHTS, (export.tensor("model", keys[live], n) for n, live in names.items()), {})
        export.documents[folder + ADAPTER_CONFIG] = one["config"].encode()
    return export
