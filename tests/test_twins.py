"""Any training code trains as on one process: pieces of it, each beside its twin under plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.pool import run_ranks
from tests.twins.optimizers import __name__ as optimizers
from tests.twins.run import CASES, TOPOLOGIES, Found, difference, fits, run, twins

TOGETHER = 24  # so many cases run in the same processes, one after the other
SOME = 4  # of so many cases, one runs on the topologies other than FSDP; `python -m tests.twins` runs all

PIPELINED = [
    *(name for name, case in CASES.items() if case.module.__module__ == optimizers and name not in ("Muon", "Lbfgs")),
    *("IsSwappedForValidation", "StartsWithBias", "ConstrainsNorms", "NormalizesInForward", "MasksByHook", "Tied"),
    *("ClampsByHook", "ZeroesNanInHook", "ClipsAutomatically", "AccumulatesAutomatically", "OverridesTheStep"),
    *("Convolutional", "ListsOfParameters", "UnusedAtTimes", "UncertaintyOfTasks", "Distills", "Contrastive"),
]
REFUSED_IN_PIPELINES = {
    "ClipsByNorm": "optimizes manually (automatic_optimization = False), which cannot be pipelined",
    "GanToggled": "optimizes manually (automatic_optimization = False), which cannot be pipelined",
    "ClampsInStep": "training_step changes net.scale",
    "SlowsDown": "training_step changes net.scale",
    "IsPositive": "training_step changes net.layers.1.b.weight",
    "ConfiguresClipping": "sees the parameters of one pipeline stage only",
    "Lbfgs": "looks at all parameters at once, which are on different stages of a pipeline",
    "Reparametrized": "is a buffer that training changes in a layer",
    "SimSiam": "was called a second time",
}


NOT_RESUMED = {
    "CountsByItself": "CountingSGD has the entries ['steps', 'warm'] in its state_dict",
}
"""What a save or a load refuses."""
NOT_RESUMED_ALONE = ("AddsAGroup", "SparseGradients")  # Lightning itself can't on one process; refused on two
RESUMED = [name for name in CASES if name not in (*NOT_RESUMED, *NOT_RESUMED_ALONE, "HooksWhileItAccumulates")]


def _chosen(topology: str) -> list[str]:
    if topology == "pp2":
        return PIPELINED[:: SOME // 2]
    names = [name for name, case in CASES.items() if fits(case, topology) and topology not in case.refused]
    if topology == "replicas":  # gradients of plain parameters are those of the rank until the last batch, as under DDP
        names.remove("HooksWhileItAccumulates")
    return names if topology == "fsdp2" else names[::SOME]


def _parts(names: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER))


@cache
def _expected(names: tuple[str, ...]) -> dict[str, Found]:
    (found,) = run_ranks(1, twins, names, init_process_group=False, timeout_s=300)
    return found  # type: ignore[no-any-return]


@cache
def _found(topology: str, names: tuple[str, ...]) -> list[dict[str, Found]]:
    return run_ranks(TOPOLOGIES[topology][0], run, names, topology, timeout_s=300)


def _union(ranks: list[Found]) -> list[Found]:
    """A stage of a pipeline has its own parameters, and sees their values alone."""
    state = {name: value for found in ranks for name, value in found.state.items()}
    return [replace(found, state=state, seen=[]) for found in ranks]


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
    expected, ranks = _expected(names)[name], [rank[name] for rank in _found(topology, names)]
    if topology == "pp2":
        expected, ranks = replace(expected, seen=[]), _union(ranks)
    assert not expected.error
    assert [difference(found, expected, CASES[name].tolerance) for found in ranks] == [""] * len(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "name", "said"),
    [
        *((topology, name, said) for name, case in CASES.items() for topology, said in case.refused.items()),
        *(("pp2", name, said) for name, said in REFUSED_IN_PIPELINES.items()),
    ],
)
def test_code_that_cannot_train_so_is_refused_by_name(topology: str, name: str, said: str) -> None:
    for rank in run_ranks(TOPOLOGIES[topology][0], run, [name], topology):
        assert rank[name].error.startswith(("TopologyError", "RankError")), rank[name].error
        assert said in rank[name].error


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
    (expected,) = run_ranks(1, _twins_resumed, names, folder, init_process_group=False, timeout_s=300)
    return [expected, *run_ranks(TOPOLOGIES[topology][0], _resume, names, topology, folder, timeout_s=300)]


def _twins_resumed(names: tuple[str, ...], folder: Path) -> dict[str, Found]:
    return twins(names, folder, resume=True)


def _resume(names: tuple[str, ...], topology: str, folder: Path) -> dict[str, Found]:
    return run(names, topology, folder, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "name"), [pytest.param(names, name, id=name) for names in _parts(RESUMED) for name in names]
)
def test_code_goes_on_on_another_topology(
    names: tuple[str, ...], name: str, saved: Callable[[tuple[str, ...]], Path]
) -> None:
    expected, *ranks = (found[name] for found in _resumed(saved(names), "replicas", names))
    assert not expected.error
    assert [difference(found, expected, CASES[name].tolerance) for found in ranks] == [""] * len(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_RESUMED)
def test_state_that_would_be_lost_is_refused_by_name(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(2, run, [name], "fsdp2", tmp_path)
    if not ranks[0][name].error:
        ranks = run_ranks(2, _resume, (name,), "fsdp2", tmp_path)
    assert all(NOT_RESUMED[name] in rank[name].error for rank in ranks), ranks[0][name].error
