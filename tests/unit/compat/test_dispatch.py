"""Operators say what they write; memory has an identity; a mode sees what is dispatched, and can be switched off."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_shardckpt.compat.dispatch import (
    DispatchMode,
    alive,
    below_modes,
    dispatches,
    is_in_place,
    storage_id,
    written_arguments,
)

aten = torch.ops.aten


class Noting(DispatchMode):  # type: ignore[no-untyped-call]
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


def test_below_modes_neither_mode_sees_operations_and_no_history_is_recorded() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with Noting() as operations, NotingFunctions() as functions:
        with below_modes():
            assert not (leaf + 1).requires_grad
        assert operations.seen == [] and functions.seen == []
        torch.add(leaf, 1)
    assert operations.seen == [aten.add.Tensor] and functions.seen == [torch.add]


def test_a_mode_does_not_import_the_compiler() -> None:
    script = """
import sys, torch
from tests.unit.compat.test_dispatch import Noting
with Noting() as mode:
    torch.ones(2) + 1
assert len(mode.seen) == 2, mode.seen
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_written_arguments_are_those_of_the_schema() -> None:
    a, b, out = torch.ones(2), torch.ones(2), torch.empty(2)
    assert written_arguments(aten.add.Tensor, (a, b), {}) == []
    assert written_arguments(aten.add_.Tensor, (a, b), {})[0] is a
    assert written_arguments(aten.add.out, (a, b), {"out": out})[0] is out
    assert [is_in_place(func) for func in (aten.add.Tensor, aten.add_.Tensor, aten.normal_.default)] == [
        False,
        True,
        True,
    ]


def test_only_subclasses_with_a_dispatch_of_their_own_do() -> None:
    class Renamed(Tensor):
        pass

    assert [dispatches(kind) for kind in (Tensor, nn.Parameter, Renamed, DTensor)] == [False, False, False, True]


def test_tensors_over_one_storage_share_its_id_on_the_cpu_and_on_meta() -> None:
    for device in ("cpu", "meta"):
        whole, other = torch.empty(4, device=device), torch.empty(4, device=device)
        ids = [storage_id(tensor.untyped_storage()) for tensor in (whole, whole[1:], whole.detach(), other)]
        assert ids[0] == ids[1] == ids[2] != ids[3]


def test_a_storage_is_found_by_its_weak_reference_while_something_holds_it() -> None:
    tensor = torch.ones(3)
    weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    found = alive(weak)
    assert found is not None and found.data_ptr() == tensor.data_ptr()
    del found, tensor
    gc.collect()
    assert alive(weak) is None
