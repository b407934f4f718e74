"""Find and delete checkpoints in an object store; ``RemoteDraft`` writes them, ``RemoteReader`` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.format.strict_json import MAX_JSON_BYTES
from lightning_shardckpt.storage.other_programs import other_program
from lightning_shardckpt.storage.remote.draft import RemoteDraft
from lightning_shardckpt.storage.remote.objects import ObjectStore
from lightning_shardckpt.storage.remote.remote_reader import HEAD_BYTES, TAGGED, RemoteReader, is_ours, prefix_in

_ATTEMPTS = 5  # of opening what another process replaces


class RemoteStorage:
    """Checkpoints below the keys of a store; paths are URLs.

    Args:
        objects: the store.
        turn: entered while a rank uploads; it may wait until nobody else does.
    """

    visible_within_s = 10.0

    def __init__(
        self, objects: ObjectStore, turn: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._objects, self._turn = objects, turn

    def open(self, path: str) -> RemoteReader:
        """The checkpoint at ``path``.

        Raises:
            CheckpointNotFoundError: if there is none, if it is incomplete, or if the path is something else.
            PermissionError: if the store does not let us look.
        """
        folder = self._objects.key(path)
        root = f"{folder}/{ROOT_NAME}"
        for _ in range(_ATTEMPTS):
            try:
                before = self._objects.stat(root)
                if before.size > MAX_JSON_BYTES:
                    raise FormatError(f"{path}/{ROOT_NAME} has {before.size} bytes, more than {MAX_JSON_BYTES}")
                content = self._objects.read(root, 0, before.size)
                if self._objects.stat(root) == before:
                    return RemoteReader(self._objects, folder, content)
            except FileNotFoundError:
                raise CheckpointNotFoundError(self._why_none(path, folder)) from None
        raise CheckpointNotFoundError(f"the checkpoint at {path!r} is replaced faster than it can be opened")

    def draft(self, path: str, save_id: str) -> RemoteDraft:
        """A new checkpoint that will appear at ``path``."""
        return RemoteDraft(self._objects, path, self._objects.key(path), save_id, self._turn)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``: first the root index, then its other files.

        What other saves left there, or are writing, is not touched.

        Returns:
            What went wrong then, as sentences.

        Raises:
            CheckpointNotFoundError: if there is none.
        """
        folder = self._objects.key(path)
        found = self._objects.names(folder)
        if ROOT_NAME not in found:
            raise CheckpointNotFoundError(self._why_none(path, folder))
        prefix = prefix_in(self.root_head(path, HEAD_BYTES)) or "?"
        its = [n for n in found if is_ours(n) and (n.startswith(prefix) or not TAGGED.fullmatch(n))]
        self._objects.delete([f"{folder}/{ROOT_NAME}"])
        try:
            self._objects.delete([f"{folder}/{name}" for name in its])
        except OSError as error:
            return [f"could not remove all files of the deleted checkpoint {path!r}: {error}"]
        self._objects.drop_folder(folder)
        return []

    def complete(self, folder: str) -> list[str]:
        """The checkpoints directly below a folder."""
        found = [name for name in self._objects.names(self._objects.key(folder)) if name.endswith(f"/{ROOT_NAME}")]
        names = sorted(name.removesuffix(f"/{ROOT_NAME}") for name in found)
        return [f"{folder.rstrip('/')}/{name}" for name in names if "/" not in name]

    def is_complete(self, path: str) -> bool:
        """Return whether a checkpoint is at the path."""
        return self.is_object(f"{path}/{ROOT_NAME}")

    def root_head(self, path: str, nbytes: int) -> bytes:
        """The first bytes of a root index. Raises FileNotFoundError."""
        key = f"{self._objects.key(path)}/{ROOT_NAME}"
        return self._objects.read(key, 0, min(self._objects.stat(key).size, nbytes))

    def is_object(self, path: str) -> bool:
        """Return whether the path is that of a single object."""
        try:
            self._objects.stat(self._objects.key(path))
        except FileNotFoundError:
            return False
        return True

    def contents(self, path: str) -> tuple[str, list[str]]:
        """Return folder and file names of what is no checkpoint of this package; of one object, its own."""
        folder = self._objects.key(path)
        if self.is_object(path):
            folder, _, name = folder.rpartition("/")
            return folder, [name]
        return folder, sorted(self._objects.names(folder))

    def files(self, folder: str, names: Iterable[str]) -> tuple[RemoteReader, list[str]]:
        """A reader of files in a folder, and what tells the present version of each from others."""
        tags = [self._objects.stat(f"{folder}/{name}").tag for name in names]
        return RemoteReader(self._objects, folder, b""), tags

    def is_empty(self, path: str) -> bool:
        """Return whether nothing lies below the path."""
        return not self._objects.names(self._objects.key(path))

    def delete_object(self, path: str) -> None:
        """Delete the single object at a path."""
        self._objects.delete([self._objects.key(path)])

    def _why_none(self, path: str, folder: str) -> str:
        if self.is_object(path):
            return f"{path!r} is a file, not a checkpoint of lightning-shardckpt"
        found = self._objects.names(folder)
        if not found:
            return f"no checkpoint at {path!r}: there is nothing at this path"
        if (program := other_program(found)) is not None:
            return f"{path!r} {program}"
        near = sorted(name for name in found if name.endswith(f"/{ROOT_NAME}"))
        hint = f"; did you mean {path.rstrip('/')}/{near[0].removesuffix(f'/{ROOT_NAME}')}?" if near else ""
        return f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}{hint}"
