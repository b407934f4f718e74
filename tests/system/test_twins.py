"""Any training code trains as on one process: pieces of it, each beside its twin under plain Lightning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache

import pytest
import torch.distributed as dist

from tests.support.pool import LEAVING_S, run_ranks
from tests.sweeps.twins.fabric import scripts
from tests.sweeps.twins.run import (
    CASES,
    TOPOLOGIES,
    Found,
    difference,
    difference_of_stages,
    fits,
    is_manual,
    is_pipelined,
    is_swept,
    run,
    twins,
    twins_resumed,
)

TOGETHER = 24  # so many cases run in the same processes, one after the other
# The suite runs one of so many cases, on each topology beginning with another one, so that together they have many;
# `python -m tests.sweeps.twins TOPOLOGY` runs all, as `… twins resumed` does with resumes.
ONE_OF = {"one": 16, "fsdp2": 16, "replicas": 16, "tp2": 16, "pp2": 8, "hsdp": 32, "fsdp2 x tp2": 32}
ONE_RESUMED_OF = 48

GUARDED = {
    "fsdp2": (
        *("TrainsBinaryNet", "ChangesWhatACallReturned", "AddsAHead", "SearchesLines"),
        *("SkipsWhatFails", "FreezesBetweenForwards", "SwapsAdaptersByBatch", "ParametrizesLate", "GanToggled"),
        *("UsesOneOfTwo", "GoesBackByItself", "RecomputesSeveralLayers", "KeepsComplexPartsNegative"),
        *("FreezesItsHeadForALoss", "HooksInForward", "HooksTied", "PenalizesAHookedLayer"),
        "PicklesItself",
    ),
    "replicas": ("SamplesByLength",),
    "tp2": ("LooksForLinear", "PrunesLayers", "WatchesEveryModule", "RecomputesSelectively"),
    "pp2": ("LooksForLinear", "GroupsParametersEarly", "AsksForParameters", "Rwkv"),
}
"""Cases that have computed something else once, and run in any case."""

REFUSED_IN_PIPELINES = {
    "ClipsByNorm": "optimizes manually (automatic_optimization = False), which cannot be pipelined",
    "GanToggled": "optimizes manually (automatic_optimization = False), which cannot be pipelined",
    "MomentumContrast": "key.embed.weight was given the data of a parameter that only another",
    "ConfiguresClipping": "combine parameters of several stages, such as a norm over all of them, need",
    "Lbfgs": "LBFGS updates all parameters as one, and a pipeline stage has only some of them",
    "Reparametrized": "is a buffer that training changes in a layer",
    "SimSiam": "was called a second time",
    "LogsGradients": "item needs the value of the gradient of net.",
    "LogsWeights": "item needs the value of net.",
    "IsWatched": "item needs the value of the gradient of net.",
    "ReadsAsNumpy": "numpy needs the value of net.",
    "UsesWeightsInInferenceMode": "__float__ needs the value of net.head.weight",
    "DecidesByValues": "__bool__ needs the value of net.",
    "PenalizesInBackward": "backward needs the value of net.",
    "PenalizesWeights": "the result of the step depends on net.",
    "HooksInStep": "has a hook (register_hook, register_post_accumulate_grad_hook)",
    "HooksTied": "embed.weight has a hook (register_hook, register_post_accumulate_grad_hook)",
    "HooksInForward": ".b.weight has a hook (register_hook, register_post_accumulate_grad_hook)",
    "StepsInBackwardByTorch": "is registered on a node of autograd's graph",
    "KeepsShadowInBuffers": "writes net.",
    "Averages": "WeightAveraging averages the weights in a copy of the whole module",
    "Finetunes": "equal needs the value of net.",
    "MixesWithTheFlipped": "compute something else of parts of a batch than of the whole",
    "TwoViewsInARow": "compute something else of parts of a batch than of the whole",
    "DrawsByItself": "draws of DrawsByItself is or holds a random generator",
    "LoadsByAssignment": "Error(s) in loading state_dict",
    "ClonesByClass": "Error(s) in loading state_dict",
    "FollowsByTorch": "__float__ needs the value of net.",
}
NOT_IN_PIPELINES = (
    *REFUSED_IN_PIPELINES,
    *("AveragesExponentially", "AveragesStochastically", "PrunesGlobally", "PrunesRows"),
    *("FinetunesBackbone", "FollowsByData", "FollowsByAssignment", "FollowsForeach", "FollowsByState"),
    *("FollowsByVector", "ResetsItsHead"),
    *("LoadsInStep", "HoldsAList", "WritesThroughViews", "Recurrent", "Attentive"),
    *("Recomputed", "ReparametrizedByHooks", "RescalesRows", "SparseGradients", "CompiledNet"),
    *("UsesWeightsByHand", "ScalesByHook", "MasksByHook", "ClampsByHook", "HooksWhileItAccumulates", "ReadsInHook"),
    "EditsAfterAccumulation",
)
"""All others that optimize automatically train in pipelines."""
CROSSED = {"pp2 x fsdp2": ["GroupsByLayer"], "pp2 x replicas": ["GroupsParametersEarly"]}
"""Cases that run in pipelines with another axis."""


NOT_RESUMED = (
    "HooksWhileItAccumulates",
    "StepsInBackwardByTorch",  # refused on several ranks
    *("AddsAGroup", "SparseGradients"),  # Lightning itself can't on one process; refused on two
    *("Finetunes", "FinetunesBackbone"),  # refused
)
GOES_ON = [name for name, case in CASES.items() if name not in NOT_RESUMED and not is_swept(case)][::ONE_RESUMED_OF]


@cache
def _chosen(topology: str) -> list[str]:
    if topology not in ONE_OF:
        return CROSSED.get(topology, [])
    every, guarded = ONE_OF[topology], list(GUARDED.get(topology, ()))
    cases = {name: case for name, case in CASES.items() if not is_swept(case)}
    if topology == "pp2":
        automatic = {name: case for name, case in cases.items() if not is_manual(case)}
        names = [n for n, case in automatic.items() if fits(case, topology) and n not in NOT_IN_PIPELINES]
        return names[::every] + guarded
    names = [name for name, case in cases.items() if fits(case, topology) and topology not in case.refused]
    return names[list(TOPOLOGIES).index(topology) % every :: every] + guarded


Way = tuple[str, str]
"""A topology, and a case that runs on it."""


@cache
def _twins(names: tuple[str, ...]) -> dict[str, Found]:
    (found,) = run_ranks(1, twins, names, init_process_group=False, timeout_s=300)
    return found  # type: ignore[no-any-return]


def run_each(ways: Sequence[Way]) -> dict[Way, Found]:
    """Run one after another; after one that is refused, where ranks end at other places, in another process group."""
    found, rank, world = dict[Way, Found](), dist.get_rank(), dist.get_world_size()
    for number, (topology, name) in enumerate(ways):
        if any(one.error for one in [*found.values()][-1:]):
            store = dist.FileStore(f"{number}", world)  # type: ignore[attr-defined]  # public, but not re-exported
            store.set(f"{rank} ended", "")
            with suppress(RuntimeError):  # time is up: a rank that waits for this one goes on when its group is gone
                store.wait([f"{other} ended" for other in range(world)], timedelta(seconds=LEAVING_S))
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
        found[topology, name] = run([name], topology)[name]
    return found


@cache
def _found(ways: tuple[Way, ...]) -> list[dict[Way, Found]]:
    return run_ranks(TOPOLOGIES[ways[0][0]][0], run_each, ways, timeout_s=300)


def _ranks(way: Way, every: Iterable[Way]) -> list[Found]:
    """What each rank found, which runs those of `every` that are for as many ranks."""
    world = TOPOLOGIES[way[0]][0]
    ways = tuple(other for other in every if TOPOLOGIES[other[0]][0] == world)
    start = ways.index(way) // TOGETHER * TOGETHER
    return [rank[way] for rank in _found(ways[start : start + TOGETHER])]


TRAINED = [(topology, name) for topology in TOPOLOGIES for name in _chosen(topology)]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "name"), TRAINED)
def test_code_trains_as_on_one_process(topology: str, name: str) -> None:
    expected = _twins(tuple(dict.fromkeys(name for _, name in TRAINED)))[name]
    ranks = _ranks((topology, name), TRAINED)
    assert not expected.error
    if is_pipelined(topology) and not any(found.error for found in ranks):
        assert difference_of_stages(ranks, expected, CASES[name].tolerance) == ""
    else:
        assert [difference(found, expected, CASES[name].tolerance) for found in ranks] == [""] * len(ranks)


REFUSED = [
    ("pp2 x fsdp2", "ReadsInHook", "net.head.weight has a hook"),
    *(
        (topology, name, said)
        for name, case in CASES.items()
        if not is_swept(case)
        for topology, said in case.refused.items()
    ),
    *(("pp2", name, said) for name, said in REFUSED_IN_PIPELINES.items() if name in CASES),  # Lightning 2.5 lacks one
]
SHARDED = [("fsdp2, nothing ignored", name, case.whole) for name, case in CASES.items() if case.whole]
REFUSALS = "(TopologyError|UnsupportedCodeError|AttributeError: Can't pickle)"
IN_PIPELINES = ("ClipsByNorm", "Lbfgs", "LogsGradients", "PenalizesWeights", "HooksInStep", "MixesWithTheFlipped")
"""One for each kind of reason for which pipelines refuse; test_pipeline_refusals has other reasons."""
OF_ARGUMENTS = "asks torch.autograd.grad for gradients of parameters that were its arguments"
NAMED = [
    ("fsdp2, nothing ignored", "KeepsAView", "the module net.head keeps a view of a parameter"),
    *(one for one in SHARDED if one[1] == "PCGrad"),
    ("replicas", "HooksWhileItAccumulates", CASES["HooksWhileItAccumulates"].refused["replicas"]),
    ("replicas", "NormalizesByRunningMean", "norm.mean differs between the data-parallel ranks"),
    ("tp2", "HiddenGated", "net.layers.0 (Between) computes something else when it is sharded"),
    ("fsdp2", "GoesBackInLayers", OF_ARGUMENTS),
    ("tp2", "PowerIterates", "the loss is a DTensor"),
    ("tp2", "LoadsByAssignment", "computes with a plain tensor beside a DTensor"),
    *(("pp2", name, REFUSED_IN_PIPELINES[name]) for name in IN_PIPELINES),
]
ELSEWHERE = [
    ("pp2 x fsdp2", "ConfiguresClipping", "mul_ writes the gradient of net.layers."),
    ("pp2 x fsdp2", "GoesBackInLayers", "grad asks for the gradient of net."),
    ("pp2 x tp2", "HiddenSoftmax", "net.layers.0 (Between) computes something else when it is sharded"),
    *((topology, "GoesBackAlongLayers", OF_ARGUMENTS) for topology in ("fsdp2", "tp2")),
]

APART = ("KeepsShadowInBuffers", "FollowsByTorch", "PenalizesInBackward")
"""A rank that is refused alone leaves the other one waiting until its process has ended."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "name", "said"),
    [
        *NAMED,
        *(pytest.param(*one, marks=pytest.mark.sweep) for one in [*ELSEWHERE, *REFUSED, *SHARDED] if one not in NAMED),
    ],
)
def test_code_that_cannot_train_so_is_refused_by_name(
    topology: str, name: str, said: str, request: pytest.FixtureRequest
) -> None:
    way, test = (topology, name), request.node.originalname
    items = [item for item in request.session.items if getattr(item, "originalname", "") == test]
    chosen = [(item.callspec.params["topology"], item.callspec.params["name"]) for item in items]
    together = [one[:2] for one in NAMED if one[:2] in chosen and one[1] not in APART]
    ranks = _ranks(way, together if way in together else [way])
    for rank in ranks:  # one that had what it asked for went on, and names the one that had not
        assert re.match(rf"({REFUSALS}|RankError)\b|.* had left before: ({REFUSALS})", rank.error), rank.error
        assert said in rank.error
    assert any(re.match(REFUSALS, rank.error) for rank in ranks)


@pytest.mark.slow
def test_scripts_of_fabric_train_as_on_one_process_or_are_refused_by_name() -> None:
    names = ["penalizes_gradients", "follows_slowly", "trains_a_gan"]
    (expected,) = run_ranks(1, scripts, names, init_process_group=False)
    for rank in run_ranks(2, scripts, [*names, "keeps_a_mean"], "replicas"):
        assert [difference(rank[name], expected[name], 1e-10) for name in names] == [""] * 3
        assert rank["keeps_a_mean"].error.startswith("UnsupportedCodeError: mean differs between the")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What replicas found, after one process, when they went on with what that one and two ranks of FSDP2 saved."""
    made, names = tmp_path_factory.mktemp("saved"), GOES_ON
    alone = run_ranks(1, twins, names, made, init_process_group=False, timeout_s=300)
    sharded = run_ranks(2, run, names, "fsdp2", made, timeout_s=300)
    assert [found.error for rank in (*alone, *sharded) for found in rank.values() if found.error] == []
    expected = run_ranks(1, twins_resumed, names, made, init_process_group=False, timeout_s=300)
    return [*expected, *run_ranks(2, run, names, "replicas", made, True, timeout_s=300)]


@pytest.mark.slow
@pytest.mark.parametrize("name", GOES_ON)
def test_code_goes_on_on_another_topology(name: str, resumed: list[dict[str, Found]]) -> None:
    expected, *ranks = (found[name] for found in resumed)
    assert not expected.error
    assert [difference(found, expected, CASES[name].tolerance) for found in ranks] == [""] * len(ranks)
