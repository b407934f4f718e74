"""Tools and functions reach a store that only their options name: a server that speaks S3, and no environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_shardckpt
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.tools.diff import diff
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.map import write_map
from lightning_shardckpt.tools.verify import verify
from tests.support.stores import Bucket


@pytest.fixture
def url(s3: Bucket) -> str:
    """A checkpoint in the bucket, saved with plain functions."""
    url = s3.url("a.ckpt")
    state = {"model": torch.nn.Linear(4, 2), "step": 7}
    lightning_shardckpt.save(url, state, storage_options=s3.options)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        lightning_shardckpt.save(url, state, storage_options=s3.options)
    lightning_shardckpt.save_async(url, state, overwrite=True, storage_options=s3.options).result()
    return url


def test_functions_take_them(url: str, s3: Bucket, tmp_path: Path) -> None:
    options: dict[str, Any] = {"storage_options": s3.options}
    assert lightning_shardckpt.metadata(url, **options).step == 7
    ((_, weight),) = lightning_shardckpt.load_keys(url, ["weight"], **options)
    with lightning_shardckpt.open(url, **options) as opened:
        assert torch.equal(opened["weight"][...], weight)
    module = torch.nn.Linear(4, 2)
    assert lightning_shardckpt.load(url, {"model": module}, **options) == {"step": 7}
    assert torch.equal(module.weight, weight)
    assert torch.equal(lightning_shardckpt.load(url, **options)["model"]["weight"], weight)
    assert inspect(url, **options)["step"] == 7
    assert verify(url, **options).findings == ()
    assert diff(url, url, **options)["tensors"]["same"] == 2
    assert "weight" in write_map(url, tmp_path / "map.html", **options).read_text()
    assert torch.equal(torch.load(consolidate(url, tmp_path / "a.pt", **options))["model"]["weight"], weight)


@pytest.mark.parametrize("spelling", ["apart", "together"])
def test_every_tool_takes_them(
    spelling: str, url: str, s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--storage_options.{name}={value}" for name, value in s3.options.items()]
    if spelling == "together":
        given = ["--storage_options", json.dumps(s3.options)]
    tools = {
        "inspect": [url],
        "verify": [url],
        "diff": [url, url],
        "map": [url, "-o", str(tmp_path / "map.html")],
        "consolidate": [url, "--output_file", str(tmp_path / "out.pt")],
    }
    for tool, arguments in tools.items():
        assert main([tool, *arguments, *given]) == 0, capsys.readouterr().err
    assert (tmp_path / "out.pt").is_file()
    assert main(["consolidate", *tools["consolidate"], *given]) == 1
    assert "already exists" in capsys.readouterr().err


def test_values_are_yaml(url: str, s3: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*(f"{name}={value}" for name, value in s3.options.items()), 'config_kwargs={"read_timeout": 5}']
    assert main(["inspect", url, *(f"--storage_options.{one}" for one in [*given, "anon=false"])]) == 0
    assert main(["inspect", url, *(f"--storage_options.{one}" for one in [*given, "anon=true"])]) == 1
    assert "check the credentials" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"kye": "test"}, {"client_kwargs": {"kye": "test"}}])
def test_an_unknown_one_is_a_type_error_that_names_it(given: dict[str, Any], s3: Bucket) -> None:
    options = {**s3.options, **given}
    for url in (s3.url("a.ckpt"), "gs://bucket/a.ckpt", "az://bucket/a.ckpt"):
        with pytest.raises(TypeError, match=rf"unknown storage_options for '{url}': .*kye.*; known are .*token"):
            lightning_shardckpt.save(url, {"step": 1}, storage_options=options)
