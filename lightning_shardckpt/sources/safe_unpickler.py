"""An unpickler for torch's pickles that executes no code: data, and names from an allow-list. No torch.

Python's unpickler in C can be kept from calling functions, but not from allocating memory for a hostile pickle: one
opcode of five bytes makes its memo tens of gigabytes. The unpickler in Python, used here, has a dict as its memo. It
gets only the opcodes with which torch writes data; those that call, set or hash are replaced. So memory is proportional
to the pickle, nothing is imported, only functions of the allow-list are called, and objects become a ``Record``.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import shown

_Unpickler: Any = pickle._Unpickler  # typeshed has none of its methods
_KEYS = (str, int, float, bool, bytes, type(None))  # nested tuples could take forever to hash
_AS_IN_PYTHON = b"N]})G(0tae.cQJKMXCBqrhj1" + bytes(
    [0x80, 0x95, 0x88, 0x89, 0x8F, 0x94, 0x85, 0x86, 0x87, 0x93, 0x8A, 0x8B, 0x8C, 0x8D, 0x8E]
)
"""The opcodes of ``pickletools`` with which Python writes data, and which neither call, set nor hash."""


class Called:
    """A name in the allow-list that the pickle may call, and the function to call in its place."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Record:
    """A placeholder for an object: the kind of its class, and the state that the pickle set."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = {}


def make_ordered(items: Any = ()) -> dict[Any, Any]:
    """Return a dict of pairs, in place of OrderedDict; its keys are checked."""
    ordered = {}
    for key, value in items:
        if type(key) not in _KEYS:
            raise FormatError(f"a dict has {shown(key)} as a key")
        ordered[key] = value
    return ordered


def text(value: Any = "") -> str:
    """Return the argument, which must be a string."""
    if not isinstance(value, str):
        raise FormatError(f"{shown(value)} is not a string")
    return value


def record(kind: str) -> Called:
    """Return the allow-list entry of a class whose objects become records of a kind; arguments are ignored."""
    return Called(lambda *_: Record(kind))


Known = Mapping[str, Any]
"""The allow-list: a ``Called``, or a value in place of the name, by ``module.name``."""


def unpickle(content: bytes, known: Known, where: str, *, stored: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of a pickle.

    Args:
        content: the pickle, of any protocol.
        known: the allow-list.
        where: names the pickle in messages.
        stored: returns the object of a persistent id.

    Raises:
        FormatError: for a name that is not in the allow-list, an opcode that torch does not use, or a malformed pickle.
    """
    if not content:
        raise FormatError(f"{where}: it is empty")
    try:
        return _Machine(content, known, stored).load()
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except _MALFORMED as error:
        raise FormatError(f"{where}: a malformed pickle: {shown(error)}") from None


_MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, EOFError),
    *(struct.error, pickle.UnpicklingError),
)


class _Operations(dict[int, Any]):
    """The methods by opcode."""

    def __missing__(self, code: int) -> Any:
        raise FormatError(f"operation {bytes([code])!r} is none that torch writes")


class _Machine(_Unpickler):  # type: ignore[misc]  # of Any
    """Python's stack machine of pickles, with fewer operations."""

    def __init__(self, content: bytes, known: Known, stored: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(content))
        self._known, self._stored = known, stored

    def find_class(self, module: str, name: str) -> Any:
        """Return the entry of a name in the allow-list."""
        full = f"{module}.{name}"
        if full not in self._known:
            raise FormatError(f"it names {shown(full)}, which is not data that torch writes there, so it is not read")
        return self._known[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return the object of a persistent id."""
        if self._stored is None:
            raise FormatError("it refers to data outside of it")
        return self._stored(pid)

    def _call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.append(_a(Called, called).function(*_a(tuple, arguments)))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Record:
            target.state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _a(dict, self.stack[-1])[_key(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        target = _a(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def _add_items(self) -> None:
        items = self.pop_mark()
        _a(set, self.stack[-1]).update(map(_key, items))

    dispatch = _Operations({code: _Unpickler.dispatch[code] for code in _AS_IN_PYTHON})
    dispatch |= {ord("R"): _call, 0x81: _call, ord("b"): _build}
    dispatch |= {ord("s"): _set_item, ord("u"): _set_items, 0x90: _add_items}


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise FormatError(f"{shown(type(value).__name__)} where a {kind.__name__.lower()} is expected")
    return value


def _key(value: Any) -> Any:
    if type(value) not in _KEYS and type(value) is not Record:
        raise FormatError(f"a {type(value).__name__} as a key")
    return value
