"""Opening the source at a path, of any format, the same on all ranks; directories of Hugging Face, too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError, MismatchError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import check_file_name, check_text, shown
from lightning_shardckpt.sources.dcp import open_dcp
from lightning_shardckpt.sources.detect import (
    ADAPTERS,
    BIN,
    DCP,
    HUB_DIRECTORY,
    HUB_WEIGHTS,
    INDEX,
    INDEX_FILE,
    SAFE,
    SAFETENSORS,
    detect_format,
    files_of_slices,
    indexes,
    is_safetensors,
    only_index,
)
from lightning_shardckpt.sources.did_you_mean import READABLE, explain_missing
from lightning_shardckpt.sources.foreign_source import (
    ForeignTensor,
    ForeignTensors,
    close_on_error,
    foreign_source,
    tensors_of,
)
from lightning_shardckpt.sources.source import Source, sharded_source
from lightning_shardckpt.sources.torch_save import open_torch_files
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader, Storage, read_all
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.system.text import count_text
from lightning_shardckpt.transfer.reader import Checkpoint


class LiveState(Protocol):
    """The live state of a load, whose description may differ between ranks."""

    def look(self) -> Any:
        """Return this rank's view of the state, as JSON."""

    def agree(self, views: list[Any]) -> Any:
        """Return what follows from the views of all ranks, as JSON. Runs on rank 0."""

    def take(self, answer: Any) -> None:
        """Take the result of ``agree``, on every rank."""


@contextmanager
def open_on_ranks(
    path: str,
    *,
    ranks: Ranks,
    storage: Storage,
    verify: bool = True,
    weights_only: bool = True,
    live: LiveState | None = None,
) -> Iterator[Source]:
    """Open the source at ``path``, the same on all ranks.

    Collective: every rank of ``ranks`` must enter it. While ranks see different checkpoints, they look again, for as
    long as the storage may take to make a change visible to all.

    Args:
        path: of a checkpoint of this package or of another program, or a URL.
        ranks: the ranks that open it together.
        storage: opens checkpoints of this package.
        verify: whether reads verify checksums, if the format has them.
        weights_only: for a file of ``torch.save``, as in ``torch.load``, and for pickled objects of a checkpoint.
        live: the state to fill, on which the ranks agree in the same exchange.

    Yields:
        The source, closed at the end.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: if the ranks see different checkpoints at the path.
    """
    source: Source | None = None
    state: list[Any] = []

    def look() -> dict[str, Any]:
        nonlocal source
        if live is not None and not state:
            state.append(live.look())
        if source is not None:
            source.close()
            source = None
        try:
            source, identity = open_source(path, storage, verify=verify, weights_only=weights_only)
        except CheckpointNotFoundError as error:
            return {"missing": str(error)}
        return {"id": identity, "state": state}

    def compare(views: list[dict[str, Any]], look_again: bool) -> dict[str, Any]:
        if "id" in views[0] and all(view.get("id") == views[0]["id"] for view in views):
            return {"state": None if live is None else live.agree([view["state"][0] for view in views])}
        missing = [rank for rank, view in enumerate(views) if "missing" in view]
        if len(missing) < len(views) and look_again:
            return {}
        if missing:
            others = f" (on ranks {missing} of {len(views)})" if len(views) > 1 else ""
            if len(missing) < len(views):
                others += "; the others see one: the path must be on a file system that all ranks share"
            raise CheckpointNotFoundError(views[missing[0]]["missing"] + others)
        save_ids = [view["id"] for view in views]
        raise MismatchError(
            f"the ranks see different checkpoints at {path!r}: {save_ids}; the path must be on a file system that all "
            "ranks share"
        )

    try:
        answer = ranks.step_until(f"opening checkpoint {path!r}", look, compare, storage.visible_within_s)
        assert source is not None
        if live is not None:
            live.take(answer["state"])
        yield source
    finally:
        if source is not None:
            source.close()


def _digest(source: Source) -> str:
    """Return a digest of names, dtypes and shapes, for formats without a save id."""
    kinds = {n: {k: (t.dtype, t.shape) for k, t in c.tensors.items()} for n, c in source.components().items()}
    return checksum(json.dumps(kinds, sort_keys=True).encode())


def open_source(
    path: str, storage: Storage, *, verify: bool = True, weights_only: bool = True
) -> tuple[Source, str]:
    """Open the source at a path in this process alone. The arguments are as in ``open_on_ranks``.

    Returns:
        The source, which the caller closes, and an identity that is equal if other ranks see the same checkpoint.

    Raises:
        CheckpointNotFoundError: if there is no readable checkpoint; suggests other paths.
        FormatError: if several formats match.
    """
    if (other := detect_format(path)) is not None:
        source = open_other(path, other, weights_only)
        return source, f"{other}, {_digest(source)}"
    try:
        checkpoint = Checkpoint(storage, path)
    except CheckpointNotFoundError as error:
        if is_url(path):
            raise
        raise CheckpointNotFoundError(explain_missing(path, error, READABLE)) from None
    source = sharded_source(checkpoint, verify, weights_only=weights_only)
    return source, checkpoint.root.save_id


def open_other(path: str, format: str, weights_only: bool = True) -> Source:
    """Open a checkpoint of another program, of the format that ``detect_format`` found."""
    if format == DCP:
        return open_dcp(path, weights_only)
    if format == HUB_DIRECTORY:
        return open_directory(path)
    if format == INDEX_FILE:
        return open_directory(*os.path.split(os.path.abspath(path)))
    return open_file(path) if format == SAFETENSORS else open_torch_files(path, weights_only)


_LISTED = 5


def open_file(path: str) -> Source:
    """Open a single safetensors file."""
    folder, name = os.path.split(os.path.abspath(path))
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        tensors = tensors_of(reader, name, folder)
        if any(any(box.start) for tensor in tensors.values() for box, _, _ in tensor.boxes):
            raise FormatError(f"{path!r} has one rank's slices of tensors: give the path of a directory with all files")
        return _safetensors_source(path, reader, {name: tensors}, {})


def open_directory(path: str, index: str | None = None) -> Source:
    """Open a directory with weights; ``index`` is the name of an index file, if it has several."""
    exist = any(os.path.lexists(os.path.join(path, name)) for name in HUB_WEIGHTS)
    has_weights = index is not None or exist or bool(indexes(path))
    if not has_weights and (slices := files_of_slices(path)):
        return _open_slices(path, slices)
    if not has_weights and (adapters := [one for name in ADAPTERS if os.path.isfile(one := os.path.join(path, name))]):
        return open_file(adapters[0]) if is_safetensors(adapters[0]) else open_torch_files(adapters[0])
    single, index = _choose(path) if index is None else (None, index)
    with close_on_error(LocalReader(path, follow_links=True)) as reader:
        weight_map = {} if single is not None else _weight_map_in(reader, path, index)
        names = [single] if single is not None else list(dict.fromkeys(weight_map.values()))
        if index.startswith(SAFE):
            files = {name: tensors_of(reader, name, path) for name in names}
            return _safetensors_source(path, reader, files, weight_map)
    reader.close()
    missing = [name for name in names if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise CorruptionError(f"{path!r}, file {missing[0]}: the file is missing, as named in {index}")
    return open_torch_files(path, files=names)


def _open_slices(path: str, names: list[str]) -> Source:
    """Open a directory in which each file has a rank's slices, at offsets in its header."""
    tensors: dict[str, ForeignTensor] = {}
    with close_on_error(LocalReader(path, follow_links=True)) as reader:
        for name in names:
            for key, part in tensors_of(reader, name, path).items():
                first = tensors.get(key, part)
                if (first.dtype, len(first.shape)) != (part.dtype, len(part.shape)):
                    raise FormatError(f"{path!r}: {shown(key)} has another dtype or number of dims in {name}")
                shape = tuple(map(max, first.shape, part.shape))
                boxes = part.boxes if first is part else first.boxes + part.boxes
                tensors[key] = ForeignTensor(part.dtype, shape, boxes)
        return _weights(path, reader, tensors)


def _choose(path: str) -> tuple[str | None, str]:
    """Return the name of the single file, if it exists, and of its index."""
    existing = {name for name in HUB_WEIGHTS if os.path.lexists(os.path.join(path, name))}
    for name in (SAFE, BIN):
        if {name, name + INDEX} <= existing:
            raise FormatError(
                f"{path!r} holds two versions of the weights: {name}, and the files of {name + INDEX}. Remove one, or "
                "give the path of the file."
            )
        if existing & {name, name + INDEX}:
            return (name if name in existing else None), name + INDEX
    return None, only_index(path)


def _weight_map_in(reader: Reader, path: str, index: str) -> dict[str, str]:
    """Return the file of each tensor, from the index."""
    where = f"{path!r}, file {index}"
    try:
        content = parse_json(read_all(reader, index), where)
    except FileNotFoundError:
        raise CorruptionError(f"{where}: a link to nothing") from None
    except FormatError:
        raise
    except ValueError as error:  # too long
        raise FormatError(f"{where}: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{where}: it has no weight_map that names files")
    try:
        return {check_text(key): check_file_name(name) for key, name in weight_map.items()}
    except FormatError as error:
        raise FormatError(f"{where}: {error}; files must be in the same directory") from None


def _safetensors_source(
    path: str, reader: Reader, files: dict[str, dict[str, ForeignTensor]], weight_map: dict[str, str]
) -> Source:
    """Return all tensors of the files; the index chooses among several of the same name."""
    tensors: dict[str, ForeignTensor] = {}
    for name, in_file in files.items():
        for key, tensor in in_file.items():
            if weight_map.get(key, name) != name:
                continue
            if key in tensors:
                raise FormatError(f"{path!r}: {shown(key)} is in {tensors[key].boxes[0].file} and in {name}")
            tensors[key] = tensor
    lost = [key for key in weight_map if key not in tensors]
    if lost:
        listed = "\n  ".join(f"{shown(key)} should be in {weight_map[key]}" for key in lost[:_LISTED])
        raise CorruptionError(f"{path!r}: {count_text(len(lost), 'tensor')} of the index not in the files\n  {listed}")
    return _weights(path, reader, tensors)


def _weights(path: str, reader: Reader, tensors: dict[str, ForeignTensor]) -> Source:
    """Return a model's tensors under their names without the components that wrappers such as torch.compile add."""
    named = {clean_fqn(key): tensor for key, tensor in tensors.items()}
    if len(named) < len(tensors):
        again = next(key for key in tensors if tensors[key] is not named[clean_fqn(key)])
        raise FormatError(f"{path!r}: {shown(again)} and {shown(clean_fqn(again))} are two tensors of that name")
    return foreign_source(ForeignTensors(path, reader, {"model": named}))
