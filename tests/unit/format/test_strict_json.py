"""JSON that other parsers would take is refused: too long, too deep, with NaN or with a key twice."""

from __future__ import annotations

import json
import random

import pytest

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import MAX_DEPTH, MAX_JSON_BYTES, parse_json


def test_json_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(FormatError, match="file x"):
        parse_json(b'"\xff"', "file x")


def test_json_beyond_the_limit_is_not_parsed() -> None:
    with pytest.raises(FormatError, match=f"limit of {MAX_JSON_BYTES}"):
        parse_json(b" " * (MAX_JSON_BYTES + 1), "file x")


def nested(draw: random.Random, depth: int) -> tuple[object, int]:
    """A JSON value with strings that look like structure, and how many levels it has; a list of nothing has one."""
    if depth == 0 or draw.random() < 0.3:
        return draw.choice([1, None, "", "]", "[{", '"', "\\", '\\"]', '{"a":[', "é\\\\"]), 0
    children = [nested(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    levels = 1 + max((level for _, level in children), default=0)
    values = [value for value, _ in children]
    return (values if draw.random() < 0.5 else {f'{"[" * i}"\\{i}': v for i, v in enumerate(values)}), levels


def test_a_value_is_refused_if_and_only_if_it_is_nested_too_deep() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        value, levels = nested(draw, 6)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1])).encode()
        around = MAX_DEPTH - levels
        found = parse_json(b"[" * around + text + b"]" * around, "x")
        for _ in range(around):
            (found,) = found
        assert found == value
        with pytest.raises(FormatError, match="nested deeper"):
            parse_json(b"[" * (around + 1) + text + b"]" * (around + 1), "x")
