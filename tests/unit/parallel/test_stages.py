"""Which stage owns what. Oracles: lists written out by hand, and brute force over all ways to split."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.pipeline.stages import StagePlan, plan_stages
from tests.support.nets import llama

WIDTH = 4


class Root(nn.Module):
    """In the place of a LightningModule: the tree that is planned."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width, bias=False)


def linears(count: int) -> Iterator[nn.Linear]:
    return (linear() for _ in range(count))


class Net(nn.Module):
    """Embedding, four layers, norm and head, a parameter of its own, a dropout, and a tie if asked."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(7, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(linears(layers))
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


class Experts(nn.Module):
    """A layer that has a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(linears(2))


class Tower(nn.Module):
    """Lists in a list: neither is a list of layers of one class with parameters, but the inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList([nn.ModuleList(linears(2)), nn.ModuleList(linears(3))])


def hybrid() -> nn.Module:
    """As Jamba has them."""
    return nn.ModuleList([linear(), nn.Bilinear(1, WIDTH, WIDTH), linear(), linear()])


def named_twice(root: nn.Module, **more: Callable[[Any], nn.Module]) -> nn.Module:
    """``root`` with more names for modules in it."""
    for name, find in more.items():
        root.add_module(name, find(root))
    return root


TRUNKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a list": (lambda: Root(net=Net()), indexed("net.layers", 4)),
    "a Sequential with activations": (lambda: Root(net=alternating()), indexed("net", 6)),
    "a dict, in its order": (lambda: Root(net=Root(parts=named())), ("net.parts.b", "net.parts.a", "net.parts.c")),
    "the larger of two": (
        lambda: Root(a=nn.ModuleList(linears(2)), b=nn.ModuleList(linears(3))),
        indexed("b", 3),
    ),
    "the outer of two": (lambda: Root(net=nn.ModuleList(Experts() for _ in range(3))), indexed("net", 3)),
    "the largest inner list": (lambda: Root(net=Tower()), indexed("net.small.1", 3)),
    "not a list of different things": (
        lambda: Root(net=nn.ModuleList([nn.Embedding(99, WIDTH), linear()]), rest=nn.ModuleList(linears(2))),
        indexed("rest", 2),
    ),
    "layers of two classes": (lambda: Root(net=hybrid()), indexed("net", 4)),
    "layers by their first names": (
        lambda: named_twice(Root(one=linear(), two=linear()), layers=lambda r: nn.Sequential(r.one, nn.Tanh(), r.two)),
        ("one", "layers.1", "two"),
    ),
    "not one without parameters": (
        lambda: Root(acts=nn.Sequential(nn.ReLU(), nn.ReLU()), rest=nn.ModuleList(linears(2))),
        indexed("rest", 2),
    ),
    "the children of a wrapper": (
        lambda: Root(net=Root(_orig_mod=Root(layers=nn.ModuleList(linears(2))))),
        indexed("net.layers", 2),
    ),
    "wrapped children": (
        lambda: Root(layers=nn.ModuleList(Root(_checkpoint_wrapped_module=linear()) for _ in range(3))),
        indexed("layers", 3),
    ),
}


@pytest.mark.parametrize("name", TRUNKS)
def test_the_trunk_is_the_largest_list_of_layers(name: str) -> None:
    build, layers = TRUNKS[name]
    plan = plan_stages(build(), 2)
    assert plan.layers == layers
    assert_partition(plan)


def assert_partition(plan: StagePlan) -> None:
    assert [i for a, b in plan.ranges for i in range(a, b)] == list(range(len(plan.layers)))
    assert all(a < b for a, b in plan.ranges)


LLAMA = {"model.embed_tokens": "first", "model.norm": "last", "lm_head": "last"}
GPT2 = {"transformer.wte": "first", "transformer.wpe": "first", "transformer.ln_f": "last", "lm_head": "last"}
BERT = {"bert.embeddings": "first", "bert.pooler": "last", "classifier": "last"}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 7}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=5, max_position_embeddings=8, **sizes))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_inner=8, n_layer=5, vocab_size=7, n_positions=8))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, str]]] = {
    "llama": (lambda: llama(num_hidden_layers=5), "model.layers", LLAMA),
    "gpt2": (_gpt2, "transformer.h", GPT2),
    "bert": (_bert, "bert.encoder.layer", BERT),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_hugging_face_are_split_without_being_told_how(family: str) -> None:
    build, trunk, others = FAMILIES[family]
    root = Root(net=build())
    ranges = {2: [(0, 3), (3, 5)], 3: [(0, 2), (2, 4), (4, 5)], 4: [(0, 2), (2, 3), (3, 4), (4, 5)]}
    for stages, expected in ranges.items():
        plan = plan_stages(root, stages)
        assert plan.layers == indexed(f"net.{trunk}", 5)
        assert plan.others == {f"net.{name}": where for name, where in others.items()}
        assert list(plan.ranges) == expected
        # every parameter is somewhere, and those of layers and others on one stage each
        assert {len(plan.holders(name)) for name, _ in root.named_parameters(remove_duplicate=False)} == {1}
        assert {next(iter(plan.holders(n))) for n, _ in root.named_parameters()} == set(range(stages))


# ── splits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def every_split(count: int, stages: int) -> Iterator[list[int]]:
    return ([0, *split] for split in combinations(range(1, count), stages - 1))


def loads(costs: Sequence[int], starts: Sequence[int]) -> list[int]:
    return [sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)])]


def starts_by_cost(costs: Sequence[int], stages: int) -> list[int]:
    """The first layers of all stages, where layers have parameters in the ratio of their costs."""
    root = Root(layers=nn.ModuleList(map(linear, costs)))
    return [start for start, _ in plan_stages(root, stages, layers=["layers"], split="cost").ranges]


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_part_is_as_small_as_it_can_be(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for count in range(1, 9):
        costs = torch.randint(1, 20, (count,), generator=generator).tolist()
        for stages in range(1, count + 1):
            every = [(max(loads(costs, at)), sum(x * x for x in loads(costs, at))) for at in every_split(count, stages)]
            found = starts_by_cost(costs, stages)
            assert found in list(every_split(count, stages))
            assert max(loads(costs, found)) == min(every)[0]


@pytest.mark.parametrize("count", range(1, 12))
def test_equal_layers_are_split_as_equally_as_can_be_with_the_larger_parts_first(count: int) -> None:
    for stages in range(1, count + 1):
        expected = [len(part) for part in torch.arange(count).tensor_split(stages)]
        assert loads([1] * count, starts_by_cost([1] * count, stages)) == expected


def test_an_even_split_counts_layers_with_parameters_and_keeps_activations_after_them() -> None:
    root = Root(net=alternating(), head=linear(50))
    assert plan_stages(root, 2, layers=["net.*"]).ranges == ((0, 4), (4, 6))
    assert plan_stages(root, 3, layers=["net.*"]).ranges == ((0, 2), (2, 4), (4, 6))
    leading = Root(net=nn.Sequential(nn.Flatten(), linear(), nn.ReLU(), linear()))
    assert plan_stages(leading, 2).ranges == ((0, 3), (3, 4))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_split_by_cost_weighs_parameters_and_the_modules_at_the_ends(stages: int) -> None:
    widths = [3, 9, 1, 4, 12, 2]
    root = Root(
        embed=nn.Embedding(10, WIDTH),
        layers=nn.ModuleList(linear(w) for w in widths),
        head=linear(7),
        shared=linear(30),
    )
    plan = plan_stages(root, stages, layers=["layers"], split="cost", modules={"shared": "every"})
    costs = [w * WIDTH for w in widths]
    costs[0] += 10 * WIDTH
    costs[-1] += 7 * WIDTH
    assert_partition(plan)
    best = min(max(loads(costs, split)) for split in every_split(len(costs), stages))
    assert max(loads(costs, [a for a, _ in plan.ranges])) == best


def test_an_explicit_split_names_the_first_layers() -> None:
    root = Root(net=Net(6))
    plan = plan_stages(root, 3, split=["net.layers.1", "net.layers.5"])
    assert plan.ranges == ((0, 1), (1, 5), (5, 6))


def test_layers_can_be_named_across_modules_in_the_order_of_the_patterns() -> None:
    root = Root(net=Net(), stem=Root(conv=linear()))
    plan = plan_stages(root, 2, layers=["stem.conv", "net.layers", "net.norm", "net.head"])
    assert plan.layers == ("stem.conv", *indexed("net.layers", 4), "net.norm", "net.head")
    assert plan.others == {"net.embed": "first"}
    assert plan_stages(root, 2, layers=["net.layers.[0-9]", "net.layers.*"][1:]).layers == indexed("net.layers", 4)
    assert plan_stages(root, 2, layers=["net.layers.3", "net.layers.*"]).layers[:2] == ("net.layers.3", "net.layers.0")


def test_a_sequential_that_is_named_is_one_layer() -> None:
    root = Root(a=nn.Sequential(linear(), linear()), b=linear())
    assert plan_stages(root, 2, layers=["a", "b"]).layers == ("a", "b")


# ── modules outside of the layers ───────────────────────────────────────────────────────────────────────────────────


def test_modules_go_to_the_stage_on_their_side_of_the_layers() -> None:
    plan = plan_stages(Root(before=linear(), net=Net(), after=Root(a=linear()), act=nn.ReLU()), 3)
    assert plan.others == {
        "before": "first",
        "net.embed": "first",
        "net.norm": "last",
        "net.head": "last",
        "after": "last",
    }


def test_a_module_of_two_names_is_placed_once_and_on_every_stage_if_they_are_on_both_sides() -> None:
    root = Root(before=linear(), net=Net(), after=linear(), both=linear())
    named_twice(root, blocks=lambda r: r.net.layers, again=lambda r: r.after, first=lambda r: r.net.layers[0])
    named_twice(root, within=lambda r: r.after, other=lambda r: r.before)
    plan = plan_stages(root, 2)
    assert plan.layers == indexed("net.layers", 4)
    ends = {"net.embed": "first", "net.norm": "last", "net.head": "last", "after": "last", "both": "last"}
    assert plan.others == {"before": "every", **ends}


def test_statistics_of_a_norm_without_weights_are_placed_too() -> None:
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    assert plan_stages(Root(norm=norm, layers=nn.ModuleList(linears(2))), 2).others == {"norm": "first"}
    stateless = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
    assert plan_stages(Root(norm=stateless, layers=nn.ModuleList(linears(2))), 2).others == {}


@pytest.mark.parametrize(
    ("modules", "moved"),
    [
        ({"net.head": "first"}, {"net.head": "first"}),
        ({"net.embed": "every", "net.norm": "every"}, {"net.embed": "every", "net.norm": "every"}),
        ({"net.*d": "last"}, {"net.embed": "last", "net.head": "last"}),
        ({"**.embed": "last"}, {"net.embed": "last"}),
        ({"after": "first", "after.*": "first"}, None),
        ({"after*": "first"}, {"after": "first"}),
    ],
)
def test_patterns_place_modules(modules: dict[str, Any], moved: dict[str, str] | None) -> None:
    root = Root(net=Net(), after=Root(a=linear()))
    usual = plan_stages(root, 2).others
    if moved is None:
        with pytest.raises(TopologyError, match=r"after\.a cannot be placed"):
            plan_stages(root, 2, modules=modules)
        return
    assert plan_stages(root, 2, modules=modules).others == {**usual, **moved}


def between() -> nn.Module:
    return Root(first=linear(), middle=linear(), second=linear())


def test_a_module_between_the_layers_must_be_placed() -> None:
    with pytest.raises(TopologyError, match=r"^middle is registered between layers.*Pipeline\(modules=\{'middle'"):
        plan_stages(between(), 2, layers=["first", "second"])
    plan = plan_stages(between(), 2, layers=["first", "second"], modules={"middle": "every"})
    assert plan.others == {"middle": "every"}


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no such layer": ({"layers": ["net.layer.*"]}, r"Pipeline\(layers=…\): 1 patterns match no module of Root"),
    "with the nearest": ({"layers": ["net.layer.*"]}, r"nearest: .*net\.layers\.\*"),
    "layers in layers": ({"layers": ["net.layers.*", "net"]}, r"net\.layers\.0 is a part of another layer"),
    "no such module": (
        {"modules": {"net.hed": "last"}},
        r"Pipeline\(modules=…\): 1 patterns match no module of Root\n  'net\.hed' \(nearest: net\.head",
    ),
    "no such place": ({"modules": {"net.head": "middle"}}, r"'net\.head' must be one of \('first', 'last', 'every'\)"),
    "a layer": ({"modules": {"net.layers.0": "last"}}, r"net\.layers\.0 cannot be placed.*\['net\.embed', 'net\.head'"),
    "above the layers": ({"modules": {"net": "last"}}, r"net cannot be placed"),
    "without parameters": ({"modules": {"net.drop": "last"}}, r"net\.drop cannot be placed"),
    "too few layers": ({"stages": 5}, r"4 layers with parameters \(net\.layers\.0 … net\.layers\.3\).*into 5 pipeline"),
    "no such split": ({"split": "equal"}, r'must be "even", "cost" or a list of layer names, found \'equal\''),
    "too few names": ({"stages": 3, "split": ["net.layers.1"]}, r"all 3 stages but the first: expected 2 of"),
    "too many names": ({"split": ["net.layers.1", "net.layers.2"]}, r"all 2 stages but the first: expected 1 of"),
    "no layer": ({"split": ["net.head"]}, r"must name the first layer of all.*found \['net\.head'\]"),
    "the first layer": ({"split": ["net.layers.0"]}, r"not in the order of the layers"),
    "out of order": ({"stages": 3, "split": ["net.layers.2", "net.layers.1"]}, r"not in the order of the layers"),
    "twice": ({"stages": 3, "split": ["net.layers.2", "net.layers.2"]}, r"not in the order of the layers"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_done_is_an_error_that_says_why(name: str) -> None:
    options, message = ERRORS[name]
    with pytest.raises(TopologyError, match=message):
        plan_stages(Root(net=Net()), **{"stages": 2, **options})


def test_a_module_without_a_list_of_layers_is_an_error_that_shows_how_to_name_them() -> None:
    for root in (Root(a=linear(), b=linear()), Root(net=nn.ModuleList(linears(1))), Root()):
        with pytest.raises(TopologyError, match=r"Root has no list of layers.*Pipeline\(layers=\["):
            plan_stages(root, 2)


def test_a_layer_that_is_named_twice_is_taken_once_or_refused_as_such() -> None:
    with pytest.raises(TopologyError, match=r"net\.layers\.0' .*already"):
        plan_stages(Root(net=Net()), 2, layers=["net.layers.*", "net.layers.0"])


def test_two_large_parts_in_a_sequential_do_not_hide_the_layers_of_one() -> None:
    """Which have to be split, as two parts cannot make four stages."""
    root = Root(model=nn.Sequential(Net(8), linear()))
    assert plan_stages(root, 4).layers == indexed("model.0.layers", 8)


# ── who holds what ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_holders_are_the_stages_of_the_unit_or_all() -> None:
    plan = plan_stages(Root(net=Net(11, tied=True)), 3, modules={"net.norm": "every"})
    everywhere = frozenset({0, 1, 2})
    expected = {
        "net.scale": everywhere,  # of a container
        "net.drop": everywhere,
        "net": everywhere,
        "net.layers": everywhere,
        "net.embed.weight": {0},
        "net.head.weight": {2},  # the tie's other name: both stages hold it
        "net.norm.bias": everywhere,
        "net.layers.1.weight": {0},
        "net.layers.1": {0},
        "net.layers.10.weight": {2},  # not "net.layers.1"
        "net.layers.4.weight": {1},
        "unheard.of": everywhere,
    }
    assert {name: plan.holders(name) for name in expected} == expected
    assert plan.stages == 3
    assert plan.units() == {
        **{f"net.layers.{i}": frozenset({0 if i < 4 else 1 if i < 8 else 2}) for i in range(11)},
        "net.embed": {0},
        "net.norm": everywhere,
        "net.head": {2},
    }


def test_with_one_stage_all_is_on_it() -> None:
    root = Root(net=Net())
    plan = plan_stages(root, 1)
    assert {plan.holders(name) for name, _ in root.named_parameters()} == {frozenset({0})}


def test_planning_changes_nothing_in_the_module() -> None:
    root = Root(net=Net(tied=True))
    before = [(name, id(module), sorted(vars(module))) for name, module in root.named_modules()]
    versions = [(name, p._version, p.clone()) for name, p in root.named_parameters()]
    plan_stages(root, 2, split="cost", modules={"net.norm": "every"})
    assert [(name, id(module), sorted(vars(module))) for name, module in root.named_modules()] == before
    for (name, p), (old, version, value) in zip(root.named_parameters(), versions, strict=True):
        assert (name, p._version) == (old, version)
        assert torch.equal(p, value)
