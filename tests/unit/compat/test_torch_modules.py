"""Modules are changed, read and compiled as this package relies on."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo  # so that something is compiled at all
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD

from lightning_shardckpt.compat import torch_modules as compat


def test_without_state_a_part_of_a_model_neither_gives_nor_takes_nor_moves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not compat.withholds_state(model[1])
    compat.withhold_state(model[1], lambda: None)
    assert compat.withholds_state(model[1]) and not compat.withholds_state(model[0])
    assert type(model[1]) is nn.BatchNorm1d
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    model.double()
    assert model[0].weight.dtype == torch.float64 and model[1].weight.dtype == torch.float32
    copied = copy.deepcopy(model)
    assert model[1].double() is model[1] and set(copied.state_dict()) == {"0.weight", "0.bias"}


class CallsTwice(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + super().__call__(x)


@pytest.mark.parametrize("kind", [nn.Linear, CallsTwice])
def test_a_call_is_intercepted_around_hooks_and_the_class_stays(kind: type[nn.Linear]) -> None:
    layer, x = kind(2, 2), torch.ones(2)
    expected, said = layer(x), list[str]()
    layer.register_forward_hook(lambda *args: said.append("hook"))
    compat.intercept_calls(layer, lambda original, *args: said.append("before") or 3 * original(*args))
    assert torch.equal(layer(x), 3 * expected)
    assert said == ["before", *["hook"] * (2 if kind is CallsTwice else 1)]
    assert isinstance(layer, kind) and (type(layer) is nn.Linear) == (kind is nn.Linear)
    assert torch.equal(nn.Linear.forward(copy.deepcopy(layer), x), nn.Linear.forward(layer, x))


def test_unregistered_tensors_are_attributes() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    weight, mean = norm.weight, norm.running_mean
    compat.unregister_tensors(norm)
    assert norm.weight is weight and norm.running_mean is mean
    assert not list(norm.parameters()) and not list(norm.buffers())
    norm.register_buffer("other", torch.zeros(1))
    norm.__dict__.pop("scratch")
    norm.register_buffer("scratch", torch.zeros(1))
    assert set(norm.state_dict()) == {"other", "scratch"}


def test_hooks_are_seen_and_removed_and_those_of_all_modules_can_be_left_out() -> None:
    calls, layer, of = list[str](), nn.Linear(1, 1), torch.nn.modules.module

    def run() -> list[str]:
        calls.clear()
        layer(torch.ones(1, requires_grad=True)).sum().backward()
        return list(calls)

    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    assert not compat.result_hooks(layer)
    handles = [
        layer.register_forward_hook(lambda *_: calls.append("forward")),
        layer.register_full_backward_hook(lambda *_: calls.append("backward")),
        layer.register_full_backward_pre_hook(lambda *_: calls.append("backward pre")),
    ]
    assert compat.result_hooks(layer) == {handle.id for handle in handles} and len(run()) == 4
    compat.keep_hooks(layer)
    assert run() == [] and not compat.argument_hooks(layer) and not compat.result_hooks(layer)
    handle = of.register_module_forward_hook(lambda *_: calls.append("global"))
    with compat.without_global_hooks():
        assert run() == []
    assert run() == ["global"]
    handle.remove()


def test_modules_of_torch_have_a_method_that_initializes_their_parameters() -> None:
    for module in (nn.Linear(2, 2), nn.LSTM(2, 2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1)):
        parameter = next(module.parameters())
        version = parameter._version
        reset = compat.reset_method(module)
        assert reset is not None
        reset()
        assert parameter._version > version
    assert compat.reset_method(nn.ReLU()) is None


def test_buffers_that_are_not_saved_are_named_while_they_are_there() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)
    module.register_buffer("empty", None, persistent=False)
    assert compat.non_persistent_buffers(module) == {"derived", "empty"} and module.state_dict().keys() == {"kept"}
    module.register_buffer("derived", torch.zeros(1))
    assert compat.non_persistent_buffers(module) == {"empty"} and module.state_dict().keys() == {"kept", "derived"}


@torch.no_grad()  # a graph would keep parameters, too
def test_a_recurrent_module_keeps_no_parameters_but_those_of_its_slots_once_refreshed() -> None:
    x, module, twin = torch.randn(4, 3), nn.GRU(3, 2), nn.GRU(3, 2)
    expected, before = twin(x)[0], module(x)[0]
    kept = dict(compat.parameter_slots(module))
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in twin.named_parameters()}
    compat.parameter_slots(module).update(copies)
    flat = compat.refresh_flat_weights([module, nn.Linear(2, 2)])
    assert [m for m, _ in flat] == [module]
    assert torch.equal(module(x)[0], expected)
    compat.parameter_slots(module).update(kept)
    compat.restore_flat_weights(flat)
    references = [weakref.ref(copy) for copy in copies.values()]
    copies.clear()
    assert [reference() for reference in references] == [None] * 4  # they are in no list
    assert torch.equal(module(x)[0], before)


def hook(*arguments: Any) -> None:
    """Do nothing."""


class Overridden(nn.BatchNorm1d):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def test_code_of_users_and_of_libraries_is_told_apart() -> None:
    assert compat.pre_load_origins(nn.Linear(1, 1)) == compat.pre_load_origins(pl.LightningModule()) == set()
    assert compat.pre_load_origins(nn.BatchNorm1d(1)) == {"library"}
    assert compat.pre_load_origins(Overridden(1)) == {"user"}
    module = nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(partial(hook, 1))  # type: ignore[no-untyped-call]  # torch's
    assert compat.pre_load_origins(module) == {"user"} and not compat.has_post_load_hooks(module)
    module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch's
    assert compat.has_post_load_hooks(module) and compat.pre_load_origins(checkpoint_wrapper(nn.Linear(1, 1))) == set()


def test_each_parameter_that_is_deep_copied_is_told_with_its_copy_until_it_ends() -> None:
    told = list[tuple[nn.Parameter, nn.Parameter]]()
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    net[1].weight = net[0].weight  # type: ignore[assignment]  # tied
    end = compat.on_deepcopy(lambda *pair: told.append(pair))
    try:
        copied = copy.deepcopy(net)
    finally:
        end()
    pairs = zip(net.parameters(), copied.parameters(), strict=True)
    assert [(id(a), id(b)) for a, b in told] == [(id(p), id(q)) for p, q in pairs]
    assert all(torch.equal(a, b) for a, b in told)
    copy.deepcopy(net)
    assert len(told) == 2


CODE = """
from lightning_shardckpt.compat.torch_modules import set_frame_callback

def outer(x, inner):
    return inner(x + 1) + 1

def half_seen(x, inner):
    before = set_frame_callback(None)
    first = inner(x)
    set_frame_callback(before)
    return inner(first)
"""


def test_of_skipped_folders_only_what_they_call_is_compiled_and_without_a_callback_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: how many calls of torch each compiled graph has."""
    rules, functions = torch._dynamo.trace_rules, dict[str, Any]()
    exec(compile(CODE, str(tmp_path / "skipped.py"), "exec"), functions)
    monkeypatch.setattr(rules, "SKIP_DIRS", list(rules.SKIP_DIRS))
    monkeypatch.setattr(rules, "SKIP_DIRS_RE", rules.SKIP_DIRS_RE)

    def graph_sizes(name: str) -> list[int]:
        sizes: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
            return graph.forward

        torch._dynamo.reset()
        torch.compile(lambda x: functions[name](x, lambda y: y * 2), backend=backend)(torch.ones(2))
        return sizes

    assert graph_sizes("outer") == [3]
    compat.skip_folders([str(tmp_path)])
    compat.skip_folders([str(tmp_path)])
    assert rules.SKIP_DIRS.count(str(tmp_path)) == 1
    assert graph_sizes("outer") == [1] and graph_sizes("half_seen") == [1]  # of the second call
    torch._dynamo.reset()


def test_a_module_has_compiled_ones_inside_if_they_are_compiled_in_place_or_wrapped() -> None:
    in_place, wrapped = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert not compat.has_compiled(in_place) and compat.compiled_call(in_place[0]) is None
    in_place[0].compile(backend="eager")
    wrapped[0] = torch.compile(wrapped[0], backend="eager")  # type: ignore[assignment]  # a module
    assert compat.has_compiled(in_place) and compat.has_compiled(in_place[0]) and compat.has_compiled(wrapped)
    compat.intercept_calls(in_place[0], lambda original, *args: original(*args))
    assert callable(compat.compiled_call(in_place[0]))
    assert compat.is_compiled(in_place[0]) and not compat.is_compiled(in_place)


class Doubling(nn.Module):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)

    def load_state_dict(self, *args: Any) -> Any:
        return super().load_state_dict(*args)


def test_children_buffers_classes_and_values_of_a_module_can_be_replaced() -> None:
    model, new = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh()), nn.Linear(2, 2, bias=False)
    compat.child_slots(model)["1"] = new
    compat.buffer_slots(model[0])["running_mean"] = mean = torch.ones(2)
    assert list(model)[1] is new and model[0].running_mean is mean and not compat.has_own_load(new)
    compat.mix_in(new, Doubling)
    copies = compat.copy_modules(model, torch.zeros_like)
    compat.convert_tensors(model, lambda tensor: torch.full_like(tensor, 7))
    assert list(copies[model].children()) == [copies[model[0]], copies[new]] and type(copies[new]) is type(new)
    assert all(tensor.eq(0).all() for tensor in copies[model].state_dict().values())
    assert isinstance(new, nn.Linear) and new(torch.ones(1, 2)).tolist() == [[28, 28]] and compat.has_own_load(new)
    kept = new.register_forward_pre_hook(lambda module, args: None)
    new.register_forward_hook(lambda module, args, result: None)
    compat.keep_hooks(new, {kept.id})
    assert compat.argument_hooks(new) == {kept.id} and not compat.result_hooks(new)

    def refuse(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise AssertionError("it compiles")

    compiled = torch.compile(new, backend=refuse)
    assert compat.compiled_from(compiled) is new and compat.compiled_from(new) is None  # type: ignore[arg-type]  # a module
    with compat.run_eagerly():
        assert compiled(torch.ones(1, 2)).tolist() == [[28, 28]]


class Own(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("hook", ["state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_a_method_or_a_hook_that_saves_or_loads_otherwise_is_seen(hook: str) -> None:
    own, plain = (kind([torch.zeros(2, requires_grad=True)], lr=0.1) for kind in (Own, SGD))
    assert compat.has_own_state_dict(own)
    ask = compat.has_own_state_dict if hook == "state_dict_post" else compat.has_load_hooks
    ran = list[object]()
    assert not ask(plain)
    handle = getattr(plain, f"register_{hook}_hook")(lambda *given: ran.append(given))
    assert ask(plain)
    plain.load_state_dict(plain.state_dict())
    assert len(ran) == 1
    handle.remove()
    assert not ask(plain)
