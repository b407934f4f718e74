"""Prove by ``prove-resume`` that cases resume: recorded straight, and interrupted and resumed, and compared.

The ranks come from the pool of the tests instead of a command, and the resumed run begins with another seed, so that
what a checkpoint does not bring back shows.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_shardckpt.recording import RunRecorder
from lightning_shardckpt.tools.prove_resume import ResumeReport, RunPlan, prove_runs
from tests.support.pool import run_ranks
from tests.support.tiny import EXECUTES
from tests.sweeps.twins.base import BATCH, dataset
from tests.sweeps.twins.run import CASES, TOPOLOGIES, described, prepared

MORE_EPOCHS = 1
"""Than a case says, so that each has the steps, and an epoch begins after the resume."""
STEPS, MIDDLE = 6, 2

AFTER_SAVE = "done in the module's own on_train_batch_end, which Lightning calls after callbacks have saved"
NOT_SAVED = "kept in an attribute of the module or a callback, or of a parameter, that is not saved"
IN_MID_EPOCH = "done when an epoch begins or ends, which Lightning leaves out where a run resumes within it"
DIFFERS_ANYWAY = {
    **dict.fromkeys(("KeepsShadowInBuffers", "ConstrainsNorms", "ConstrainsRows", "LoadsWholeWeights"), AFTER_SAVE),
    **dict.fromkeys(("ClearsRows", "WritesThroughViews", "Attentive", "LogsWeights"), AFTER_SAVE),
    **dict.fromkeys(("ReadsAsNumpy", "DecidesByValues", "Swaps"), AFTER_SAVE),
    **dict.fromkeys(("FollowsByTorch", "CopiesItself", "Elastic", "SlowsDown", "ReadsInHook"), NOT_SAVED),
    **dict.fromkeys(("WatchesModules", "WatchesEveryModule", "GuardsAgainstNan", "LooksAhead"), NOT_SAVED),
    **dict.fromkeys(("PrunesGlobally", "IsSwappedForValidation"), NOT_SAVED),
    **dict.fromkeys(("LoadsAdaptersInStep", "DropsLayers"), NOT_SAVED),
    **dict.fromkeys(("AveragesStochastically", "PrunesRows"), IN_MID_EPOCH),
    "GoesOnUnfrozen": "gradients of parameters that no optimizer has are summed up, and in no checkpoint",
    "StartsWithBias": "done at on_fit_start, after weights were loaded",
    "AddsAGroup": "a param group that is added while it trains is not there when state is loaded into it",
}
"""What does not resume, and why. Under plain Lightning neither: ``… proved plain NAME …`` has to differ, too."""

IGNORED = {"Lbfgs": ["optimizer/*/prev_loss"]}
"""Each rank has the loss of its own share there; torch's LBFGS sets it before it reads it."""

Outcome = Literal["proved", "differs", "refused", "fails"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of one case; ``said``: the first difference, the refusal or the error."""

    outcome: Outcome
    said: str = ""
    report: ResumeReport | None = None


class KeepsSeen(pl.Callback):
    """Saves the numbers that a case has seen, which are of the test and not of the training."""

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(pl_module.seen)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        pl_module.seen = list(checkpoint["seen"])


class Continues(DataLoader[Any]):
    """Goes on in its data by itself, which plain Lightning needs to resume within an epoch."""

    taken = 0

    def __iter__(self) -> Any:
        first, self.taken = self.taken, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.taken = (number + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def proof(name: str, topology: str | None, *, onto: str | None = None, interrupt_at: int = MIDDLE) -> Proof:
    """Prove that a case resumes.

    Args:
        name: of the case.
        topology: None for one process under Lightning's own strategy.
        onto: of the resumed run; by default the same.
        interrupt_at: batches before the checkpoint.
    """

    def run(which: str, plan: RunPlan) -> str:
        on = topology if which != "resumed" else onto or topology
        errors = run_ranks(TOPOLOGIES[on or "one"][0], recorded, name, on, plan, init_process_group=on is not None)
        if any(errors):
            raise _Ended(which, errors)
        return ""

    with tempfile.TemporaryDirectory() as folder:
        try:
            ignore = [*IGNORED.get(name, []), *(["random/*"] if topology is None else [])]  # plain ones are not saved
            report = prove_runs(run, Path(folder), steps=STEPS, interrupt_at=interrupt_at, ignore=ignore)
        except _Ended as ended:
            return ended.proof
    if report.equal:
        return Proof("proved", report=report)
    what = "" if report.equal is False else "not reproducible: "
    return Proof("differs", what + str(report.differences[0]), report)


def recorded(name: str, topology: str | None, plan: RunPlan) -> str:
    """Train a case under a plan; in a rank. Returns the error that it ended with, or nothing."""
    recorder = RunRecorder(plan, end=lambda: None)  # trains on, unrecorded
    extra = [KeepsSeen(), recorder]
    try:
        trainer, module = prepared(CASES[name], topology, extra, more_epochs=MORE_EPOCHS, seed=7 + plan.first_step)
        arguments: dict[str, Any] = dict(EXECUTES)
        if topology is None:
            arguments["train_dataloaders"] = Continues(dataset(), BATCH)
        recorder.begin(trainer, arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, **arguments)
    except Exception as error:
        return described(error)
    return ""


_REFUSALS = ("TopologyError", "UnsupportedCodeError", "StateError")


class _Ended(Exception):
    """A run ended with errors, by rank."""

    def __init__(self, which: str, errors: Sequence[str]) -> None:
        first = [error.partition("\n")[0] for error in errors]
        causes = [line for line in first if line.startswith(_REFUSALS)]
        outcome: Outcome = "refused" if causes and which != "resumed" else "fails"  # what was saved must load
        said = [*causes, *(line for line in first if line)][0]
        self.proof = Proof(outcome, f"the {which} run: {said}")
