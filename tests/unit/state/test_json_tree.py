"""Trainer state survives JSON. Oracle: the values themselves, types and all."""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import random
from typing import Any

import numpy
import pytest
import torch

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.state.json_tree import INLINE_BYTES, Dropped, Encoder, decode


def trip(value: Any) -> Any:
    """Through the text of a JSON file, tensors beside it."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "state"), allow_nan=False)
    encoder.check()
    return decode(json.loads(text), encoder.tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


VALUES: list[Any] = [
    None,
    True,
    0,
    2**53 + 1,
    -(2**200),
    -0.0,
    math.inf,
    math.nan,
    "",
    'text "quoted" \n \u2028 ✓',
    "\udc80 from os.fsdecode",
    [],
    {},
    {"a": {"b": [1]}, "": 2, "c/d": 3},
    (1, (2,), [3]),
    {1, 2, 3},
    frozenset({"a"}),
    {1: "int", "1": "str", (1, 2): "tuple", None: "none", True and 2.5: "float"},
    {"$": 1, "$tag": {"$": "int", "v": "7"}},
    collections.deque([1, 2], maxlen=2),
    collections.OrderedDict([("b", 1), ("a", (2,))]),
    collections.Counter("abca"),
    argparse.Namespace(lr=0.1, layers=(1, 2), inner=argparse.Namespace(x=None)),
    complex(1.5, -0.0),
    bytes(range(256)),
    torch.bfloat16,
    torch.device("cuda", 3),
    pathlib.Path("/a/b c"),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2, 3, 4),
    datetime.timedelta(-1, 5, 7),
    range(1, 10, 3),
    slice(None, 5),
    numpy.float32(0.1),
    numpy.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
    numpy.zeros((0, 3)),
    numpy.array([1 + 2j], dtype=numpy.complex64),
    torch.arange(6).view(2, 3).T,
    torch.zeros(0, 3),
    torch.arange(INLINE_BYTES, dtype=torch.int32),
    torch.tensor([1 + 2j]).conj(),
    torch.Generator().manual_seed(0).get_state(),
    random.Random(0).getstate(),
    {"numpy": dict(numpy.random.RandomState(0).get_state(legacy=False))},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:30]!r}")
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(trip(value), value)
    assert same(trip({"deep": [(value,)]}), {"deep": [(value,)]})


class Name(str):
    pass


class Moment(datetime.datetime):
    """Has a text of its own, like pandas' timestamps."""

    def isoformat(self, *args: Any, **kwargs: Any) -> str:
        return "long ago"


Point = collections.namedtuple("Point", "x y")
Mode = enum.StrEnum("Mode", "fast slow")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Name("x"), "x"),
        (Point(1, (2,)), (1, (2,))),
        (Mode.fast, "fast"),
        (torch.Size([1, 2]), (1, 2)),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (numpy.float64(0.5), 0.5),
        (numpy.str_("x"), "x"),
        (bytearray(b"x"), b"x"),
        (Moment(2024, 2, 29, 1, tzinfo=datetime.UTC), datetime.datetime(2024, 2, 29, 1, tzinfo=datetime.UTC)),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_type_with_code_comes_back_as_the_plain_one(value: Any, expected: Any) -> None:
    assert same(trip(value), expected)


class Custom:
    pass


def function() -> None:
    """Nothing."""


def test_everything_that_cannot_be_stored_is_named_at_once_by_its_path() -> None:
    encoder = Encoder(pickles=False)
    state = {
        "callbacks": {"A": [1, Custom()], "B": {"f": function}},
        "loops": (lambda: 0, {1: object()}),
        "type": int,
        "generator": torch.Generator(),
        "objects": numpy.array([None]),
        "fine": 1,
    }
    encoder.encode(state, "")
    with pytest.raises(StateError) as caught:
        encoder.check()
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [
        "  callbacks/A/1: tests.unit.state.test_json_tree.Custom",
        "  callbacks/B/f: builtins.function",
        "  loops/0: builtins.function",
        "  loops/1/1: builtins.object",
        "  type: builtins.type",
        "  generator: torch._C.Generator",
        "  objects: numpy.ndarray",
    ]
    assert "without pickle" in lines[0]
    assert "state_dict or on_save_checkpoint" in lines[-1]
    assert "ShardCkptIO(pickle_objects=True)" in lines[-1]


class NotATime(datetime.datetime):
    """Like pandas' NaT: a datetime that equals none."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = datetime.datetime.__hash__


@dataclasses.dataclass(frozen=True)
class Key:
    """A class of the user's, which can be a key."""

    name: str


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (NotATime(1, 1, 1), ".*NotATime"),
        (Key("a"), ".*Key"),
        ({Key("a"): 1}, ".*Key"),
        (frozenset({(1, Key("a"))}), ".*Key"),
        (collections.Counter({Key("a"): 1}), ".*Key"),
        (numpy.ma.masked_array([1, 2], [True, False]), "numpy.ma.*MaskedArray"),
        (10**5000, "builtins.int"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_value_that_would_come_back_as_another_or_not_at_all_is_named(value: Any, named: str) -> None:
    encoder = Encoder()
    encoder.encode({"callbacks": {"a": [value]}}, "")
    with pytest.raises(StateError, match=f"callbacks/a/0.*: {named}"):
        encoder.check()


def test_hyper_parameters_degrade_to_a_placeholder_again_and_again() -> None:
    value = {"hyper_parameters": {"lr": 0.1, "net": Custom()}}
    for _ in range(3):
        encoder = Encoder(droppable=("hyper_parameters",))
        text = json.dumps(encoder.encode(value, ""))
        encoder.check()
        value = decode(json.loads(text), encoder.tensors.__getitem__)
        kept = value["hyper_parameters"]["net"]
        assert value["hyper_parameters"]["lr"] == 0.1
        assert isinstance(kept, Dropped)
        assert kept.type_name == "tests.unit.state.test_json_tree.Custom"
        assert repr(kept).startswith(f"<not loaded: {Custom.__module__}.Custom <{Custom.__module__}.Custom object")


KNOT: list[Any] = []
KNOT.append(KNOT)


@pytest.mark.parametrize("bad", [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), [KNOT]])
def test_what_has_no_plain_memory_or_contains_itself_is_named_by_its_path(bad: Any) -> None:
    with pytest.raises(StateError, match="callbacks/x"):
        Encoder().encode({"callbacks": {"x": bad}}, "")


def test_tensors_with_the_same_path_are_kept_apart() -> None:
    zero, one, two, three = (torch.full((INLINE_BYTES + 1,), float(i)) for i in range(4))
    value = {"a/b": zero, "a": {"b": one, 1: two, "1": three}}
    assert same(trip(value), value)


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


HOSTILE: list[Any] = [
    {"$": "os.system", "v": "true"},
    {"$": "tuple", "v": 5},
    {"$": "map", "v": [[[], 1]]},
    {"$": "namespace", "v": [[1, 2]]},
    {"$": "deque", "v": [], "maxlen": -1},
    {"$": "int", "v": "x"},
    {"$": "bytes", "v": "!"},
    {"$": "dtype", "v": "F99"},
    {"$": "device", "v": "toaster"},
    {"$": "timedelta", "v": [1e300]},
    {"$": "range", "v": [1, 2, 0]},
    {"$": "omegaconf", "v": "a: &a [1]"},
    {"$": "tensor", "v": b64(b""), "dtype": "F32", "shape": [0, 1 << 70]},
    {"$": "tensor", "v": b64(b"1234"), "dtype": "F32", "shape": [-1, -1]},
    {"$": "stored", "v": "elsewhere"},
    {"$": "numpy", "v": b64(bytes(8)), "dtype": "O", "shape": [1]},
    {"$": "numpy", "v": b64(bytes(7)), "dtype": "<f8", "shape": [1]},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: json.dumps(value)[:60])
def test_a_value_that_no_encoder_writes_is_a_format_error(value: Any) -> None:
    with pytest.raises(FormatError):
        decode({"a": [value]}, dict[str, torch.Tensor]().__getitem__)
