"""Write values as a pickle of protocol 2, byte for byte as Python's ``Pickler`` writes them.

That one has to import what it names. Here a class or a function is a name in some module, so that a pickle may name
what only its reader has. Knows the built-in types of data; the rest says how it is made again. Writes only.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

_BATCH = 1000  # so many items of a list or a dict are put into it at a time
_BYTE, _SHORT, _INT = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i")
_LENGTH, _DOUBLE = struct.Struct("<I"), struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Named:
    """A class, a function or another object that a module has under a name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a call returns; ``items`` are put into it then, and ``attributes`` are set."""

    function: Named
    arguments: tuple[Any, ...]
    items: Iterable[tuple[Any, Any]] = ()
    attributes: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Something outside of the pickle, by what ``persistent_load`` is given."""

    identifier: tuple[Any, ...]


def write_pickle(value: Any, made_by: Callable[[Any], Named | Call]) -> bytes:
    """Return the pickle of a value; what occurs in it several times is in it once.

    Args:
        value: made of None, bool, int, float, complex, str, bytes, list, tuple, set, dict, Counter, OrderedDict and
            what is defined here; of these very types.
        made_by: how an object of another type is made. Called once for each.

    Raises:
        TypeError: of ``made_by``, for what cannot be written.
    """
    writer = _Writer(made_by)
    writer.save(value)
    return b"\x80\x02" + bytes(writer.written) + b"."


class _Writer:
    def __init__(self, made_by: Callable[[Any], Named | Call]) -> None:
        self.written = bytearray()
        self._made_by = made_by
        self._known: dict[int | Named, int] = {}  # by id, or by what it is, the number under which it can be had again
        self._kept: list[Any] = []  # so that no other object gets the id of one

    def save(self, value: Any) -> None:
        kind = type(value)
        atom = _ATOMS.get(kind)
        if atom is not None:
            self.written += atom(value)
            return
        number = self._known.get(value if kind is Named else id(value))
        if number is not None:
            self.written += b"h" + _BYTE.pack(number) if number < 256 else b"j" + _LENGTH.pack(number)
            return
        save = _TYPES.get(kind)
        if save is not None:
            save(self, value)
            return
        made = self._made_by(value)
        if isinstance(made, Named):
            self.save(made)
        else:
            self._call(made, value)

    def _remember(self, value: Any) -> None:
        number = len(self._known)
        self._known[value if type(value) is Named else id(value)] = number
        self._kept.append(value)
        self.written += b"q" + _BYTE.pack(number) if number < 256 else b"r" + _LENGTH.pack(number)

    def _text(self, value: str) -> None:
        encoded = value.encode("utf-8", "surrogatepass")
        self.written += b"X" + _LENGTH.pack(len(encoded)) + encoded
        self._remember(value)

    def _bytes(self, value: bytes) -> None:
        made = Call(_ENCODE, (value.decode("latin1"), "latin1")) if value else Call(Named("__builtin__", "bytes"), ())
        self._call(made, value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.written += b")"
            return
        if len(value) > 3:
            self.written += b"("
        for item in value:
            self.save(item)
        self.written += b"t" if len(value) > 3 else (b"\x85", b"\x86", b"\x87")[len(value) - 1]
        self._remember(value)

    def _list(self, value: list[Any]) -> None:
        self.written += b"]"
        self._remember(value)
        if len(value) == 1:
            self.save(value[0])
            self.written += b"a"
            return
        for begin in range(0, len(value), _BATCH):
            self.written += b"("
            for item in value[begin : begin + _BATCH]:
                self.save(item)
            self.written += b"e"

    def _dict(self, value: dict[Any, Any]) -> None:
        self.written += b"}"
        self._remember(value)
        if len(value) == 1:
            self._items(iter(value.items()))
            return
        items = iter(value.items())
        for _ in range(len(value) // _BATCH + 1 if value else 0):  # after full ones an empty one, as Python has it
            self._batch(islice(items, _BATCH))

    def _items(self, items: Iterator[tuple[Any, Any]]) -> None:
        """Put items, of which nobody knows how many there are, into what was written last."""
        while batch := list(islice(items, _BATCH)):
            if len(batch) > 1:
                self._batch(batch)
                if len(batch) == _BATCH:
                    continue
                return
            self.save(batch[0][0])
            self.save(batch[0][1])
            self.written += b"s"

    def _batch(self, items: Iterable[tuple[Any, Any]]) -> None:
        self.written += b"("
        for key, item in items:
            self.save(key)
            self.save(item)
        self.written += b"u"

    def _named(self, value: Named) -> None:
        self.written += f"c{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _call(self, made: Call, value: Any) -> None:
        """Write how ``value`` is made."""
        self.save(made.function)
        self.save(made.arguments)
        self.written += b"R"
        self._remember(value)
        self._items(iter(made.items))
        if made.attributes is not None:
            self.save(made.attributes)
            self.written += b"b"

    def _reference(self, value: Reference) -> None:
        self.save(value.identifier)
        self.written += b"Q"

    def _set(self, value: set[Any]) -> None:
        self._call(Call(Named("__builtin__", "set"), (list(value),)), value)

    def _complex(self, value: complex) -> None:
        self._call(Call(Named("__builtin__", "complex"), (value.real, value.imag)), value)

    def _counter(self, value: Counter[Any]) -> None:
        self._call(Call(Named("collections", "Counter"), (dict(value),)), value)

    def _ordered(self, value: OrderedDict[Any, Any]) -> None:
        self._call(Call(Named("collections", "OrderedDict"), (), value.items(), vars(value) or None), value)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return b"K" + _BYTE.pack(value) if value < 256 else b"M" + _SHORT.pack(value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _INT.pack(value)
    length = (value.bit_length() + 8) // 8  # a bit for the sign
    encoded = value.to_bytes(length, "little", signed=True)
    if value < 0 and length > 1 and encoded[-1] == 0xFF and encoded[-2] & 0x80:
        encoded = encoded[:-1]
    return (b"\x8a" + _BYTE.pack(len(encoded)) if len(encoded) < 256 else b"\x8b" + _INT.pack(len(encoded))) + encoded


_ENCODE = Named("_codecs", "encode")
_ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: b"G" + _DOUBLE.pack(value),
}
_TYPES: dict[type, Callable[[_Writer, Any], None]] = {
    str: _Writer._text,
    bytes: _Writer._bytes,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    set: _Writer._set,
    complex: _Writer._complex,
    Counter: _Writer._counter,
    OrderedDict: _Writer._ordered,
    Named: _Writer._named,
    Call: lambda writer, value: writer._call(value, value),
    Reference: _Writer._reference,
}
