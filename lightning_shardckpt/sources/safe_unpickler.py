"""Read pickles that torch wrote without running them: data, and names out of an allow-list.

Python's own unpickler can be kept from calling anything, but not from allocating what a hostile pickle asks for: one
opcode of five bytes makes its memo tens of gigabytes. Here memory is proportional to the pickle. Nothing is imported
or called but what ``known`` maps a name to; classes become ``Record``, whatever they would do. No torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import shown

_MARK = object()
_KEYS = (str, int, float, bool, bytes, type(None))  # nested tuples could take forever to hash


class Called:
    """In ``known``: a name that the pickle may call, and what the result is, given the arguments."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Record:
    """Stands for an object: its class, by the name in ``known``, and the state that it was given."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = {}


def ordered(items: Any = ()) -> dict[Any, Any]:
    """A dict of pairs, for ``known``; keys as in any dict of a pickle."""
    found = {}
    for key, value in items:
        if type(key) not in _KEYS:
            raise FormatError(f"a dict has {shown(key)} as a key")
        found[key] = value
    return found


def text(value: Any = "") -> str:
    """A text, for ``known``."""
    if not isinstance(value, str):
        raise FormatError(f"{shown(value)} is no text")
    return value


def record(kind: str) -> Called:
    """Return a class for ``known`` whose objects become records of a kind; arguments are ignored."""
    return Called(lambda *_: Record(kind))


Known = Mapping[str, Any]
"""By ``module.name``: a ``Called``, or the value that the name stands for."""


def unpickle(content: bytes, known: Known, where: str, *, stored: Callable[[Any], Any] | None = None) -> Any:
    """The value in a pickle.

    Args:
        content: the pickle, of any protocol.
        known: what it may name.
        where: for messages.
        stored: of what the pickle refers to as kept elsewhere (``persistent_id``).

    Raises:
        FormatError: for a name that is not known, an operation that torch does not use, or a malformed pickle.
    """
    if not content:
        raise FormatError(f"{where}: it is empty")
    try:
        return _Machine(content, known, stored).run()
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, struct.error, RecursionError, OverflowError) as error:
        raise FormatError(f"{where}: a malformed pickle: {shown(error)}") from None


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, content: bytes, known: Known, stored: Callable[[Any], Any] | None) -> None:
        self._content, self._known, self._stored = content, known, stored
        self._at, self._stack, self._memo = 0, list[Any](), dict[int, Any]()

    def run(self) -> Any:
        content, operations = self._content, _OPERATIONS
        while True:
            code = content[self._at]
            self._at += 1
            if code == 0x2E:  # STOP
                return self._stack[-1]
            operation = operations.get(code)
            if operation is None:
                raise FormatError(f"operation {bytes([code])!r} at byte {self._at - 1} is none that torch writes")
            operation(self)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        found = self._content[begin : self._at]
        if len(found) != count:
            raise FormatError(f"the pickle ends at byte {len(self._content)}, expected {self._at}")
        return found

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def _line(self) -> str:
        end = self._content.index(b"\n", self._at)
        found = self.take(end - self._at).decode()
        self._at += 1
        return found

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        """Return what is above the last mark."""
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise FormatError("there is no mark")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────

    def skip(self, count: int) -> None:
        self.take(count)

    def unsigned(self, count: int) -> None:
        self.push(self.number(count))

    def integer(self, count: int) -> None:
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def long(self, count: int) -> None:
        self.integer(self.number(count))

    def real(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def text(self, count: int) -> None:
        self.push(self.take(self.number(count)).decode("utf-8", "surrogatepass"))

    def raw(self, count: int) -> None:
        self.push(self.take(self.number(count)))

    def mark(self) -> None:
        self.push(_MARK)

    def pop(self) -> None:
        self._stack.pop()

    def pop_mark(self) -> None:
        self._marked()

    def remember(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, count: int) -> None:
        self._memo[self.number(count)] = self._stack[-1]

    def get(self, count: int) -> None:
        self.push(self._memo[self.number(count)])

    def many_as_tuple(self) -> None:
        self.push(tuple(self._marked()))

    def as_tuple(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise FormatError("the stack is empty")
        self._stack[-count:] = [items]

    def append(self) -> None:
        item = self._stack.pop()
        _a(list, self._stack[-1]).append(item)

    def extend(self) -> None:
        items = self._marked()
        _a(list, self._stack[-1]).extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        _a(dict, self._stack[-1])[_key(key)] = value

    def set_items(self) -> None:
        items = self._marked()
        target = _a(dict, self._stack[-1])
        for i in range(0, len(items), 2):
            target[_key(items[i])] = items[i + 1]

    def add_items(self) -> None:
        items = self._marked()
        _a(set, self._stack[-1]).update(map(_key, items))

    def global_by_lines(self) -> None:
        self._name(self._line(), self._line())

    def global_by_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self._known:
            raise FormatError(f"it names {shown(full)}, which is not data that torch writes there, so it is not read")
        self.push(self._known[full])

    def call(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        self.push(_a(Called, called).function(*_a(tuple, arguments)))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Record:
            target.state = state

    def refer(self) -> None:
        if self._stored is None:
            raise FormatError("it refers to data outside of it")
        self.push(self._stored(self._stack.pop()))


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise FormatError(f"{shown(type(value).__name__)} where a {kind.__name__.lower()} is expected")
    return value


def _key(value: Any) -> Any:
    if type(value) not in _KEYS and type(value) is not Record:
        raise FormatError(f"a {type(value).__name__} as a key")
    return value


# By opcode, those of ``pickletools`` with which Python writes data, each with the number of bytes of its argument.
_WITHOUT_ARGUMENT: dict[str, Callable[[_Machine], None]] = {
    "N": lambda m: m.push(None),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    "]": lambda m: m.push([]),
    "}": lambda m: m.push({}),
    ")": lambda m: m.push(()),
    "\x8f": lambda m: m.push(set()),
    "G": _Machine.real,
    "(": _Machine.mark,
    "0": _Machine.pop,
    "1": _Machine.pop_mark,
    "\x94": _Machine.remember,
    "t": _Machine.many_as_tuple,
    "\x85": lambda m: m.as_tuple(1),
    "\x86": lambda m: m.as_tuple(2),
    "\x87": lambda m: m.as_tuple(3),
    "a": _Machine.append,
    "e": _Machine.extend,
    "s": _Machine.set_item,
    "u": _Machine.set_items,
    "\x90": _Machine.add_items,
    "c": _Machine.global_by_lines,
    "\x93": _Machine.global_by_stack,
    "R": _Machine.call,
    "\x81": _Machine.call,
    "b": _Machine.build,
    "Q": _Machine.refer,
}
_WITH_ARGUMENT: dict[str, tuple[Callable[[_Machine, int], None], int]] = {
    "\x80": (_Machine.skip, 1),
    "\x95": (_Machine.skip, 8),
    "J": (_Machine.integer, 4),
    "K": (_Machine.unsigned, 1),
    "M": (_Machine.unsigned, 2),
    "\x8a": (_Machine.long, 1),
    "\x8b": (_Machine.long, 4),
    "\x8c": (_Machine.text, 1),
    "X": (_Machine.text, 4),
    "\x8d": (_Machine.text, 8),
    "C": (_Machine.raw, 1),
    "B": (_Machine.raw, 4),
    "\x8e": (_Machine.raw, 8),
    "q": (_Machine.put, 1),
    "r": (_Machine.put, 4),
    "h": (_Machine.get, 1),
    "j": (_Machine.get, 4),
}


def _with(operation: Callable[[_Machine, int], None], count: int) -> Callable[[_Machine], None]:
    return lambda machine: operation(machine, count)


_OPERATIONS = {ord(code): operation for code, operation in _WITHOUT_ARGUMENT.items()}
_OPERATIONS |= {ord(code): _with(*row) for code, row in _WITH_ARGUMENT.items()}
