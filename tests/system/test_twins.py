"""Any training code trains as on one process: pieces of it, each beside its twin under plain Lightning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.pool import run_ranks
from tests.sweeps.twins.fabric_run import scripts
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
ONE_OF = {"one": 24, "fsdp2": 24, "replicas": 48, "tp2": 48, "pp2": 24, "hsdp": 96, "fsdp2 x tp2": 96}
ONE_RESUMED_OF = 24

GUARDED = {
    "fsdp2": (
        *("TrainsBinaryNet", "ChangesWhatACallReturned", "AddsAHead", "SearchesLines"),
        *("SkipsWhatFails", "FreezesBetweenForwards", "SwapsAdaptersByBatch", "ParametrizesLate", "GanToggled"),
    ),
    "replicas": ("SamplesByLength",),
    "tp2": ("LooksForLinear", "PrunesLayers", "WatchesEveryModule"),
    "pp2": ("LooksForLinear", "GroupsParametersEarly"),
}
"""Cases that have computed something else once, and run in any case."""

REFUSED_IN_PIPELINES = {
    "ClipsByNorm": "optimizes manually (automatic_optimization = False), which cannot be pipelined",
    "GanToggled": "optimizes manually (automatic_optimization = False), which cannot be pipelined",
    "ClampsInStep": "training_step changes net.scale",
    "SlowsDown": "training_step changes net.scale",
    "IsPositive": "training_step changes net.layers.1.b.weight",
    "MomentumContrast": "training_step changes key.embed.weight",
    "ConfiguresClipping": "combine parameters of several stages, such as a norm over all of them, need",
    "Lbfgs": "looks at all parameters at once, which are on different stages of a pipeline",
    "Reparametrized": "is a buffer that training changes in a layer",
    "SimSiam": "was called a second time",
    "LogsGradients": "item needs the value of the gradient of net.",
    "LogsWeights": "item needs the value of net.",
    "IsWatched": "item needs the value of the gradient of net.",
    "ReadsAsNumpy": "numpy needs the value of net.",
    "DecidesByValues": "__bool__ needs the value of net.",
    "ConstrainsNorms": "item needs the value of net.",
    "PenalizesInBackward": "backward needs the value of net.",
    "PenalizesWeights": "what the step returns depends on net.",
    "HooksInStep": "has a hook (register_hook, register_post_accumulate_grad_hook)",
    "HooksTied": "embed.weight has a hook (register_hook, register_post_accumulate_grad_hook)",
    "HooksInForward": ".b.weight has a hook (register_hook, register_post_accumulate_grad_hook)",
    "WatchesModules": "net.layers.0 has the hook",
    "WatchesEveryModule": "every module (torch.nn.modules.module.register_module_forward_hook, …) got a forward or",
    "StepsInBackwardByTorch": "is registered on a node of autograd's graph",
    "KeepsShadowInBuffers": "writes net.",
    "Averages": "copy_ writes net.",
    "Diffusion": "_foreach_copy_ writes net.",
    "Finetunes": "equal needs the value of net.",
    "TakesFromAnIterator": "weights of TakesFromAnIterator, an iterator or a file, is used before the last layer",
    "CountsInLayers": "net.layers.0.calls is an attribute that changes with every call",
    "TwoViewsInARow": "compute something else of parts of a batch than of the whole",
    "ScalesActivations": "registers the hook ScalesActivations.training_step",
    "RetainsGradients": "calls retain_grad of a tensor of shape (16, 8)",
    "PenalizesInputGradients": "torch.autograd.grad finds no way through the layers of other stages",
    "LoadsByAssignment": "a hook loads a state dict that doesn't fit",
    "ClonesByClass": "a hook loads a state dict that doesn't fit",
    "DistillsAttention": "'Attention' object has no attribute 'map'. If the forward of a layer sets it:",
    "FollowsByTorch": "__float__ needs the value of net.",
}
NOT_IN_PIPELINES = (
    *REFUSED_IN_PIPELINES,
    *("AveragesExponentially", "AveragesStochastically", "PrunesGlobally", "PrunesRows", "GoesOnUnfrozen"),
    *("FinetunesBackbone", "FollowsByData", "FollowsByAssignment", "FollowsForeach", "FollowsByState"),
    *("FollowsByVector", "FollowsBeforeZeroGrad", "FollowsByCallback", "NormalizesPrototypes", "ResetsItsHead"),
    *("LoadsInStep", "CopiesItself", "Elastic", "HoldsAList", "WritesThroughViews", "Recurrent", "Attentive"),
    *("Recomputed", "Codebook", "ReparametrizedByHooks", "RescalesRows", "SparseGradients", "CompiledNet"),
    *("UsesWeightsByHand", "ScalesByHook", "MasksByHook", "ClampsByHook", "HooksWhileItAccumulates", "ReadsInHook"),
    *("EditsAfterAccumulation", "WatchesActivations"),
)
"""All others that optimize automatically train in pipelines."""
CROSSED = {"pp2 x fsdp2": ["GroupsByLayer", "CountsByItself"], "pp2 x replicas": ["GroupsParametersEarly"]}
"""Cases that run in pipelines with another axis."""


NOT_RESUMED = (
    "HooksWhileItAccumulates",
    "StepsInBackwardByTorch",  # refused on several ranks
    *("AddsAGroup", "SparseGradients"),  # Lightning itself can't on one process; refused on two
    "GoesOnUnfrozen",  # Lightning itself goes on with frozen layers
)
RESUMED = [name for name, case in CASES.items() if name not in NOT_RESUMED and not is_swept(case)]


@cache
def _chosen(topology: str) -> list[str]:
    if topology not in ONE_OF:
        return CROSSED.get(topology, [])
    every, guarded = ONE_OF[topology], list(GUARDED.get(topology, ()))
    cases = {name: case for name, case in CASES.items() if not is_swept(case)}
    if topology == "pp2":
        names = [name for name, case in cases.items() if name not in NOT_IN_PIPELINES and not is_manual(case)]
        return names[::every] + guarded
    names = [name for name, case in cases.items() if fits(case, topology) and topology not in case.refused]
    if topology == "replicas":  # gradients of plain parameters are those of the rank until the last batch, as under DDP
        names.remove("HooksWhileItAccumulates")
    return names[list(TOPOLOGIES).index(topology) % every :: every] + guarded


def _parts(names: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER))


def _expected(name: str) -> Found:
    chosen = [name for name in CASES if any(name in _chosen(topology) for topology in TOPOLOGIES)]
    (names,) = (part for part in _parts(chosen) if name in part)
    return _twins(names)[name]


@cache
def _twins(names: tuple[str, ...]) -> dict[str, Found]:
    (found,) = run_ranks(1, twins, names, init_process_group=False, timeout_s=300)
    return found  # type: ignore[no-any-return]


@cache
def _found(topology: str, names: tuple[str, ...]) -> list[dict[str, Found]]:
    return run_ranks(TOPOLOGIES[topology][0], run, names, topology, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "names", "name"),
    [
        pytest.param(topology, names, name, id=f"{topology}-{name}")
        for topology in TOPOLOGIES
        for names in _parts(_chosen(topology))
        for name in names
    ],
)
def test_code_trains_as_on_one_process(topology: str, names: tuple[str, ...], name: str) -> None:
    expected, ranks = _expected(name), [rank[name] for rank in _found(topology, names)]
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
BY_TORCH = [("fsdp2 by torch", name, case.exact) for name, case in CASES.items() if case.exact]
REFUSALS = "(TopologyError|UnsupportedCodeError)"
IN_PIPELINES = (
    *("ClipsByNorm", "ClampsInStep", "IsPositive", "ConfiguresClipping", "Lbfgs", "Reparametrized", "LogsGradients"),
    *("DecidesByValues", "PenalizesInBackward", "PenalizesWeights", "HooksInStep", "WatchesModules", "Diffusion"),
    *("KeepsShadowInBuffers", "TakesFromAnIterator", "CountsInLayers", "TwoViewsInARow", "ScalesActivations"),
    *("RetainsGradients", "PenalizesInputGradients", "FollowsByTorch"),
)
"""One for each reason for which pipelines refuse; test_pipeline_refusals has the other reasons."""
NAMED = [
    ("pp2 x fsdp2", "ConfiguresClipping", "mul_ writes the gradient of net.layers."),
    ("fsdp2 by torch", "KeepsAView", "the module net.head keeps a view of a parameter"),
    *(one for one in BY_TORCH if one[1] in ("PCGrad", "AdaHessian", "HooksInForward", "BackwardIntoSome")),
    ("replicas", "NormalizesByRunningMean", "norm.mean differs between the data-parallel ranks"),
    ("tp2", "HiddenGated", "net.layers.0 (Gated) computes something else when it is sharded"),
    ("tp2", "PowerIterates", "the loss is a DTensor"),
    ("tp2", "LoadsByAssignment", "which tensor_parallel_plan shards, was assigned a whole parameter"),
    ("tp2", "PicklesItself", "a module that tensor_parallel_plan shards can't be pickled"),
    ("pp2", "Adan", "Adan updates a parameter differently without the others"),
    ("pp2", "NormalizesByAllRanks", "is a buffer that a step changes before the layers of a pipeline"),
    ("pp2", "ReadsGradientInForward", "training_step changes the gradient of net."),
    ("pp2", "MarksWeightsInForward", "training_step changes the attribute calls of net.head.weight"),
    *(("pp2", name, REFUSED_IN_PIPELINES[name]) for name in IN_PIPELINES),
    *[one for one in REFUSED if one[0] != "pp2" and one[1] not in ("Maml", "PenaltyOnGradients", "CompiledNet")][::3],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "name", "said"),
    [
        *NAMED,
        *(pytest.param(*one, marks=pytest.mark.sweep) for one in [*REFUSED, *BY_TORCH] if one not in NAMED),
    ],
)
def test_code_that_cannot_train_so_is_refused_by_name(topology: str, name: str, said: str) -> None:
    ranks = run_ranks(TOPOLOGIES[topology][0], run, [name], topology)
    for rank in ranks:  # one that had what it asked for went on, and names the one that had not
        error = rank[name].error
        assert re.match(rf"({REFUSALS}|RankError)\b|.* had left before: ({REFUSALS})", error), error
        assert said in error
    assert any(re.match(REFUSALS, rank[name].error) for rank in ranks)


@pytest.mark.slow
def test_scripts_of_fabric_train_as_on_one_process_or_are_refused_by_name() -> None:
    names = ["penalizes_gradients", "follows_slowly"]
    (expected,) = run_ranks(1, scripts, names, init_process_group=False)
    for rank in run_ranks(2, scripts, names, "replicas"):
        assert [difference(rank[name], expected[name], 1e-10) for name in names] == ["", ""]
    for rank in run_ranks(2, scripts, ["keeps_a_mean"], "replicas"):
        assert rank["keeps_a_mean"].error.startswith("UnsupportedCodeError: mean differs between the")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Makes checkpoints of cases, on one process and of two ranks."""

    @cache
    def folder(names: tuple[str, ...]) -> Path:
        made = tmp_path_factory.mktemp("saved")
        alone = run_ranks(1, twins, names, made, init_process_group=False, timeout_s=300)
        sharded = run_ranks(2, run, names, "fsdp2", made, timeout_s=300)
        assert [found.error for rank in (*alone, *sharded) for found in rank.values() if found.error] == []
        return made

    return folder


@cache
def _resumed(folder: Path, topology: str, names: tuple[str, ...]) -> list[dict[str, Found]]:
    (expected,) = run_ranks(1, twins_resumed, names, folder, init_process_group=False, timeout_s=300)
    return [expected, *run_ranks(TOPOLOGIES[topology][0], run, names, topology, folder, True, timeout_s=300)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "name"),
    [pytest.param(names, name, id=name) for names in _parts(RESUMED[::ONE_RESUMED_OF]) for name in names],
)
def test_code_goes_on_on_another_topology(
    names: tuple[str, ...], name: str, saved: Callable[[tuple[str, ...]], Path]
) -> None:
    expected, *ranks = (found[name] for found in _resumed(saved(names), "replicas", names))
    assert not expected.error
    assert [difference(found, expected, CASES[name].tolerance) for found in ranks] == [""] * len(ranks)
