"""What torch.compile leaves alone, and what it wraps, as `compat.dynamo` says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # so that something is compiled at all
from torch import Tensor, nn

from lightning_shardckpt.compat.dynamo import compiled_from, has_compiled, not_compiled, skip_folders

CODE = """
from lightning_shardckpt.compat.dynamo import set_frame_callback

def outer(x, inner):
    return inner(x + 1) + 1

def half_seen(x, inner):
    before = set_frame_callback(None)
    first = inner(x)
    assert set_frame_callback(before) is None
    return inner(first)
"""


@pytest.fixture
def skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in a folder that is to be skipped; what is skipped besides is as before in the end."""
    (tmp_path / "shardckpt_to_skip.py").write_text(CODE)
    spec = importlib.util.spec_from_file_location("shardckpt_to_skip", tmp_path / "shardckpt_to_skip.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rules = torch._dynamo.trace_rules
    monkeypatch.setattr(rules, "SKIP_DIRS", list(rules.SKIP_DIRS))
    monkeypatch.setattr(rules, "SKIP_DIRS_RE", rules.SKIP_DIRS_RE)
    torch._dynamo.reset()
    yield module
    torch._dynamo.reset()


def graph_sizes(function: Callable[..., Tensor], inner: Callable[[Tensor], Tensor]) -> list[int]:
    """Run a function compiled; returns how many calls of torch each compiled graph has."""
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    torch.compile(lambda x: function(x, inner), backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    return sizes


def times_two(x: Tensor) -> Tensor:
    return x * 2


def test_of_skipped_folders_only_what_they_call_is_compiled(tmp_path: Path, skipped: ModuleType) -> None:
    assert graph_sizes(skipped.outer, times_two) == [3]
    skip_folders([str(tmp_path)])
    skip_folders([str(tmp_path)])
    assert torch._dynamo.trace_rules.SKIP_DIRS.count(str(tmp_path)) == 1
    assert graph_sizes(skipped.outer, times_two) == [1]


def test_without_a_callback_what_is_called_is_not_compiled(tmp_path: Path, skipped: ModuleType) -> None:
    skip_folders([str(tmp_path)])
    assert graph_sizes(skipped.half_seen, times_two) == [1]  # the second call


def test_a_compiled_module_has_the_one_that_it_wraps() -> None:
    module = nn.Linear(2, 2)
    assert compiled_from(torch.compile(module, backend="eager")) is module  # type: ignore[arg-type]  # a module
    assert compiled_from(module) is None


def test_a_module_has_compiled_ones_inside_if_they_are_compiled_in_place_or_wrapped() -> None:
    in_place, wrapped = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert not has_compiled(in_place)
    in_place[0].compile(backend="eager")
    wrapped[0] = torch.compile(wrapped[0], backend="eager")  # type: ignore[assignment]  # a module
    assert has_compiled(in_place) and has_compiled(in_place[0]) and has_compiled(wrapped)


def test_inside_nothing_is_compiled() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    with not_compiled():
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert not compiled
    double(torch.ones(2))
    assert compiled
    torch._dynamo.reset()
