"""Proof that a training resumes: two runs and a diff, ``python -m lightning_shardckpt prove-resume -- COMMAND``.

The first run trains all steps, and saves in the middle and at the end. The second run resumes from the middle, and
saves at the end. Both ends are compared: every tensor, and every other value that a checkpoint has. An entry point of
Lightning, found by ``PYTHONPATH``, brings the callback that saves (``resume_proof``) to every rank, however it is
started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import count_text, list_some
from lightning_shardckpt.tools.diff import diff

TIMEOUT_S = 1800.0
OTHER_TOPOLOGY_TOLERANCE = 1e-4
"""Of the largest difference of a tensor, relative to its largest element: sums in another order round differently."""

_PACKAGE = Path(__file__).parents[1]
_LOG_LINES = 20
_HOOK = '''"""Written by prove-resume: gives a callback to every Trainer of this run."""


def callbacks():
    from lightning_shardckpt.resume_proof import proof_callback
    from lightning_shardckpt.tools.prove_resume import RunPlan

    return [proof_callback({plan!r})]
'''
_NO_FIT = (
    "it trained fewer batches in the first fit of a Trainer of Lightning. Give the command that trains, with its "
    "arguments, or fewer --steps. A training loop in the script, such as Fabric's, is not seen: save at the end of a "
    "straight and of a resumed run, and compare both by `python -m lightning_shardckpt diff A B`. Neither is a Python "
    "that ignores PYTHONPATH (-I, -E)."
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run of a proof.

    Attributes:
        folder: the folder of the proof, with the checkpoints "middle.ckpt", "straight.ckpt" and "resumed.ckpt".
        middle: batches before the checkpoint from which the second run resumes.
        last: batches after which a run saves and ends, counted from the beginning of training.
        name: "straight" or "resumed".
    """

    folder: str
    middle: int
    last: int
    name: str = "straight"

    def path(self, name: str) -> str:
        """Return a path in the folder of the proof."""
        return f"{self.folder}/{name}"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The result of a proof.

    Attributes:
        plan: the batches and the folder, which was removed if nothing differs and no ``output`` was given.
        compared: the number of compared tensors and values.
        tolerance: of tensors, relative; 0 if bits were compared.
        differences: by name, with the text of each: tensors, then other values.
    """

    plan: RunPlan
    compared: int
    tolerance: float
    differences: dict[str, str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        how = f"tensors of model and optimizers, within {self.tolerance:g}" if self.tolerance else "bit by bit"
        count = count_text(self.compared, "tensor or value", "tensors and values")
        text = f"{self.plan.last} steps, resumed after step {self.plan.middle}: compared {count}, {how}\n"
        if self.equal:
            return text + "EQUAL"
        named = list_some([f"{name}: {difference}" for name, difference in self.differences.items()], between="\n  ")
        return (
            f"{text}DIFFERENT: {len(self.differences):,} of them\n  {named}\n"
            "If two runs from the beginning differ, too, seed everything and use deterministic kernels.\n"
            f"Outputs and checkpoints are in {self.plan.folder}"
        )


def prove_resume(
    command: Sequence[str],
    *,
    steps: int = 8,
    resumed_args: Sequence[str] = (),
    output: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ResumeReport:
    """Run a training straight, and resumed from its middle, and compare the ends of both runs.

    The script is unchanged: its first ``fit`` gets a callback that saves, and ends the process after the last step, so
    that no code after it runs. Files in ``default_root_dir`` go to the folder of the proof; its loggers write nothing,
    and callbacks that save checkpoints are left out. Other files that the script writes are written twice.

    Args:
        command: a Python script and its arguments, or a program that starts one, such as ``torchrun``.
        steps: batches of training on each rank, over epochs; the checkpoint is saved after half of them.
        resumed_args: further arguments for the resumed run only, such as options of another topology. Tensors of
            model and optimizers are then compared within 1e-4, and nothing else.
        output: a new or empty folder, which is kept; by default a temporary folder, which is kept if the runs differ.
        timeout_s: seconds for each of the two runs.

    Returns:
        The report of the comparison.

    Raises:
        RankError: if a run fails, takes too long, or trains fewer steps.
        ValueError: for an empty command, steps without a middle, or a folder that is not empty.
    """
    middle = steps // 2
    if not command or middle < 1:
        raise ValueError(f"a proof needs a command, and at least 2 steps; got {steps}")
    folder = Path(tempfile.mkdtemp(prefix="prove-resume-") if output is None else output).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give a folder that is")
    plan = RunPlan(str(folder), middle, steps)
    run_command(command, plan, timeout_s)
    run_command([*command, *resumed_args], replace(plan, name="resumed"), timeout_s)
    report = compare_ends(plan)
    if output is None and report.equal:
        shutil.rmtree(folder)
    return report


def compare_ends(plan: RunPlan) -> ResumeReport:
    """Compare the checkpoints at the ends of both runs; those of different topologies within a tolerance."""
    found = diff(plan.path("straight.ckpt"), plan.path("resumed.ckpt"))
    is_other = any(name == "ranks" or name.startswith("topology/") for name in found["about"])
    tolerance = OTHER_TOPOLOGY_TOLERANCE if is_other else 0.0
    tensors, values = found["tensors"], {} if is_other else found["values"]
    count, differences = tensors["same"] + (0 if is_other else found["values_compared"]), dict[str, str]()
    for kind in ("different", "changed", "removed", "added"):
        for tensor in tensors[kind]:
            relative, largest = tensor.get("relative"), tensor.get("largest")
            if is_other and (tensor["component"] == "trainer" or (relative is not None and relative <= tolerance)):
                continue
            size = "" if largest is None else f", by up to {largest:.3g}"
            differences[f"{tensor['component']}/{tensor['name']}"] = kind + size
        count += len(tensors[kind])
    for name, (a, b) in values.items():
        if "/Timer" not in name:  # whose time is never the same
            differences[name] = f"expected {a or 'nothing'}, found {b or 'nothing'}"
    return ResumeReport(plan, count, tolerance, differences)


def run_command(command: Sequence[str], plan: RunPlan, timeout_s: float) -> None:
    """Run a training command under a plan, and wait for its end.

    Raises:
        RankError: with the end of its output, if it fails, takes too long, or saves no end.
    """
    folder = Path(plan.path(plan.name))
    path = _python_path(folder / "added", plan)
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
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived the first process, too
            process.wait()
    if status == 0 and os.path.exists(f"{folder}.ckpt"):
        return
    problem = f"the {plan.name} run ended with status {status}"
    if status is None:
        problem = f"the {plan.name} run did not end in {timeout_s:g} s and was killed"
    elif status == 0:
        problem = f"the {plan.name} run ended before step {plan.last}: {_NO_FIT}"
    lines = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    raise RankError(f"{problem}: {' '.join(command)}\nThe last lines of {log}:\n  {lines}")


def _python_path(added: Path, plan: RunPlan) -> str:
    """Write an entry point, and return a ``PYTHONPATH`` that begins with it and this package."""
    about = added / "shardckpt_prove_resume-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-prove-resume\nVersion: 1\n")
    group = "[lightning.pytorch.callbacks_factory]\nprove_resume = shardckpt_prove_resume:callbacks\n"
    (about / "entry_points.txt").write_text(group)
    (added / "shardckpt_prove_resume.py").write_text(_HOOK.format(plan=plan))
    (added / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    return os.pathsep.join(filter(None, [str(added), os.environ.get("PYTHONPATH")]))
