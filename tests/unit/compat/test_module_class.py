"""Live modules change what they do, as the names of torch promise: mixins, slots, hooks, construction."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.module_class import (
    after_unpickling,
    any_global_hook,
    argument_hooks,
    child_slots,
    clear_hooks,
    compiled_call,
    convert_tensors,
    has_forward_hooks,
    intercept_calls,
    is_compiled,
    keep_hooks,
    mix_in,
    mix_out,
    parameters_made_of,
    result_hooks,
    unregister_tensors,
    withhold_state,
    withholds_state,
    without_global_hooks,
)


class Doubling(nn.Module):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


def test_a_mixin_is_called_first_and_the_class_keeps_its_name() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    expected = 2 * layer(torch.ones(2))
    mix_in(layer, Doubling)
    assert torch.equal(layer(torch.ones(2)), expected)
    assert isinstance(layer, nn.Linear)
    assert (type(layer).__name__, type(layer).__module__) == (nn.Linear.__name__, nn.Linear.__module__)
    assert type(other) is nn.Linear
    mix_out(layer, Doubling)
    assert type(layer) is nn.Linear and torch.equal(2 * layer(torch.ones(2)), expected)


def test_without_state_a_part_of_a_model_neither_gives_nor_takes_nor_moves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not withholds_state(model[1])
    withhold_state(model[1])
    assert withholds_state(model[1]) and not withholds_state(model[0])
    assert type(model[1]) is nn.BatchNorm1d
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    model.double()
    assert model[0].weight.dtype == torch.float64 and model[1].weight.dtype == torch.float32
    copied = copy.deepcopy(model)
    assert copied[1].double() is copied[1] and set(copied.state_dict()) == {"0.weight", "0.bias"}


class CallsTwice(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + super().__call__(x)


@pytest.mark.parametrize("kind", [nn.Linear, CallsTwice])
def test_a_call_is_intercepted_around_hooks_and_the_class_stays(kind: type[nn.Linear]) -> None:
    layer, x = kind(2, 2), torch.ones(2)
    expected, said = layer(x), list[str]()
    layer.register_forward_hook(lambda *args: said.append("hook"))

    def call(original: Any, *args: Any) -> Any:
        said.append("before")
        return 3 * original(*args)

    intercept_calls(layer, call)
    assert torch.equal(layer(x), 3 * expected)
    assert said == ["before", *["hook"] * (2 if kind is CallsTwice else 1)]
    assert isinstance(layer, kind) and (type(layer) is nn.Linear) == (kind is nn.Linear)
    assert torch.equal(nn.Linear.forward(copy.deepcopy(layer), x), nn.Linear.forward(layer, x))


def test_what_a_call_runs_instead_is_known() -> None:
    layer, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
    assert compiled_call(layer) is compiled_call(compiled) is None
    compiled.compile(backend="eager")
    assert callable(compiled_call(compiled))
    intercept_calls(layer, lambda original, *args: original(*args))
    assert callable(compiled_call(layer)) and torch.equal(layer(torch.ones(2)), layer.forward(torch.ones(2)))
    intercept_calls(compiled, lambda original, *args: original(*args))
    assert is_compiled(compiled) and not is_compiled(layer) and not is_compiled(nn.Linear(2, 2))


def test_children_can_be_replaced_in_their_slots() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    new = nn.ReLU()
    child_slots(model)["1"] = new
    assert list(child_slots(model)) == ["0", "1"] and list(model)[1] is new


def test_unregistered_tensors_are_attributes() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    weight, mean = norm.weight, norm.running_mean
    unregister_tensors(norm)
    assert norm.weight is weight and norm.running_mean is mean
    assert not list(norm.parameters()) and not list(norm.buffers())
    norm.register_buffer("other", torch.zeros(1))
    norm.__dict__.pop("scratch")
    norm.register_buffer("scratch", torch.zeros(1))
    assert set(norm.state_dict()) == {"other", "scratch"}


def test_parameters_and_buffers_are_converted() -> None:
    norm = nn.BatchNorm1d(2)
    convert_tensors(norm, lambda tensor: torch.full_like(tensor, 7))
    assert all(bool((tensor == 7).all()) for tensor in [*norm.parameters(), *norm.buffers()])


def test_hooks_are_seen_and_removed() -> None:
    calls: list[str] = []
    layer = nn.Linear(1, 1)
    assert not has_forward_hooks(layer) and not result_hooks(layer)
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    assert not result_hooks(layer)
    handles = [
        layer.register_forward_hook(lambda *_: calls.append("forward")),
        layer.register_full_backward_hook(lambda *_: calls.append("backward")),
        layer.register_full_backward_pre_hook(lambda *_: calls.append("backward pre")),
    ]
    layer.register_state_dict_pre_hook(lambda *_: calls.append("state dict"))
    assert has_forward_hooks(layer) and result_hooks(layer) == {handle.id for handle in handles}
    clear_hooks(layer)
    layer(torch.ones(1, requires_grad=True)).sum().backward()
    layer.state_dict()
    assert calls == [] and not has_forward_hooks(layer) and not result_hooks(layer)


def test_hooks_before_a_forward_are_seen_and_some_are_kept() -> None:
    module, ran = nn.Linear(2, 2), list[str]()
    kept = module.register_forward_pre_hook(lambda module, args: ran.append("before"))
    module.register_forward_pre_hook(lambda module, args: ran.append("removed"))
    after = module.register_forward_hook(lambda module, args, result: ran.append("after"))
    assert len(argument_hooks(module)) == 2 and kept.id in argument_hooks(module)
    keep_hooks(module, {kept.id, after.id})
    module(torch.ones(1, 2))
    assert ran == ["before", "after"] and argument_hooks(module) == {kept.id}


def test_a_hook_of_all_modules_is_noticed() -> None:
    assert not any_global_hook()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert any_global_hook()
    handle.remove()
    assert not any_global_hook()


def test_hooks_of_all_modules_can_be_left_out_of_a_call() -> None:
    module, ran, of = nn.Linear(2, 2), list[str](), torch.nn.modules.module
    handles = [
        of.register_module_forward_pre_hook(lambda *_: ran.append("before")),
        of.register_module_forward_hook(lambda *_: ran.append("after")),
        of.register_module_full_backward_hook(lambda *_: ran.append("backward")),
    ]
    with without_global_hooks():
        module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert ran == []
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert ran == ["before", "after", "backward"]
    for handle in handles:
        handle.remove()
    assert not any_global_hook()


def test_parameters_are_made_of_other_data_inside_and_in_this_thread_only() -> None:
    found: list[Tensor] = []
    with parameters_made_of(lambda data: data + 1):
        found.append(nn.Parameter(torch.zeros(1)))
        found.append(nn.Linear(1, 1, bias=False).weight)
        other = threading.Thread(target=lambda: found.append(nn.Parameter(torch.zeros(1), requires_grad=False)))
        other.start()
        other.join()
    found.append(nn.Parameter(torch.zeros(1)))
    assert [found[i].item() for i in (0, 2, 3)] == [1, 0, 0]
    assert type(found[0]) is nn.Parameter and [p.requires_grad for p in found] == [True, True, False, True]


def test_deep_copies_are_told_of_inside_only() -> None:
    seen: list[nn.Module] = []
    layer = nn.Sequential(nn.Linear(1, 1))
    with after_unpickling(seen.append):
        twin = copy.deepcopy(layer)
    copy.deepcopy(layer)
    assert {id(module) for module in seen} == {id(module) for module in twin.modules()}
