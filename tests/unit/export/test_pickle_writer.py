"""Pickles that are written without what they name. Oracle: Python's own Pickler of protocol 2, byte for byte."""

from __future__ import annotations

import io
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from lightning_shardckpt.export.pickle_writer import Call, Named, Reference, write_pickle

NUMBERS = [sign * (1 << bits) + more for sign in (1, -1) for bits in range(72) for more in (-1, 0, 1)]
NUMBERS += [sign * (1 << bits) + more for sign in (1, -1) for bits in (2031, 2039, 2040, 5000) for more in (-1, 0, 1)]


def refused(value: Any) -> Named | Call:
    raise TypeError(f"a {type(value).__name__} is not expected")


def by_python(value: Any) -> bytes:
    file = io.BytesIO()
    pickle.Pickler(file, 2).dump(value)  # ``dumps`` does not remember the last object
    return file.getvalue()


class Drawn:
    """Random values of every type that can be written; some occur again, as the same objects."""

    def __init__(self, seed: int) -> None:
        self._random, self._seen = random.Random(seed), list[Any]()

    def value(self, depth: int = 0) -> Any:
        draw = self._random
        if self._seen and draw.random() < 0.1:
            return draw.choice(self._seen)
        found = draw.choice(self._leaves() if depth > 3 or draw.random() < 0.5 else self._nested(depth))()
        if draw.random() < 0.3:
            self._seen.append(found)
        return found

    def _leaves(self) -> list[Callable[[], Any]]:
        draw = self._random
        return [
            lambda: draw.choice([None, True, False, (), "", b""]),
            lambda: draw.choice(NUMBERS),
            lambda: draw.choice([0.5, -0.0, float("nan"), float("inf"), draw.random()]),
            lambda: "".join(draw.choice("aé\udc80日/") for _ in range(draw.randrange(5))),
            lambda: draw.randbytes(draw.randrange(4)),
            lambda: complex(draw.random(), 1),
        ]

    def _nested(self, depth: int) -> list[Callable[[], Any]]:
        draw = self._random

        def items(most: int) -> list[Any]:
            return [self.value(depth + 1) for _ in range(draw.randrange(most))]

        def ordered() -> Any:
            found = OrderedDict(enumerate(items(4)))
            if draw.random() < 0.5:
                found._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as in a module's state dict
            return found

        return [
            lambda: items(5),
            lambda: tuple(items(6)),
            lambda: {f"k{key}": value for key, value in enumerate(items(5))},
            ordered,
            lambda: Counter(dict.fromkeys(range(draw.randrange(4)), 3)),
            lambda: {draw.randrange(10**6) for _ in range(draw.randrange(5))},
        ]


@pytest.mark.parametrize("seed", range(20))
def test_a_pickle_is_byte_for_byte_that_of_python(seed: int) -> None:
    drawn = Drawn(seed)
    values = [drawn.value() for _ in range(100)]
    assert write_pickle(values, refused) == by_python(values)


@pytest.mark.parametrize("number", [0, 1, 2, 999, 1000, 1001, 1999, 2000, 2001])
def test_many_items_are_put_in_as_many_at_a_time_as_python_does(number: int) -> None:
    made = (list, tuple, set, Counter, dict.fromkeys, OrderedDict.fromkeys, lambda items: [f"{i}" for i in items])
    for make in made:
        value = make(range(number))  # type: ignore[operator]
        assert write_pickle(value, refused) == by_python(value)


def test_every_length_of_a_number_is_that_of_python() -> None:
    assert write_pickle(NUMBERS, refused) == by_python(NUMBERS)


def test_what_is_named_need_not_be_there() -> None:
    half = Fraction(1, 2)
    made = Call(Named("fractions", "Fraction"), half.__reduce__()[1])
    assert write_pickle([half, half], lambda value: made) == by_python([half, half])
    unknown = write_pickle({"a": Named("nowhere", "nothing"), "b": Reference(("storage", 1))}, refused)
    assert unknown.startswith(b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01cnowhere\nnothing\nq\x02")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        pickle.loads(unknown)


def test_a_type_that_nobody_can_make_again_is_an_error() -> None:
    with pytest.raises(TypeError, match="a Fraction is not expected"):
        write_pickle({"a": [Fraction(1, 2)]}, refused)
