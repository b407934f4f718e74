"""Proof that a training resumes: two runs and a diff, ``python -m lightning_shardckpt prove-resume -- COMMAND``.

The first run saves in the middle and at the end. The second run resumes from the middle, and saves at the end. Both
ends are compared. An entry point of Lightning, found by ``PYTHONPATH``, brings the callback that saves
(``callbacks.ProofCallback``) to every rank, however it is started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.text import count_text, list_some
from lightning_shardckpt.tools.diff import diff

_OTHER_TOPOLOGY_TOLERANCE = 1e-4  # relative to a tensor's largest element: sums in another order round differently
_LOG_LINES = 20
_ENTRY_POINT = "[lightning.pytorch.callbacks_factory]\nprove_resume = lightning_shardckpt.callbacks:proof_callbacks\n"
VARIABLE = "SHARDCKPT_PROVE_RESUME"
"""The variable of the environment with the arguments of the callback, as JSON."""
_NO_FIT = (
    "it trained fewer batches in the first fit of a Trainer of Lightning. Give the command that trains, with its "
    "arguments, or fewer --steps. Fabric's loops, and a Python that ignores PYTHONPATH (-I, -E), are not seen"
)


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The result of a proof: the number of compared tensors and values, and the text of each difference by name.

    ``folder`` has outputs and checkpoints, unless it was removed; the ``tolerance`` of tensors is relative, 0 for bits.
    """

    steps: int
    folder: str
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
        text = f"{self.steps} steps, resumed after step {self.steps // 2}: compared {count}, {how}\n"
        if self.equal:
            return text + "EQUAL"
        named = list_some([f"{name}: {difference}" for name, difference in self.differences.items()], between="\n  ")
        return (
            f"{text}DIFFERENT: {len(self.differences):,} of them\n  {named}\n"
            "If two runs from the beginning differ, too, seed everything and use deterministic kernels.\n"
            f"Outputs and checkpoints are in {self.folder}"
        )


def prove_resume(
    command: Sequence[str],
    *,
    steps: int = 8,
    resumed_args: Sequence[str] = (),
    output: str | None = None,
    timeout_s: float = 1800.0,
) -> ResumeReport:
    """Run a training straight, and resumed from its middle; return the differences of the ends of both runs.

    The first ``fit`` of the script gets a callback that saves, and ends the process after the last step. Files in
    ``default_root_dir`` go to the folder of the proof; its loggers write nothing, and callbacks that save checkpoints
    are left out. Other files that the script writes are written twice.

    Args:
        command: a Python script and its arguments, or a program that starts one, such as ``torchrun``.
        steps: batches of training on each rank, over epochs; the checkpoint is saved after half of them.
        resumed_args: further arguments for the resumed run. On another topology, only tensors of model and optimizers
            are compared, within 1e-4.
        output: a new or empty folder, which is kept; by default a temporary one, which is kept if the runs differ.
        timeout_s: seconds for each of the two runs.

    Raises:
        RankError: if a run fails, takes too long, or trains fewer steps.
        ValueError: for an empty command, steps without a middle, or a folder that is not empty.
    """
    if not command or steps < 2:
        raise ValueError(f"a proof needs a command, and at least 2 steps; got {steps}")
    folder = Path(tempfile.mkdtemp(prefix="prove-resume-") if output is None else output).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give a folder that is")
    _run(command, folder, "straight", steps, timeout_s)
    _run([*command, *resumed_args], folder, "resumed", steps, timeout_s)
    report = _compare(folder, steps)
    if output is None and report.equal:
        shutil.rmtree(folder)
    return report


def _compare(folder: Path, steps: int) -> ResumeReport:
    """Compare the checkpoints at the ends of both runs; those of different topologies within a tolerance."""
    found = diff(folder / "straight.ckpt", folder / "resumed.ckpt")
    is_other = any(name == "ranks" or name.startswith("topology/") for name in found["about"])
    tolerance, differences = _OTHER_TOPOLOGY_TOLERANCE if is_other else 0.0, dict[str, str]()
    for tensor in found["tensors"]:
        relative, largest = tensor["relative"], tensor["largest"]
        if not is_other or (tensor["component"] != "trainer" and (relative is None or relative > tolerance)):
            size = "" if largest is None else f", by up to {largest:.3g}"
            differences[f"{tensor['component']}/{tensor['name']}"] = tensor["kind"] + size
    for name, (a, b) in found["values"].items() if not is_other else ():
        if "/Timer" not in name:  # whose time is never the same
            differences[name] = f"expected {a or 'nothing'}, found {b or 'nothing'}"
    compared = found["same"] + len(found["tensors"]) + (0 if is_other else found["values_compared"])
    return ResumeReport(steps, str(folder), compared, tolerance, differences)


def _run(command: Sequence[str], folder: Path, run: str, steps: int, timeout_s: float) -> None:
    """Run a training command with the callback, and wait for its end.

    Raises:
        RankError: with the end of its output, if it fails, takes too long, or saves no end.
    """
    added = folder / run / "added" / "shardckpt_prove_resume-1.dist-info"
    added.mkdir(parents=True)
    (added / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-prove-resume\nVersion: 1\n")
    (added / "entry_points.txt").write_text(_ENTRY_POINT)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(added.parent), os.environ.get("PYTHONPATH")]))}
    env[VARIABLE] = json.dumps({"folder": str(folder), "run": run, "steps": steps})
    log = folder / run / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command] if command[0].endswith(".py") else list(command),
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            problem = f"ended with status {status}" if (status := process.wait(timeout_s)) else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end in {timeout_s:g} s and was killed"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived the first process, too
            process.wait()
    if not problem and not (folder / f"{run}.ckpt").exists():
        problem = f"ended before step {steps}: {_NO_FIT}"
    if problem:
        lines = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise RankError(f"the {run} run {problem}: {' '.join(command)}\nThe last lines of {log}:\n  {lines}")
