"""Find the records in a file that ``torch.save`` wrote, a zip archive that is not compressed.

An archive may also be a part of a larger file: torch's distributed checkpoint writes one for every tensor, one after
the other. Source: the zip specification (APPNOTE 6.3), and ``caffe2/serialize/inline_container.cc``, torch 2.13.
No torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.storage.protocol import Reader

_END, _END64_PLACE, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_TAIL_BYTES = 2 << 10  # more than the directory of an archive with one tensor
_WINDOW_BYTES = 16 << 10  # of one read: the end of one small archive, or all of it, and the beginning of the next
_DIRECTORY_BYTES = 16 << 20
_FULL, _ZIP64 = 0xFFFFFFFF, 1


class CoalescedReads:
    """Reads short pieces of files that lie near each other by common reads; fastest in the order of the files.

    What is read next depends on what was read before, and nothing has a checksum: no plan can be made for it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._file, self._begin, self._window = "", 0, b""

    def size(self, file: str) -> int:
        """Length of a file."""
        try:
            return self._reader.size(file)
        except FileNotFoundError:
            raise CorruptionError(f"file {file}: the file is missing") from None

    def read(self, file: str, begin: int, nbytes: int) -> bytes:
        """``nbytes`` from ``begin`` on.

        Raises:
            CorruptionError: naming the file, if it is missing or ends before that.
        """
        at = begin - self._begin
        if file != self._file or at < 0 or at + nbytes > len(self._window):
            size = self.size(file)
            if begin < 0 or begin + nbytes > size:
                raise CorruptionError(f"file {file}: bytes {begin} to {begin + nbytes} are wanted, it has {size}")
            window = bytearray(min(max(nbytes, _WINDOW_BYTES), size - begin))
            try:
                self._reader.read_into(file, begin, memoryview(window))
            except EOFError as error:  # it became shorter since
                raise CorruptionError(f"file {file}: {error}") from None
            self._file, self._begin, self._window, at = file, begin, bytes(window), 0
        return self._window[at : at + nbytes]


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file that is an archive."""

    file: str
    begin: int
    nbytes: int


class ZipArchive:
    """An archive that ``torch.save`` wrote; ``sizes`` are of its records by name, without the folder they are all in.

    Raises:
        FormatError: naming file and byte, if it is none.
        CorruptionError: if the file is missing or too short.
    """

    def __init__(self, windows: CoalescedReads, piece: FilePart) -> None:
        self._windows, self._piece = windows, piece
        self.sizes: dict[str, int] = {}
        self._headers: dict[str, int] = {}
        # from where all of a small one is in the window
        self._read(max(piece.nbytes - _TAIL_BYTES, 0) if piece.nbytes > _WINDOW_BYTES else 0, 0)
        try:
            self._directory_at, nbytes = self._find_directory()
            self._parse(self._read(self._directory_at, min(nbytes, _DIRECTORY_BYTES)))
        except (struct.error, ValueError) as error:
            raise self.malformed(str(error)) from None

    def malformed(self, what: str) -> FormatError:
        """An error that names the place."""
        piece = self._piece
        where = f"file {piece.file}, bytes {piece.begin} to {piece.begin + piece.nbytes}"
        return FormatError(f"{where}: not what torch.save writes: {what}")

    def begin(self, name: str) -> int:
        """Return where a record's bytes begin in the file: after its local header, which has lengths of its own."""
        if name not in self._headers:
            raise self.malformed(f"there is no record {name!r}")
        header_at = self._headers[name]
        header = _LOCAL.unpack(self._read(header_at, _LOCAL.size))
        begin = header_at + _LOCAL.size + int(header[9]) + int(header[10])
        if header[0] != b"PK\3\4" or begin + self.sizes[name] > self._directory_at:
            raise self.malformed(f"record {name!r} is not where the directory says")
        return self._piece.begin + begin

    def content(self, name: str, limit: int) -> bytes:
        """The bytes of a record, at most so many."""
        begin = self.begin(name)
        if self.sizes[name] > limit:
            raise self.malformed(f"record {name!r} has {self.sizes[name]} bytes, more than {limit}")
        return self._windows.read(self._piece.file, begin, self.sizes[name])

    def _read(self, at: int, nbytes: int) -> bytes:
        piece = self._piece
        if at < 0 or nbytes < 0 or at + nbytes > piece.nbytes:
            raise self.malformed(f"bytes {at} to {at + nbytes} of it are wanted")
        return self._windows.read(piece.file, piece.begin + at, nbytes)

    def _find_directory(self) -> tuple[int, int]:
        """Return where the central directory is, and its length."""
        tail_bytes = min(self._piece.nbytes, _END64_PLACE.size + _END.size)
        tail = self._read(self._piece.nbytes - tail_bytes, tail_bytes)
        signature, *_, nbytes, at, comment = _END.unpack_from(tail, len(tail) - _END.size)
        if signature != b"PK\5\6" or comment:
            raise ValueError("it does not end like a zip archive")
        if tail.startswith(b"PK\6\7"):
            _, _, end_at, _ = _END64_PLACE.unpack_from(tail)
            end = self._read(end_at, _END64.size)
            if not end.startswith(b"PK\6\6"):
                raise ValueError("its zip64 directory is not where it should be")
            *_, nbytes, at = _END64.unpack(end)
        return at, nbytes

    def _parse(self, directory: bytes) -> None:
        position, folder = 0, b""
        while position < len(directory):
            fields = _ENTRY.unpack_from(directory, position)
            signature, method, lengths = fields[0], fields[4], fields[10:13]
            position += _ENTRY.size
            path = directory[position : position + lengths[0]]
            extra = directory[position + lengths[0] : position + lengths[0] + lengths[1]]
            position += sum(lengths)
            packed, size, header_at = _large(extra, fields[8], fields[9], fields[16])
            folder, slash, name = path.partition(b"/") if not folder else (folder, b"/", path[len(folder) + 1 :])
            if signature != b"PK\1\2" or method != 0 or size != packed or path != folder + slash + name:
                raise ValueError(f"record {path[:80]!r} is compressed or malformed")
            key = name.decode()
            self.sizes[key], self._headers[key] = size, header_at


def _large(extra: bytes, packed: int, size: int, at: int) -> tuple[int, int, int]:
    """Sizes and offset of an entry, those that do not fit into 32 bits from its zip64 field."""
    position = 0
    while _FULL in (packed, size, at) and position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            size = next(numbers, size) if size == _FULL else size
            packed = next(numbers, packed) if packed == _FULL else packed
            return packed, size, next(numbers, at) if at == _FULL else at
        position += 4 + length
    return packed, size, at
