"""One table of what a mapping from stored names to new ones does, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.key_mapping import KeyMapping

NAMES = ["a.w", "b.w", "x"]


def shout(name: str) -> str | None:
    return f"m.{name}" if "." in name else None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        pytest.param(None, {"a.w": "a.w", "b.w": "b.w", "x": "x"}, id="nothing"),
        pytest.param({"a.w": "b.w", "b.w": "a.w"}, {"b.w": "a.w", "a.w": "b.w", "x": "x"}, id="whole names, swapped"),
        pytest.param({"a": "c", "w": "v"}, {"a.w": "a.w", "b.w": "b.w", "x": "x"}, id="part of a name is no name"),
        pytest.param({"^a": "b", "^b": "a"}, {"b.w": "a.w", "a.w": "b.w", "x": "x"}, id="expressions, swapped"),
        pytest.param(
            {r"^(.)\.": r"net.\1.", "w$": "weight"},
            {"net.a.weight": "a.w", "net.b.weight": "b.w", "x": "x"},
            id="several expressions in one name",
        ),
        pytest.param({"^a|^b": "c", "^b": "d", "^[a]": "e"}, None, id="two names that become one"),
        pytest.param({r"^.\.": "c.", "^b": "d", "b.w": "kept"}, {"c.w": "a.w", "kept": "b.w", "x": "x"}, id="first"),
        pytest.param({"^": "net."}, {"net.a.w": "a.w", "net.b.w": "b.w", "net.x": "x"}, id="a prefix"),
        pytest.param({"()": "-"}, {"-a-.-w": "a.w", "-b-.-w": "b.w", "-x": "x"}, id="matches without a length"),
        pytest.param({"x": None, "^b": None}, {"a.w": "a.w"}, id="left out"),
        pytest.param({r"^.\.": "c.", r"\.w$": None, "b.w": "b"}, {"b": "b.w", "x": "x"}, id="left out first"),
        pytest.param(shout, {"m.a.w": "a.w", "m.b.w": "b.w"}, id="function"),
        pytest.param(["^a=b", "^b=a", "x=y"], {"b.w": "a.w", "a.w": "b.w", "y": "x"}, id="texts"),
        pytest.param(["^b=null", "x=null"], {"a.w": "a.w"}, id="texts that leave out"),
        pytest.param([r"^a\.=", "x=nulls"], {"w": "a.w", "b.w": "b.w", "nulls": "x"}, id="texts that strip a prefix"),
    ],
)
def test_all_names_are_mapped_at_once(given: Any, found: dict[str, str] | None) -> None:
    mapping = KeyMapping.of_texts(given, "") if isinstance(given, list) else KeyMapping.of(given)
    if found is not None:
        assert mapping.apply(NAMES) == found
        return
    with pytest.raises(MismatchError, match=r"gives 1 name several times\n  c.w  of a.w, b.w"):
        mapping.apply(NAMES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"(": ""}, "'(' is not a regular expression"),
        ({"^a": r"\1"}, "'^a' is not a regular expression for '\\\\1': invalid group reference"),
        (["(=x"], "'(' is not a regular expression"),
        ({"a": 3}, "'a': 3, but a name must map to a name"),
        ({"a": ["b", "c"]}, "'a': ['b', 'c'], but a name must map to a name"),
        ({3: "a"}, "3: 'a', but a name must map to a name"),
        (("^a", "b"), "is a dict from stored names (or regular"),
        ("a=b", "is a dict from stored names (or regular"),
        (["x=y", "nothing"], "'nothing' is not OLD=NEW"),
    ],
)
def test_what_is_no_mapping_is_wrong_usage(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^renames.*{re.escape(words)}"):
        KeyMapping.of_texts(given, "renames") if isinstance(given, list) else KeyMapping.of(given, "renames")


def test_a_function_that_makes_no_name_is_an_error() -> None:
    with pytest.raises(MismatchError, match=r"returns 3 for 'a\.w'"):
        KeyMapping.of(lambda name: 3).apply(NAMES)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("entries", "lines"),
    [
        ({"x": "y", "^a": "b"}, []),
        ({"typo": "y", "^q": "b", "z": None}, ["'typo'", "'z'", "'^q'"]),
        ({"mine": "x"}, ["'mine'  matches no name in the checkpoint, but 'x' does: entries go from stored"]),
        ({"a": "net"}, ["'a'  matches no name in the checkpoint; write a regular expression for a part of names"]),
    ],
)
def test_entries_about_no_name_are_told_with_what_may_be_meant(
    entries: dict[str, str | None], lines: list[str]
) -> None:
    found = KeyMapping.of(entries).unused(NAMES)
    assert len(found) == len(lines)
    assert all(one.startswith(f"key_mapping: {line}") for one, line in zip(found, lines, strict=True))
