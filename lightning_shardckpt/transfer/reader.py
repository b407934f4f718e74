"""Open checkpoints: read and verify indexes, documents and headers of shard files. No tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.index import (
    ROOT_NAME,
    FileInfo,
    RankIndex,
    RootIndex,
    ShardEntry,
    rank_index_from_json,
    root_from_json,
)
from lightning_shardckpt.format.plan import Overlap, check_cover, check_plausible, choose_replicas
from lightning_shardckpt.format.safetensors_header import read_header
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.protocol import Reader, Storage, read_all


class Checkpoint:
    """A checkpoint opened for reading: its root index, and the rank indexes read so far. Not thread-safe.

    Args:
        storage: the backend.
        path: the checkpoint's path.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        CorruptionError, FormatError: if the root index is damaged or not valid.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.path = path
        self.reader: Reader = storage.open(path)
        self._indexes: dict[tuple[str, int], RankIndex] = {}
        self._replicas: dict[str, dict[str, int | None]] = {}
        self._checked: set[tuple[str, int, str]] = set()
        try:
            self.root: RootIndex = root_from_json(self._read(ROOT_NAME), self._where(ROOT_NAME))
            for name, component in self.root.components.items():
                check_plausible(component, f"{self._where(ROOT_NAME)}, {name}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files."""
        self.reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def replicas(self, component: str) -> dict[str, int | None]:
        """Return the number of the replica that wrote each tensor of a component; see ``choose_replicas``.

        Raises:
            FormatError: if the boxes of a tensor leave a gap.
        """
        if component not in self._replicas:
            tensors = self.root.components[component].tensors
            check_cover(f"{self._where(ROOT_NAME)}, {component}", tensors)
            self._replicas[component] = choose_replicas(tensors)
        return self._replicas[component]

    def document(self, name: str) -> bytes:
        """Return the verified content of a JSON document."""
        return self._read_verified(self.root.documents[name])

    def index(self, component: str, rank: int) -> RankIndex:
        """Return the index of a component that ``rank`` wrote, verified against the root index.

        Raises:
            CorruptionError: if the file is missing or damaged, or of another save.
            FormatError: if it is invalid, or the index of another rank or component.
        """
        if (component, rank) not in self._indexes:
            info = self.root.components[component].indexes.get(rank)
            if info is None:
                raise FormatError(
                    f"{self._where(ROOT_NAME)}: rank {rank} should have written some of {component!r}, but has no index"
                )
            index = rank_index_from_json(self._read_verified(info), self._where(info.name))
            self._check_save_id(index.save_id, info.name)
            if (index.component, index.rank) != (component, rank):
                raise FormatError(
                    f"{self._where(info.name)}: this is the index of rank {index.rank} for {index.component!r}"
                )
            self._indexes[component, rank] = index
        return self._indexes[component, rank]

    def entry(self, component: str, key: str, overlap: Overlap) -> ShardEntry:
        """Return the stored box that a plan refers to.

        Raises:
            FormatError: if the rank's index lacks it, or describes it differently from the root index.
        """
        spec, stored = self.root.components[component].tensors[key], overlap.stored
        index = self._indexes.get((component, overlap.writer)) or self.index(component, overlap.writer)
        for entry in index.shards.get(key, ()):
            same = entry.box is stored or entry.box == stored
            if same and entry.dtype == spec.dtype and entry.global_shape == spec.shape:
                return entry
        raise FormatError(
            f"{self._where(ROOT_NAME)}: the index of rank {overlap.writer} has no box {overlap.stored.start}.."
            f"{overlap.stored.stop} of {key!r}, {spec.dtype} {spec.shape}"
        )

    def check_file(self, component: str, rank: int, name: str) -> None:
        """Check the size of a shard file, and the checksum of its header; repeated calls for a file do nothing.

        Raises:
            CorruptionError: if the file is missing or damaged, or of another save.
        """
        if (component, rank, name) in self._checked:
            return
        info = self.index(component, rank).files[name]
        self._check_size(info)
        with self._errors_named(name):
            start = read_header(partial(self.reader.read_into, name), info.nbytes)
        if checksum(start) != info.checksum:
            raise CorruptionError(
                f"{self._where(name)}: the header of the shard file is damaged, or it is of another save"
            )
        self._checked.add((component, rank, name))

    def _read_verified(self, info: FileInfo) -> bytes:
        self._check_size(info)
        content = self._read(info.name)
        if checksum(content) != info.checksum:
            raise CorruptionError(
                f"{self._where(info.name)}: damaged, or of another save: checksum {checksum(content)}, expected "
                f"{info.checksum}"
            )
        return content

    def _check_size(self, info: FileInfo) -> None:
        with self._errors_named(info.name):
            size = self.reader.size(info.name)
        if size != info.nbytes:
            raise CorruptionError(f"{self._where(info.name)}: {size} bytes, expected {info.nbytes}")

    def _check_save_id(self, save_id: str, name: str) -> None:
        if save_id != self.root.save_id:
            raise CorruptionError(
                f"{self._where(name)}: belongs to save {save_id}, this checkpoint is save {self.root.save_id}"
            )

    def _read(self, name: str) -> bytes:
        with self._errors_named(name):
            return read_all(self.reader, name)

    @contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        """Raise the errors of a reader as errors of this package that name the checkpoint and the file."""
        try:
            yield
        except FileNotFoundError:
            if name == ROOT_NAME:
                raise CheckpointNotFoundError(f"{self.path!r} is not a complete checkpoint: it has no {name}") from None
            hint = f"; if another machine has just written it, {os.uname().nodename!r} may not see it yet"
            hint = "" if self.reader.high_latency else hint
            raise CorruptionError(f"{self._where(name)}: the file is missing{hint}") from None
        except EOFError as error:
            raise CorruptionError(f"{self._where(name)}: {error}") from None
        except ValueError as error:  # too large, or not a regular file
            raise FormatError(f"{self._where(name)}: {error}") from None

    def _where(self, name: str) -> str:
        return f"checkpoint {self.path!r}, file {name}"
