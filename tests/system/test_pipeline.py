"""An unchanged LightningModule trains over pipeline stages as it does in one process of plain torch."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import FSDP, Pipeline
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from tests.support.nets import PLAN, full_state
from tests.support.pipes import BUILDERS, MODULES, RAGGED, Case, Pipe, Trained, Twin
from tests.support.pool import run_each, run_ranks
from tests.support.tiny import trainer

TOLERANCE = 1e-12  # sums of float64 in another order, through AdamW with eps 1e-3 (see nets.optimizer_of)

# ── ways to train ───────────────────────────────────────────────────────────────────────────────────────────────────


def options(**strategy: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(strategy.items())


PIPELINE = {"pipeline_parallel_size": 2}
BY_MICROBATCH = options(pipeline=Pipeline(loss="microbatch"))
ONE_F_ONE_B = options(pipeline=Pipeline(schedule="1f1b", loss="microbatch"))
INTERLEAVED = options(
    pipeline=Pipeline(schedule="interleaved_1f1b", loss="microbatch", stages_per_rank=2)
)
HARD = Case("tied net", late=True, clip=0.05, accumulate=2, scheduler="step")
DEEP = replace(HARD, net="tied deep net")

TOGETHER = 8  # cases in the same processes: each run leaves a dozen groups behind, whose threads slow down the next

State = dict[str, Tensor]

# Beside interleaved_1f1b: those that split the backward, and those whose last stage is on the first rank.
LOOPED_SCHEDULES = ["looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"]


class Group(NamedTuple):
    """Cases that the same processes train one after another."""

    world: int
    sizes: dict[str, Any]
    cases: dict[str, Case]

    @property
    def parts(self) -> int:
        """Into how many parts data parallelism splits a batch."""
        return self.world // self.sizes["pipeline_parallel_size"] // self.sizes.get("tensor_parallel_size", 1)

    @property
    def ranks_per_stage(self) -> int:
        return self.world // self.sizes["pipeline_parallel_size"]


GROUPS = {
    "training": Group(
        2,
        PIPELINE,
        {
            "built late": Case(late=True),
            "everything at once": replace(HARD, accumulate=3, sizes=RAGGED),
            "masked loss, recomputed": Case("recomputed", task="masked", sizes=RAGGED),
            "dict of outputs": Case(module="Answering", sizes=RAGGED),
            "buffer that counts": Case(module="Counting"),
            "metrics, sizes change": Case(module="Measured", sizes=RAGGED),
            "callbacks decide": Case(module="Deciding", epochs=9, scheduler="plateau", sizes=(12, 12)),
        },
    ),
    "models": Group(
        2,
        PIPELINE,
        {
            "conditioned, split by name": Case(
                "conditioned", strategy=options(pipeline=Pipeline(split=["net.layers.third"]))
            ),
            "shared by stages": Case(
                "adapted",
                clip=0.05,
                strategy=options(pipeline=Pipeline(modules={"net.head": "last", "net.adapter": "every"})),
            ),
            "tied llama": Case("tied llama", clip=0.05),
        },
    ),
    "schedules": Group(
        2,
        PIPELINE,
        {
            "1f1b": replace(HARD, sizes=RAGGED, strategy=(*ONE_F_ONE_B, ("fsdp", FSDP(activation_checkpointing=True)))),
        },
    ),
    "two stages per rank": Group(
        2,
        PIPELINE,
        {
            "interleaved_1f1b, sizes change": replace(DEEP, sizes=RAGGED, strategy=INTERLEAVED),
            **{
                name: replace(
                    DEEP,
                    strategy=options(pipeline=Pipeline(schedule=name, loss="microbatch", stages_per_rank=2)),
                )
                for name in LOOPED_SCHEDULES
            },
        },
    ),
    "with fsdp": Group(
        4,
        PIPELINE | {"data_parallel_shard_size": 2},
        {"gpipe": HARD},
    ),
    "with tensor": Group(
        4,
        PIPELINE | {"tensor_parallel_size": 2},
        {
            "gpipe": replace(HARD, strategy=options(pipeline=Pipeline(microbatches=2))),
        },
    ),
    "with fsdp and tensor": Group(
        8, PIPELINE | {"data_parallel_shard_size": 2, "tensor_parallel_size": 2}, {"gpipe": HARD}
    ),
}
QUICK = {
    *(("training", case) for case in ("built late", "masked loss, recomputed", "buffer that counts")),
    ("models", "tied llama"),
    ("schedules", "1f1b"),
}
SWEPT = {
    *(("two stages per rank", name) for name in ("looped_bfs", "interleaved_zero_bubble", "dualpipe_v")),
    *(("with fsdp and tensor", "gpipe"), ("schedules", "a user's file")),
    ("two stages per rank", "interleaved_1f1b, sizes change"),
}
"""What the suite leaves to a run with ``--sweeps``; each of them varies what others combine."""


def marks(group: str, case: str) -> list[pytest.MarkDecorator]:
    if (group, case) in QUICK:
        return []
    return [pytest.mark.slow, *([pytest.mark.sweep] if (group, case) in SWEPT else [])]


EVERY = [
    pytest.param(group, case, id=f"{group}: {case}", marks=marks(group, case))
    for group in GROUPS
    for case in GROUPS[group].cases
]


def training(module: str) -> pytest.MarkDecorator:
    """All cases with this LightningModule."""
    return pytest.mark.parametrize(("group", "case"), [p for p in EVERY if case_of(*p.values).module == module])


def case_of(group: str, case: str) -> Case:
    return GROUPS[group].cases[case]


def train_all(cases: list[Case], sizes: dict[str, Any]) -> list[Trained]:
    out = []
    for case in cases:
        try:
            out.append(train(case, sizes))
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
    return out


def train(case: Case, sizes: dict[str, Any]) -> Trained:
    """Collective: every rank must call it."""
    # Only rank 0 has the right seed for weights that are built early: they must come from it.
    pl.seed_everything(3 if case.late or dist.get_rank() == 0 else 99, verbose=False)
    plan: Any = PLAN if case.net in ("net", "tied net") else "auto"
    run = trainer(
        {"tensor_parallel_plan": plan, **sizes, **dict(case.strategy)},
        max_epochs=case.epochs,
        precision="64-true",
        gradient_clip_val=case.clip,
        accumulate_grad_batches=case.accumulate,
        use_distributed_sampler=False,
        enable_checkpointing=case.module == "Deciding",
    )
    module, first = MODULES[case.module](case), []

    def on_train_start() -> None:
        first.append(full_state(module))

    module.on_train_start = on_train_start  # type: ignore[method-assign]
    run.fit(module)
    out = Trained(
        module.returned,
        first[0],
        full_state(module),
        {name: float(value) for name, value in run.callback_metrics.items()},
        [group["lr"] for group in run.optimizers[0].param_groups],
        [name for name, p in module.named_parameters(remove_duplicate=False) if not isinstance(p, Placeholder)],
        sum(local(p).numel() for p in module.parameters() if not isinstance(p, Placeholder)),
        {"loss": [float(run.strategy.reduce(step["loss"])) for step in module.returned]},
    )
    if case.module == "Deciding":
        (stopping,), (saving,) = (run.early_stopping_callbacks, run.checkpoint_callbacks)
        assert isinstance(stopping, EarlyStopping)
        assert isinstance(saving, ModelCheckpoint)
        out.more |= {"epochs": run.current_epoch, "stopped": stopping.stopped_epoch, "wait": stopping.wait_count}
        out.more |= {"best": Path(saving.best_model_path).name, "score": float(saving.best_model_score)}
    if case.module == "Measured":
        out.more["test"] = run.test(module, verbose=False)[0]["test"]
        out.more["predictions"] = run.predict(module)
    return out


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def train_twins(cases: list[tuple[Case, int]]) -> list[Trained]:
    return [Twin(case, parts).train() for case, parts in cases]


# ── once per group ──────────────────────────────────────────────────────────────────────────────────────────────────


class Selected:
    """What the selected tests need, trained when the first one asks: a group's cases in one set of processes."""

    def __init__(self, wanted: list[tuple[str, str]]) -> None:
        self._wanted = wanted
        self._found: dict[str, dict[str, list[Trained]] | Exception] = {}
        self._twins: dict[tuple[Case, int], Trained] = {}

    def ranks(self, group: str, case: str) -> list[Trained]:
        """What each rank saw; what went wrong in one case is raised for every case of its group."""
        if group not in self._found:
            try:
                self._found[group] = self._train(group)
            except AssertionError as error:
                self._found[group] = error
        found = self._found[group]
        if isinstance(found, Exception):
            raise found
        return found[case]

    def twin(self, group: str, case: str) -> Trained:
        if not self._twins:
            keys = list(dict.fromkeys(self._key(*wanted) for wanted in self._wanted))
            (trained,) = run_ranks(1, train_twins, keys)
            self._twins = dict(zip(keys, trained, strict=True))
        return self._twins[self._key(group, case)]

    def _train(self, group: str) -> dict[str, list[Trained]]:
        world, sizes, cases = GROUPS[group]
        chosen = {name: case for name, case in cases.items() if (group, name) in self._wanted}
        found = {}
        for start in range(0, len(chosen), TOGETHER):
            names = list(chosen)[start : start + TOGETHER]
            ranks = run_ranks(world, train_all, [chosen[name] for name in names], sizes, timeout_s=240)
            found |= {name: [rank[index] for rank in ranks] for index, name in enumerate(names)}
        return found

    def _key(self, group: str, case: str) -> tuple[Case, int]:
        return replace(case_of(group, case), strategy=()), GROUPS[group].parts


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Selected:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    params = [item.callspec.params for item in items]
    return Selected([(one["group"], one["case"]) for one in params if "group" in one])


# ── the same numbers ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("group", "case"), EVERY)
def test_training_over_stages_equals_plain_torch(group: str, case: str, selected: Selected) -> None:
    alone, ranks = selected.twin(group, case), selected.ranks(group, case)
    losses = [float(step["loss"]) for step in alone.returned]
    assert_same_states([rank.first for rank in ranks], alone.first, 0)
    for rank in ranks:
        assert rank.more["loss"] == pytest.approx(losses, abs=TOLERANCE)
        assert rank.rates == alone.rates
        metrics = {name: rank.metrics.get(name, math.nan) for name in alone.metrics}
        assert metrics == {name: ranks[0].metrics.get(name) for name in metrics}
        assert metrics == {
            name: pytest.approx(value, abs=1e-6 if name == "val_loss" else TOLERANCE)  # torchmetrics sums in float32
            for name, value in alone.metrics.items()
        }
    assert_same_states([rank.last for rank in ranks], alone.last, TOLERANCE)


def assert_same_states(ranks: list[State], expected: State, tolerance: float) -> None:
    """Together the ranks have every tensor; those that have the same one agree to the bit."""
    union = {name: value for rank in ranks for name, value in rank.items()}
    assert union.keys() == expected.keys()
    for rank in ranks:
        different = [name for name, value in rank.items() if not torch.equal(value, union[name])]
        assert different == []
    distance = {name: (union[name] - value).abs().max().item() for name, value in expected.items()}
    assert {name: d for name, d in distance.items() if not d <= tolerance} == {}


@training("Answering")
def test_everything_a_step_returns_reaches_every_rank(group: str, case: str, selected: Selected) -> None:
    alone = selected.twin(group, case)
    for rank in selected.ranks(group, case):
        for index, (got, expected) in enumerate(zip(rank.returned, alone.returned, strict=True)):
            assert set(got) == {"loss", "logits", "right", "note"}
            torch.testing.assert_close(got["logits"], expected["logits"], rtol=0, atol=1e-12)
            assert got["right"] == (expected["logits"].argmax(-1) == expected["targets"]).sum()
            assert got["note"] == f"step {index}"


@training("Counting")
def test_a_buffer_counts_steps_not_microbatches(group: str, case: str, selected: Selected) -> None:
    for rank in selected.ranks(group, case):
        assert rank.last["seen"] == len(case_of(group, case).sizes)


@training("Deciding")
def test_callbacks_decide_alike_on_every_rank(group: str, case: str, selected: Selected) -> None:
    vals = selected.twin(group, case).more["vals"]
    best = min(range(len(vals)), key=vals.__getitem__)
    assert 0 < best < len(vals) - 1 < 8  # so that they have something to decide
    for rank in selected.ranks(group, case):
        assert rank.more["epochs"] == len(vals)
        assert rank.more["stopped"] == len(vals) - 1
        assert rank.more["wait"] == len(vals) - 1 - best
        assert rank.more["best"] == f"epoch={best}.ckpt"
        assert rank.more["score"] == pytest.approx(vals[best], abs=1e-12)


@training("Measured")
def test_test_and_predict_equal_plain_torch(group: str, case: str, selected: Selected) -> None:
    alone, ranks = selected.twin(group, case), selected.ranks(group, case)
    tensor, parts = GROUPS[group].sizes.get("tensor_parallel_size", 1), GROUPS[group].parts
    for number, rank in enumerate(ranks):
        assert rank.more["test"] == ranks[0].more["test"]
        assert rank.more["test"] == pytest.approx(alone.more["test"], abs=1e-12)
        part = number // tensor % parts
        for got, logits in zip(rank.more["predictions"], alone.more["predictions"], strict=True):
            expected = logits.chunk(parts)[part]  # the twin's batches are its parts, one after another
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


# ── who holds what ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "case"),
    [
        ("training", "built late"),
        ("training", "everything at once"),
        ("models", "shared by stages"),
        ("with fsdp", "gpipe"),
    ],
)
def test_stages_share_no_parameters_but_ties_and_those_of_containers(group: str, case: str, selected: Selected) -> None:
    ranks, parameters = selected.ranks(group, case), whole_parameters(case_of(group, case))
    per_stage = GROUPS[group].ranks_per_stage
    stages = [ranks[first : first + per_stage] for first in range(0, len(ranks), per_stage)]
    shared = set()
    for rank in (rank for stage in stages for rank in stage):
        assert set(rank.last).issuperset(rank.held)
    for index, stage in enumerate(stages):
        held = set(stage[0].held)
        assert all(set(rank.held) == held for rank in stage)
        shared |= {name for other in stages[:index] for name in held & set(other[0].held)}
        once = {parameters[name] for name in held}  # a tied one has two names
        elements = sum(p.numel() for p in once if p.ndim) + len(stage) * sum(p.ndim == 0 for p in once)
        assert sum(rank.numel for rank in stage) == elements
    assert {name for stage in stages for name in stage[0].held} == set(parameters)
    assert shared - MAY_BE_SHARED == set()


MAY_BE_SHARED = {
    *("net.position", "net.temperature", "net.frozen"),
    *("net.embed.weight", "net.head.weight"),  # tied
    *("net.adapter.weight", "net.adapter.bias"),  # on every stage, as told
}


def whole_parameters(case: Case) -> dict[str, nn.Parameter]:
    root = nn.ModuleDict({"net": BUILDERS[case.net]()})
    return dict(root.named_parameters(remove_duplicate=False))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "case"), [("models", "conditioned, split by name")])
def test_the_split_is_the_one_asked_for(group: str, case: str, selected: Selected) -> None:
    for rank, layers in zip(selected.ranks(group, case), ({"first", "second"}, {"third"}), strict=True):
        assert {name.split(".")[2] for name in rank.held if name.startswith("net.layers.")} == layers


class Heavy(Pipe):
    """32 layers of 4 MB."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))


def peak_of_construction(sizes: dict[str, Any]) -> float:
    """Memory in MB that it takes at most to build a model; everything else was used once before."""
    mmap_threshold = -3  # of glibc's mallopt: freed tensors then go back to the system at once and don't blur the peak
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)
    for module in (Pipe(Case(late=True)), Heavy(Case(late=True))):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak until now
        base = peak_mb()
        trainer(sizes, max_epochs=1, limit_train_batches=0, limit_val_batches=0).fit(module)
    return peak_mb() - base


def peak_mb() -> float:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def test_only_rank_0_ever_builds_the_layers_of_other_stages() -> None:
    first, second = run_ranks(2, peak_of_construction, PIPELINE)
    assert second < 64 + 3 * 4  # its half of 128 MB, and few layers that are on their way: 68.3 MB were seen
    assert first < 128 + 64 + 3 * 4  # 192.4 MB were seen


# ── how often the step runs ─────────────────────────────────────────────────────────────────────────────────────────


class Counted(pl.LightningModule):
    """Notes elsewhere how often its step runs: what a run of a part of a step changes in the module is undone."""

    runs: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.runs[-1] += 1
        return self.layers(batch[0]).square().mean()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.runs.append(0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_runs(strategy: dict[str, Any]) -> list[int]:
    Counted.runs.clear()
    data = DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=8)
    trainer(strategy, max_epochs=1).fit(Counted(), data)
    return [*Counted.runs]


def test_the_step_runs_once_for_each_microbatch_and_once_more() -> None:
    """Rank 0 looks what crosses the stages; rank 1 runs the rest of the step, if the loss is the batch's."""
    ways = {"batch": PIPELINE, "microbatch": PIPELINE | dict(ONE_F_ONE_B)}
    found = run_each({way: (2, count_runs, strategy) for way, strategy in ways.items()})
    for way, later in {"batch": [5, 5], "microbatch": [5, 4]}.items():
        for rank, runs in enumerate(found[way]):
            assert runs[0] <= 7 and runs[1:] == [later[rank]] * 2, way
