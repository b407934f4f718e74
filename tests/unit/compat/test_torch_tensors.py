"""Names of tensor subclasses and of operations below the public API mean what this package takes them for."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat import torch_tensors as compat


class Counted(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Tensor):
    __torch_function__ = compat.NO_TORCH_FUNCTION


def test_torch_function_is_off_and_on_again_inside() -> None:
    tensor, found = torch.ones(2).as_subclass(Counted), list[int]()
    with compat.without_torch_function():
        torch.add(tensor, 1)
        found.append(Counted.calls)
        with compat.with_torch_function():
            torch.add(tensor, 1)
        torch.add(tensor, 1)
        found.append(Counted.calls)
    torch.add(tensor, 1)
    assert [*found, Counted.calls] == [0, 1, 2]


def test_a_marked_tensor_is_a_parameter_of_its_class() -> None:
    tensor = torch.ones(2).as_subclass(Plain)
    assert not isinstance(tensor, nn.Parameter)
    compat.mark_as_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)
    module = nn.Module()
    module.weight = tensor  # type: ignore[assignment]  # the metaclass of Parameter says that it is one
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def test_hooks_are_found_by_id_and_move_with_their_handles() -> None:
    seen: list[str] = []
    old, new = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not compat.gradient_hooks(old) and not compat.accumulation_hooks(old) and compat.with_hooks([old, new]) == []
    first = old.register_hook(lambda gradient: seen.append("gradient"))
    second = old.register_post_accumulate_grad_hook(lambda leaf: seen.append("accumulated"))
    hooks, after = compat.gradient_hooks(old), compat.accumulation_hooks(old)
    assert len(compat.with_hooks([old, new])) == 1 and compat.with_hooks([new, old])[0] is old
    assert hooks is not None and list(hooks) == [first.id]
    assert after is not None and list(after) == [second.id]
    compat.set_gradient_hooks(new, hooks)
    compat.set_accumulation_hooks(new, after)
    new.sum().backward()
    assert seen == ["gradient", "accumulated"]
    first.remove()
    second.remove()
    new.sum().backward()
    assert seen == ["gradient", "accumulated"]


def test_changes_in_place_count_and_can_be_left_out() -> None:
    tensor = torch.ones(4)
    view, before = tensor[:2], compat.version_of(tensor)
    view.add_(1)
    assert compat.versions_of([tensor, view]) == [compat.version_of(tensor)] * 2 == [before + 1] * 2
    tensor.data.add_(1)
    assert compat.version_of(tensor) == before + 1
    with compat.keep_version(tensor):
        tensor.add_(1)
    assert compat.version_of(tensor) == before + 1
    assert tensor.tolist() == [4, 4, 3, 3]


def test_memory_is_shared_as_long_as_another_tensor_has_it() -> None:
    tensor = torch.ones(4)
    assert not compat.shares_memory(tensor)
    other = tensor.detach()
    assert compat.shares_memory(tensor) and compat.shares_memory(other)
    del other
    assert not compat.shares_memory(tensor)
    assert compat.shares_memory(tensor[:2])
    before, kept = compat.storage_uses(tensor.untyped_storage()), [tensor.detach(), tensor[1:]]
    assert compat.storage_uses(tensor.untyped_storage()) == before + len(kept)


def test_a_transform_of_functions_is_noticed_inside() -> None:
    found: list[bool] = []

    def note(x: Tensor) -> Tensor:
        found.append(compat.in_functional_transform())
        return x.sum()

    torch.func.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    note(torch.ones(2))
    assert found == [True, True, False]


aten = torch.ops.aten


class Noting(compat.DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class NotingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_below_functions_no_mode_sees_functions_nor_history_and_without_modes_no_mode_operations() -> None:
    leaf = nn.Parameter(torch.ones(2))
    with NotingFunctions() as functions, Noting() as operations:
        with compat.below_functions():
            assert not (leaf + 1).requires_grad
        assert functions.seen == []
        operations.seen.clear()
        with compat.without_modes():
            torch.add(leaf, 1)
        assert operations.seen == []
        torch.add(leaf, 1)
    assert functions.seen == [torch.add] * 2 and operations.seen[-1] == aten.add.Tensor


def test_a_mode_does_not_import_the_compiler() -> None:
    script = """
import sys, torch
from tests.unit.compat.test_torch_tensors import Noting
with Noting() as mode:
    torch.ones(2) + 1
assert len(mode.seen) == 2, mode.seen
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_written_arguments_are_those_of_the_schema() -> None:
    a, b, out = torch.ones(2), torch.ones(2), torch.empty(2)
    assert compat.written_arguments(aten.add.Tensor, (a, b), {}) == []
    assert compat.written_arguments(aten.add_.Tensor, (a, b), {})[0] is a
    assert compat.written_arguments(aten.add.out, (a, b), {"out": out})[0] is out


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_view_has_the_memory_of_its_tensor(device: str) -> None:
    tensor = torch.empty(4, device=device)
    assert compat.viewed_tensor(tensor[1:]) is tensor and compat.viewed_tensor(tensor) is None
    assert compat.memory_id(tensor) == compat.memory_id(tensor[1:]) != compat.memory_id(torch.empty(4, device=device))
    assert [compat.dispatches(kind) for kind in (Tensor, nn.Parameter, Plain, DTensor)] == [False, False, False, True]


# ── how a file for torch.load is written before its bytes are there ───────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.complex64, torch.float8_e4m3fn])
def test_a_fake_tensor_is_written_as_a_real_one_without_its_bytes(dtype: torch.dtype) -> None:
    real, make = torch.arange(1, 7).to(dtype).view(2, 3), compat.fake_tensors()
    files = io.BytesIO(), io.BytesIO()
    torch.save([real], files[0])
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save([make((2, 3), dtype)], files[1])
    full, empty = (file.getvalue() for file in files)
    content = real.numpy().tobytes() if dtype not in (torch.float8_e4m3fn,) else bytes(real.view(torch.uint8).flatten())
    at = full.index(content)
    assert empty[at : at + len(content)] == bytes(len(content)) and empty[:400] == full[:400]
