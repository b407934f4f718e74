"""Prove that a training resumes: run it straight, run it interrupted and resumed, and compare both, step by step.

Three runs of the script: all steps; the first part, which saves a checkpoint and ends as if it was killed; the rest,
from that checkpoint. The first part is compared with the straight run, too: a training that does not repeat itself
cannot be judged.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import count_text
from lightning_shardckpt.tools.run_comparison import Difference, compare_runs, same_topology
from lightning_shardckpt.tools.run_records import RankRecords, RunPlan, last_step, read_records
from lightning_shardckpt.tools.training_process import run_recorded

DEFAULT_STEPS = 8
DEFAULT_TIMEOUT_S = 1800.0
OTHER_TOPOLOGY_TOLERANCE = 1e-4

_SAID_OF_STEP = {"restored": "as loaded after step {}", "before": "step {}, at its start", "after": "step {}"}
_SAID = {
    "batch": "",
    "samples": "samples of",
    "random": "random stream",
    "param_groups": "hyper-parameter of the optimizer",
    "counters": "counter",
    "loss": "",
    "logged": "logged value",
    "logger": "metric for the loggers",
    "validation": "metric",
    "gradients": "gradient of",
    "weights": "weight",
    "buffers": "buffer",
    "optimizer": "optimizer state",
    "metrics": "torchmetrics state",
    "precision": "precision plugin",
    "schedulers": "scheduler",
    "module": "attribute of the module",
    "datamodule": "datamodule",
    "callbacks": "callback",
}
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What was found.

    Attributes:
        equal: None if it cannot be told, since the training does not repeat itself.
        differences: what differs at the first moment where something does, the first one first.
        straight: the ranks of the run that was not interrupted.
        resumed: the ranks of the one that was.
        steps: batches of training.
        interrupt_at: batches before the checkpoint.
        tolerance: of values, relative; 0 if bits were compared.
        compared: the number of things that were compared, by kind.
        not_compared: what was not, with the reason.
        folder: where records, outputs and the checkpoint are; None if they were removed.
    """

    equal: bool | None
    differences: tuple[Difference, ...]
    straight: str
    resumed: str
    steps: int
    interrupt_at: int
    tolerance: float
    compared: dict[str, int]
    not_compared: dict[str, str]
    folder: str | None

    @property
    def status(self) -> int:
        """The exit status: 0 equal, 1 different, 2 if it cannot be told."""
        return 2 if self.equal is None else int(not self.equal)

    def to_json(self) -> str:
        """Return the report as a JSON text."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        how = f"within {self.tolerance:g}" if self.tolerance else "bit by bit"
        lines = [
            f"straight:  {self.steps} steps on {self.straight}",
            f"resumed:   after step {self.interrupt_at} on {self.resumed}",
            f"compared:  {how}: " + ", ".join(f"{section} {n}" for section, n in sorted(self.compared.items())),
        ]
        if self.equal:
            lines.append("EQUAL")
        else:
            what = "DIFFERENT" if self.equal is False else "NOT REPRODUCIBLE: two runs differ before any resume"
            lines += [f"{what}; first at:", *(f"  {shown(d)}" for d in self.differences[:_MOST_SHOWN])]
            if len(self.differences) > _MOST_SHOWN:
                lines.append(f"  … and {len(self.differences) - _MOST_SHOWN} more of this kind at this step")
        if self.equal is None:
            lines.append("Seed everything (seed_everything: 1), use deterministic kernels, or give --tolerance.")
        if self.not_compared:
            lines += ["not compared:", *(f"  {name}: {why}" for name, why in list(self.not_compared.items())[:40])]
            if len(self.not_compared) > 40:
                lines.append(f"  … and {len(self.not_compared) - 40} more; --json lists all")
        if self.folder is not None:
            lines.append(f"Records and outputs are in {self.folder}")
        return "\n".join(lines)


def shown(found: Difference) -> str:
    """Return a difference as a line: when, what, where, expected and found."""
    where = "of the whole" if found.rank is None else f"on rank {found.rank}"
    when = _SAID_OF_STEP[found.phase].format(found.step)
    what = f"{_SAID[found.section]} {found.name}".strip()
    return f"{when}: {what} {where}: expected {found.expected}, found {found.found}"


def prove_resume(
    command: Sequence[str],
    *,
    steps: int = DEFAULT_STEPS,
    interrupt_at: int | None = None,
    resumed_args: Sequence[str] = (),
    resumed_command: Sequence[str] | None = None,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    output: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ResumeReport:
    """Run a training straight, and interrupted and resumed, and compare both.

    The script is not changed: every Trainer of it gets a callback, which records, and ends the process after the last
    step, so that nothing after the first ``fit`` runs. The files of its own ModelCheckpoints, and what is written to
    ``default_root_dir``, go to the folder of the proof; its loggers write nothing. What the script itself writes
    elsewhere, it writes three times.

    Args:
        command: a Python script and its arguments, or a program that starts one, such as ``torchrun``.
        steps: batches of training that each rank gets, over epochs.
        interrupt_at: batches after which the checkpoint is saved; by default half of them.
        resumed_args: more arguments, for the resumed run alone, such as those of another topology.
        resumed_command: the whole command of the resumed run, in place of ``command``.
        tolerance: of values, relative; by default 0, and 1e-4 where the resumed run has another topology.
        ignore: patterns of ``SECTION/NAME`` that are not compared, such as ``callbacks/Timer*``.
        output: a folder that is new or empty, which stays; by default a temporary one, which stays if the runs differ.
        timeout_s: seconds for each of the three runs.

    Raises:
        RankError: if a run fails, takes too long, or records nothing.
        ValueError: for arguments that make no proof.
    """
    middle = steps // 2 if interrupt_at is None else interrupt_at
    if not command or not 0 < middle < steps:
        raise ValueError(f"a proof needs a command, and 0 < interrupt_at < steps; got {middle} and {steps}")
    folder = Path(tempfile.mkdtemp(prefix="prove-resume-") if output is None else output).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give a folder that is")
    resumed = list(resumed_command or command) + list(resumed_args)

    def run(name: str, plan: RunPlan) -> str:
        return run_recorded(resumed if name == "resumed" else command, plan, folder / name, timeout_s)

    report = prove_runs(run, folder, steps=steps, interrupt_at=middle, tolerance=tolerance, ignore=ignore)
    if output is None and report.equal:
        shutil.rmtree(folder)
        report = replace(report, folder=None)
    return report


def prove_runs(
    run: Callable[[str, RunPlan], str],
    folder: Path,
    *,
    steps: int,
    interrupt_at: int,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
) -> ResumeReport:
    """Do the three runs of a proof, however they are done, and compare what they recorded.

    Args:
        run: trains under a plan, with a ``RunRecorder`` on each rank; gets ``straight``, ``interrupted`` or
            ``resumed``, and returns what to show of that run in an error.
        folder: for records and the checkpoint; absolute.
        steps, interrupt_at, tolerance, ignore: as of `prove_resume`.

    Raises:
        RankError: if a run records nothing, or not all.
    """
    checkpoint = str(folder / "checkpoint.ckpt")
    plans = {
        "straight": ("straight", 0, steps, None, None),
        "interrupted": ("interrupted", 0, interrupt_at, checkpoint, None),
        "resumed": ("interrupted", interrupt_at, steps, None, checkpoint),
    }
    runs = {}
    for name, (saves_of, first, last, save_to, resume_from) in plans.items():
        own_saves = str(folder / saves_of / "own_saves")
        records, root_dir = (str(folder / name / of) for of in ("records", "root_dir"))
        plan = RunPlan(records, own_saves, root_dir, first, last, save_to, resume_from)
        shown = run(name, plan)
        runs[name] = _records(name, plan, shown)
    return _judge(runs, steps, interrupt_at, tolerance, ignore, str(folder))


def _records(name: str, plan: RunPlan, output: str) -> list[RankRecords]:
    """Read what a run recorded.

    Raises:
        RankError: if that is nothing, or not all.
    """
    found = read_records(plan.records)
    if not found:
        why = _NO_FIT if Path(plan.records).is_dir() else _NO_TRAINER
        raise RankError(f"the {name} run ended by itself and recorded nothing: {why}\nThe command was {output}")
    if len(found) != found[0].setting.world:
        raise RankError(f"the {name} run has {found[0].setting.world} ranks, of which {len(found)} recorded here")
    for records in found:
        if (plan.last_step, "after") not in records.moments:
            began = plan.resume_from is None and records.began_from
            where = f", having begun from its own ckpt_path={began!r}" if began else ""
            raise RankError(
                f"the {name} run ended by itself after step {last_step(records)} (rank {records.setting.rank}), before "
                f"step {plan.last_step}{where}. The first fit counts. Let it train for longer, or prove fewer "
                f"--steps.\nThe command was {output}"
            )
    return found


_NO_FIT = "its Trainer began no fit. A script that validates, tests or predicts has nothing to resume."
_NO_TRAINER = (
    "it made no Trainer of Lightning. Give the command that trains, with the arguments by which it does. A loop of the "
    "script's own is not recorded, nor is a Python that was started without PYTHONPATH (-I, -E)."
)


def _judge(
    runs: dict[str, list[RankRecords]],
    steps: int,
    middle: int,
    tolerance: float | None,
    ignore: Sequence[str],
    folder: str,
) -> ResumeReport:
    straight, resumed = runs["straight"], runs["resumed"]
    within = tolerance or 0.0
    found = compare_runs(straight, runs["interrupted"], first=0, last=middle, tolerance=within, ignore=ignore)
    equal = None if found.differences else True
    if equal:
        if tolerance is None and not same_topology(straight, resumed):
            within = OTHER_TOPOLOGY_TOLERANCE
        found = compare_runs(straight, resumed, first=middle, last=steps, tolerance=within, ignore=ignore)
        equal = not found.differences
    unobserved = {name: why for run in runs.values() for records in run for name, why in records.unobserved.items()}
    return ResumeReport(
        equal,
        tuple(found.differences),
        _described(straight),
        _described(resumed),
        steps,
        middle,
        within,
        dict(found.compared),
        found.skipped | {name: f"cannot be observed: {why}" for name, why in unobserved.items()},
        folder,
    )


def _described(ranks: list[RankRecords]) -> str:
    setting = ranks[0].setting
    shares = f", {setting.data_size} data-parallel" if setting.data_size != setting.world else ""
    return f"{count_text(setting.world, 'rank')}{shares} ({setting.strategy}, {setting.precision})"
