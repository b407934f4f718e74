"""LightningCLI takes hyper-parameters of whatever is at ``--ckpt_path``, where it alone looks at single files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI

from lightning_shardckpt.compat.lightning_cli import take_hyper_parameters


class Parser:
    def parse_object(self, given: dict[str, Any], config: Any) -> Any:
        return given, config


def parsed(path: str, stored: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the config after the checkpoint was looked at, and the paths that were read."""
    kind, read = type("CLI", (LightningCLI,), {}), list[str]()
    take_hyper_parameters(kind, lambda path, safe: read.append(path) or dict(stored))  # type: ignore[func-returns-value]
    cli = SimpleNamespace(config=Namespace(subcommand="test", test=Namespace(ckpt_path=path)), parser=Parser())
    before = cli.config
    kind._parse_ckpt_path(cli)
    return (cli.config[0] if cli.config is not before else None), read


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"width": 3, "_instantiator": "x"}, {"width": 3}),
        ({"width": 3, "_class_path": "a.B"}, {"class_path": "a.B", "dict_kwargs": {"width": 3}}),
        ({}, None),
    ],
)
def test_hyper_parameters_of_a_directory_are_parsed(stored: Any, expected: Any, tmp_path: Path) -> None:
    given = None if expected is None else {"test": {"model": expected}}
    assert parsed(str(tmp_path), stored) == (given, [str(tmp_path)])
    assert parsed("s3://bucket/a.ckpt", stored) == (given, ["s3://bucket/a.ckpt"])


@pytest.mark.parametrize("path", ["best", "", None])
def test_words_and_nothing_are_left_to_lightning(path: Any) -> None:
    assert parsed(path, {"width": 3}) == (None, [])
