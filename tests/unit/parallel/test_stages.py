"""Which stage owns what. Oracles: lists written out by hand, and brute force over all ways to split."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.pipeline.stages import plan_stages

WIDTH = 4


class Root(nn.Module):
    """In the place of a LightningModule: the tree that is planned."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width, bias=False)


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(linear() for _ in range(count))


class Net(nn.Module):
    """Embedding, four layers, norm and head, a parameter of its own, a dropout, and a tie if asked."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(7, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.layers = linears(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def indexed(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in range(count))


def alternating() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear(), nn.Tanh())


def named() -> nn.Module:
    return nn.ModuleDict(OrderedDict((name, linear()) for name in ("b", "a", "c")))


TRUNKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a Sequential with activations": (lambda: Root(net=alternating()), indexed("net", 6)),
    "a dict, in its order": (lambda: Root(net=Root(parts=named())), ("net.parts.b", "net.parts.a", "net.parts.c")),
    "the larger of two": (lambda: Root(a=linears(2), b=linears(3)), indexed("b", 3)),
    "the outer of two": (lambda: Root(net=nn.ModuleList(Root(of=linears(2)) for _ in range(3))), indexed("net", 3)),
    "layers of two classes": (
        lambda: Root(net=nn.ModuleList([linear(), nn.Bilinear(1, WIDTH, WIDTH), linear(), linear()])),
        indexed("net", 4),
    ),
    "wrapped children": (
        lambda: Root(layers=nn.ModuleList(Root(_checkpoint_wrapped_module=linear()) for _ in range(3))),
        indexed("layers", 3),
    ),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_the_largest_list_of_layers_is_split(name: str) -> None:
    build, layers = TRUNKS[name]
    plan = plan_stages(build(), 2)
    assert plan.layers == layers
    assert [i for a, b in plan.ranges for i in range(a, b)] == list(range(len(layers)))
    assert all(a < b for a, b in plan.ranges)


def test_an_even_split_counts_layers_with_parameters_and_an_explicit_one_names_the_first_layers() -> None:
    root = Root(net=alternating(), head=linear(50))
    assert plan_stages(root, 2, layers=["net.*"]).ranges == ((0, 4), (4, 6))
    assert plan_stages(Root(net=Net(7)), 3).ranges == ((0, 3), (3, 5), (5, 7))
    assert plan_stages(root, 3, layers=["net.*"]).ranges == ((0, 2), (2, 4), (4, 6))
    leading = Root(net=nn.Sequential(nn.Flatten(), linear(), nn.ReLU(), linear()))
    assert plan_stages(leading, 2).ranges == ((0, 3), (3, 4))
    plan = plan_stages(Root(net=Net(6)), 3, split=["net.layers.1", "net.layers.5"])
    assert plan.ranges == ((0, 1), (1, 5), (5, 6))


def test_a_module_of_two_names_is_placed_once_and_on_every_stage_if_they_are_on_both_sides() -> None:
    root = Root(before=linear(), net=Net(), after=Root(a=linear()), act=nn.ReLU(), both=linear())
    for name, module in {"blocks": root.net.layers, "again": root.after, "other": root.before}.items():  # type: ignore[union-attr]
        root.add_module(name, module)  # type: ignore[arg-type]
    plan = plan_stages(root, 2)
    assert plan.layers == indexed("net.layers", 4)
    ends = {"net.embed": "first", "net.norm": "last", "net.head": "last", "after": "last", "both": "last"}
    assert plan.others == {"before": "every", **ends}


def test_patterns_place_modules() -> None:
    root = Root(net=Net(), after=Root(a=linear()))
    for modules, moved in (({"net.*d": "last"}, ["net.embed", "net.head"]), ({"after*": "first"}, ["after"])):
        found = plan_stages(root, 2, modules=modules).others  # type: ignore[arg-type]
        assert found == plan_stages(root, 2).others | dict.fromkeys(moved, *modules.values())


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no such layer": ({"layers": ["net.layer.*"]}, r"Pipeline\(layers=…\): 1 patterns match no module of Root"),
    "no such module": ({"modules": {"net.hed": "last"}}, r"match no module of Root\n  'net\.hed' \(nearest: net\.head"),
    "a layer": ({"modules": {"net.layers.0": "last"}}, r"net\.layers\.0 cannot be placed.*\['net\.embed', 'net\.head'"),
    "too few layers": ({"stages": 5}, r"4 layers with parameters \(net\.layers\.0 … net\.layers\.3\).*into 5 pipeline"),
    "no such split": ({"split": "equal"}, r"must be \"even\", or name the first layer.*found 'equal'"),
    "out of order": ({"stages": 3, "split": ["net.layers.2", "net.layers.1"]}, r"not in the order of the layers"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_done_is_an_error_that_says_why(name: str) -> None:
    options, message = ERRORS[name]
    with pytest.raises(TopologyError, match=message):
        plan_stages(Root(net=Net()), **{"stages": 2, **options})


def test_what_must_be_told_is_an_error_that_shows_how() -> None:
    with pytest.raises(TopologyError, match=r"Root has no list of layers.*Pipeline\(layers=\["):
        plan_stages(Root(a=linear(), b=linear()), 2)
    root, layers = Root(first=linear(), middle=linear(), second=linear()), ["first", "second"]
    with pytest.raises(TopologyError, match=r"^middle is registered between layers.*Pipeline\(modules=\{'middle'"):
        plan_stages(root, 2, layers=layers)
    assert plan_stages(root, 2, layers=layers, modules={"middle": "every"}).others == {"middle": "every"}


def test_holders_are_the_stages_of_the_unit_or_all() -> None:
    plan = plan_stages(Root(net=Net(11, tied=True)), 3, modules={"net.norm": "every"})
    everywhere = frozenset({0, 1, 2})
    expected = {
        "net.scale": everywhere,  # of a container
        "net.layers": everywhere,
        "net.embed.weight": {0},
        "net.head.weight": {2},  # the tie's other name: both stages hold it
        "net.norm.bias": everywhere,
        "net.layers.1.weight": {0},
        "net.layers.10.weight": {2},  # not "net.layers.1"
        "net.layers.4.weight": {1},
        "unheard.of": everywhere,
    }
    assert {name: plan.holders(name) for name in expected} == expected
    assert plan.units() == {
        **{f"net.layers.{i}": frozenset({0 if i < 4 else 1 if i < 8 else 2}) for i in range(11)},
        "net.embed": {0},
        "net.norm": everywhere,
        "net.head": {2},
    }
