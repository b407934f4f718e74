"""The dicts of modules, and the lists of recurrent ones, as `compat.module_slots` has them."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from lightning_shardckpt.compat.module_slots import (
    BatchNorm,
    NormWithStatistics,
    buffer_slots,
    non_persistent_buffers,
    parameter_slots,
    refresh_flat_weights,
    restore_flat_weights,
)


def test_slots_are_what_the_module_uses() -> None:
    module = nn.Linear(2, 3, bias=False)
    assert list(parameter_slots(module)) == ["weight", "bias"] and parameter_slots(module)["bias"] is None
    other = nn.Parameter(torch.zeros(3, 2))
    parameter_slots(module)["weight"] = other
    assert module.weight is other and list(module.parameters()) == [other]
    norm = nn.BatchNorm1d(2)
    assert list(buffer_slots(norm)) == ["running_mean", "running_var", "num_batches_tracked"]
    buffer_slots(norm)["running_mean"] = mean = torch.ones(2)
    assert norm.running_mean is mean


def test_buffers_that_are_not_saved_are_named_while_they_are_there() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)
    module.register_buffer("empty", None, persistent=False)
    assert non_persistent_buffers(module) == {"derived", "empty"} and module.state_dict().keys() == {"kept"}
    module.register_buffer("derived", torch.zeros(1))
    assert non_persistent_buffers(module) == {"empty"} and module.state_dict().keys() == {"kept", "derived"}


def test_norms_are_told_by_what_they_derive_from() -> None:
    batch = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.LazyBatchNorm2d(), nn.SyncBatchNorm(2)]
    assert all(isinstance(norm, BatchNorm) and isinstance(norm, NormWithStatistics) for norm in batch)
    instance = nn.InstanceNorm2d(2, track_running_stats=True)
    assert isinstance(instance, NormWithStatistics) and not isinstance(instance, BatchNorm)
    assert not isinstance(nn.LayerNorm(2), NormWithStatistics)


@torch.no_grad()  # a graph would keep parameters, too
def test_a_recurrent_module_keeps_no_parameters_but_those_of_its_slots_once_refreshed() -> None:
    x, module, twin = torch.randn(4, 3), nn.GRU(3, 2), nn.GRU(3, 2)
    expected, before = twin(x)[0], module(x)[0]
    kept = dict(parameter_slots(module))
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in twin.named_parameters()}
    parameter_slots(module).update(copies)
    flat = refresh_flat_weights([module, nn.Linear(2, 2)])
    assert [m for m, _ in flat] == [module]
    assert torch.equal(module(x)[0], expected)
    parameter_slots(module).update(kept)
    restore_flat_weights(flat)
    references = [weakref.ref(copy) for copy in copies.values()]
    copies.clear()
    assert [reference() for reference in references] == [None] * 4  # they are in no list
    assert torch.equal(module(x)[0], before)
    old = [weakref.ref(p) for p in module.parameters()]
    parameter_slots(module).update({name: nn.Parameter(p.detach()) for name, p in twin.named_parameters()})
    kept.clear()
    flat.clear()
    assert None not in [reference() for reference in old]  # the list has them
    refresh_flat_weights([module])
    assert [reference() for reference in old] == [None] * 4
