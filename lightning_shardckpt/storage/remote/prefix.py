"""Names of a save's objects, which begin with its id, and a reader that leaves that out."""

from __future__ import annotations

import re

from lightning_shardckpt.format.file_names import is_part
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.protocol import Reader

HEAD_BYTES = 4096  # of a root index, where it says what its prefix is
_PREFIX = re.compile(rb'"prefix":"([0-9a-f]{16}-)"')
TAGGED = re.compile(r"([0-9a-f]{16}-)[A-Za-z0-9_-][A-Za-z0-9._-]*")
_FOR_EXPORTS = ("huggingface.json", "peft.json")


def is_ours(name: str) -> bool:
    """Return whether an object below a checkpoint's path has a name that saves give; nothing else is ever deleted.

    >>> is_ours("0123456789abcdef-x.json"), is_ours("model-meta-dist-00000.index.json"), is_ours("trainer-state.json")
    (True, True, True)
    >>> is_ours("epoch=1.ckpt/model-dist-00000-shard-00001.safetensors"), is_ours("config.yaml")
    (False, False)
    """
    return TAGGED.fullmatch(name) is not None or is_part(name) or name in _FOR_EXPORTS


def prefix_in(root: bytes) -> str | None:
    """Return what a root index says that names begin with, from its first bytes.

    >>> prefix_in(b'{"prefix":"5afe5afe5afe5afe-"}'), prefix_in(b"{}")
    ('5afe5afe5afe5afe-', None)
    """
    found = _PREFIX.search(root)
    return found[1].decode() if found else None


def prefix_of(save_id: str) -> str:
    """Return what the names of a save's files begin with, so that they are nobody else's.

    >>> prefix_of("5afe5afe5afe5afe" + "0" * 16)
    '5afe5afe5afe5afe-'
    """
    return save_id[:16] + "-"


class PrefixedReader:
    """Files under the names that indexes have for them."""

    def __init__(self, reader: Reader, prefix: str) -> None:
        self._reader, self._prefix, self.high_latency = reader, prefix, reader.high_latency

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return self._reader.size(self._stored(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""
        self._reader.read_into(self._stored(name), offset, target)

    def names(self) -> list[str]:
        """Return every entry; those of other saves with what their names begin with."""
        return sorted(name.removeprefix(self._prefix) for name in self._reader.names())

    def clone(self) -> PrefixedReader:
        """Return another reader of the same files."""
        return PrefixedReader(self._reader.clone(), self._prefix)

    def original(self, name: str) -> tuple[Reader, str]:
        """Return the reader that this one reads from, and the name that a file has there."""
        return self._reader, self._stored(name)

    def close(self) -> None:
        """Release what is open."""
        self._reader.close()

    def _stored(self, name: str) -> str:
        return name if name == ROOT_NAME else self._prefix + name
