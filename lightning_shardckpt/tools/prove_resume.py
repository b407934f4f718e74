"""Prove that a training resumes: run it straight, run it interrupted and resumed, and compare both, step by step.

Three runs of the script: all steps; the first part, which saves a checkpoint and ends as if it was killed; the rest,
from that checkpoint. The first part is compared with the straight run, too: a training that does not repeat itself
cannot be judged. The recorder (``recording``) reaches every rank, however it is started, by an entry point of Lightning
that is found by ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import count_text
from lightning_shardckpt.tools.run_records import (
    Difference,
    RankRecords,
    RunPlan,
    compare_runs,
    read_records,
    same_topology,
)

DEFAULT_STEPS = 8
DEFAULT_TIMEOUT_S = 1800.0
OTHER_TOPOLOGY_TOLERANCE = 1e-4

_PHASES = {"restored": "as loaded after step {}", "before": "step {}, at its start", "after": "step {}"}
_MOST_DIFFERENCES, _MOST_REASONS, _LOG_LINES = 10, 40, 20


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The result of a proof.

    Attributes:
        equal: None if the training does not repeat itself, so that a resume cannot be judged.
        differences: all of the first section of the first moment that differ.
        straight: the ranks of the run that was not interrupted.
        resumed: the ranks of the one that was.
        steps: batches of training.
        interrupt_at: batches before the checkpoint.
        tolerance: of values, relative; 0 if bits were compared.
        compared: the number of entries that were compared, by section.
        not_compared: why something was not compared, by name.
        folder: the folder of records, outputs and the checkpoint; None if it was removed.
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
            result = "DIFFERENT" if self.equal is False else "NOT REPRODUCIBLE: two runs differ before any resume"
            lines += [f"{result}; first at:", *_cut(map(difference_text, self.differences), _MOST_DIFFERENCES)]
        if self.equal is None:
            lines.append("Seed everything (seed_everything: 1), use deterministic kernels, or give --tolerance.")
        if self.not_compared:
            reasons = (f"{name}: {why}" for name, why in self.not_compared.items())
            lines += ["not compared:", *_cut(reasons, _MOST_REASONS)]
        if self.folder is not None:
            lines.append(f"Records and outputs are in {self.folder}")
        return "\n".join(lines)


def _cut(texts: Iterable[str], most: int) -> Iterator[str]:
    """Yield indented lines, at most so many; then how many more ``--json`` lists."""
    lines = [f"  {text}" for text in texts]
    yield from lines[:most]
    if len(lines) > most:
        yield f"  … and {len(lines) - most} more; --json lists all"


def difference_text(difference: Difference) -> str:
    """Return a difference as a line: when, what (as ``--ignore`` takes it), where, expected and found."""
    of = difference
    where = "over all ranks" if of.rank is None else f"on rank {of.rank}"
    when = _PHASES[of.phase].format(of.step)
    return f"{when}: {of.section}/{of.name} {where}: expected {of.expected}, found {of.found}"


def prove_resume(
    command: Sequence[str],
    *,
    steps: int = DEFAULT_STEPS,
    interrupt_at: int | None = None,
    resumed_args: Sequence[str] = (),
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    output: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ResumeReport:
    """Run a training straight, and interrupted and resumed, and compare both.

    The script is not changed: every Trainer of it gets a callback, which records, and ends the process after the last
    step, so that nothing after the first ``fit`` runs. The files of its own ModelCheckpoints, and those written to
    ``default_root_dir``, go to the folder of the proof; its loggers write nothing. A file that the script itself writes
    elsewhere is written three times.

    Args:
        command: a Python script and its arguments, or a program that starts one, such as ``torchrun``.
        steps: batches of training that each rank gets, over epochs.
        interrupt_at: batches after which the checkpoint is saved; by default half of them.
        resumed_args: more arguments, for the resumed run alone, such as those of another topology.
        tolerance: of values, relative; by default 0, and 1e-4 where the resumed run has another topology.
        ignore: patterns of ``SECTION/NAME`` that are not compared, such as ``callbacks/Timer*``.
        output: a folder that is new or empty, which stays; by default a temporary one, which stays if the runs differ.
        timeout_s: seconds for each of the three runs.

    Returns:
        The report of the comparison.

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

    def run(name: str, plan: RunPlan) -> str:
        arguments = [*command, *resumed_args] if name == "resumed" else command
        return _run_command(arguments, plan, folder / name, timeout_s)

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
    """Do the three runs of a proof, however they are done, and compare their records.

    Args:
        run: trains under a plan, with a ``RunRecorder`` on each rank; gets ``straight``, ``interrupted`` or
            ``resumed``, and returns a description of that run for errors.
        folder: for records and the checkpoint; absolute.
        steps, interrupt_at, tolerance, ignore: as of `prove_resume`.

    Returns:
        The report of the comparison.

    Raises:
        RankError: if a run records nothing, or not all.
    """
    checkpoint = str(folder / "checkpoint.ckpt")

    def record(name: str, first: int, last: int, save_to: str | None, resume_from: str | None) -> list[RankRecords]:
        saves_of = "straight" if name == "straight" else "interrupted"  # a resumed run finds its own checkpoints
        records, files = (str(folder / name / part) for part in ("records", "files"))
        plan = RunPlan(records, files, str(folder / saves_of / "saves"), first, last, save_to, resume_from)
        said = run(name, plan)
        ranks = read_records(plan.records)
        if not ranks:
            raise RankError(f"the {name} run ended by itself and recorded nothing: {_NO_FIT}\nThe command was {said}")
        if len(ranks) != ranks[0].setting.world:
            raise RankError(f"the {name} run has {ranks[0].setting.world} ranks, of which {len(ranks)} recorded here")
        for one in ranks:
            if (last, "after") not in one.moments:
                raise RankError(
                    f"the {name} run ended by itself after step {one.last_step} (rank {one.setting.rank}), "
                    f"before step {last}. The first fit counts. Let it train for longer, or prove fewer --steps.\n"
                    f"The command was {said}"
                )
        return ranks

    straight = record("straight", 0, steps, None, None)
    interrupted = record("interrupted", 0, interrupt_at, checkpoint, None)
    resumed = record("resumed", interrupt_at, steps, None, checkpoint)

    within = tolerance or 0.0
    result = compare_runs(straight, interrupted, first=0, last=interrupt_at, tolerance=within, ignore=ignore)
    equal = None if result.differences else True
    if equal:
        if tolerance is None and not same_topology(straight, resumed):
            within = OTHER_TOPOLOGY_TOLERANCE
        result = compare_runs(straight, resumed, first=interrupt_at, last=steps, tolerance=within, ignore=ignore)
        equal = not result.differences
    unobserved = {name: why for of in (*straight, *interrupted, *resumed) for name, why in of.unobserved.items()}
    return ResumeReport(
        equal,
        tuple(result.differences),
        _ranks_text(straight),
        _ranks_text(resumed),
        steps,
        interrupt_at,
        within,
        dict(result.compared),
        result.skipped | {name: f"cannot be observed: {why}" for name, why in unobserved.items()},
        str(folder),
    )


_NO_FIT = (
    "it began no fit of a Trainer of Lightning. Give the command that trains, with the arguments by which it does. A "
    "loop of the script's own, such as Fabric's, is not recorded: save at the end of a run that went straight and of "
    "one that resumed, and compare both by `python -m lightning_shardckpt diff A B`. Nor is a Python that was started "
    "without PYTHONPATH (-I, -E)."
)


def _ranks_text(ranks: list[RankRecords]) -> str:
    setting = ranks[0].setting
    return f"{count_text(setting.world, 'rank')} ({setting.strategy}, {setting.precision})"


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

_PACKAGE = Path(__file__).parents[1]
_ENTRY_POINTS = """[lightning.pytorch.callbacks_factory]
prove_resume = shardckpt_prove_resume:callbacks
"""
_HOOK = '''"""Made by prove-resume: every Trainer of this run is given a recorder."""


def callbacks():
    from lightning_shardckpt.recording import recorder_of

    return [recorder_of({plan!r})]
'''


def _run_command(command: Sequence[str], plan: RunPlan, folder: Path, timeout_s: float) -> str:
    """Run a training command under a plan, and wait until it has ended. Returns the command and the end of its output.

    Args:
        command: a program and its arguments; a Python script is run by this Python.
        plan: the orders of every rank's recorder.
        folder: for the output of the run, and the modules that are added to it.
        timeout_s: after which all of its processes are killed.

    Raises:
        RankError: if it fails or takes too long; with the end of its output.
    """
    path = _python_path(folder, plan)
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command] if command[0].endswith(".py") else list(command),
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with ranks that its first process has left
            process.wait()
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    said = "\n".join([" ".join(command), f"The last lines of {log}:", *(f"  {line}" for line in lines)])
    if status is None:
        raise RankError(f"the {folder.name} run did not end in {timeout_s:g} s and was killed: {said}")
    if status:
        raise RankError(f"the {folder.name} run ended with status {status}: {said}")
    return said


def _python_path(folder: Path, plan: RunPlan) -> str:
    """Write an entry point, and return a search path on which it, and this very package, are found first."""
    added = folder / "added"
    about = added / "shardckpt_prove_resume-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-prove-resume\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    (added / "shardckpt_prove_resume.py").write_text(_HOOK.format(plan=str(folder / "plan.json")))
    with suppress(FileExistsError):
        (added / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    return os.pathsep.join(filter(None, [str(added), os.environ.get("PYTHONPATH")]))
