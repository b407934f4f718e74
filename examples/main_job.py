"""Train, save, resume on other topologies, consolidate and use the result, in one command.

    python examples/main_job.py

1. An uninterrupted run: 4 processes, FSDP over 2 x tensor parallel over 2.
2. The same training in three legs, each from the checkpoint of the one before: 4 processes as above, then
   4 processes, 2 pipeline stages x FSDP over 2, then 1 process.
3. The checkpoints are inspected and verified, the last one is consolidated; plain torch loads the file and generates
   text.

Each leg is `python examples/train.py fit --config configs/… --config configs/…`; this script only starts them and
reads what they leave.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

EXAMPLES = Path(__file__).resolve().parent
CONFIGS = EXAMPLES.parent / "configs"
EPOCHS = 3  # a leg of the resumed run is one epoch
POLL_S = 0.5
TOLD_S = 10.0  # between lines of progress in a file
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Leg:
    """One start of the trainer, up to the end of epoch ``epochs``."""

    name: str
    topology: str
    config: str
    epochs: int
    resume_from: str | None = None


LEGS = (
    Leg("uninterrupted", "4 processes: FSDP over 2 x TP over 2", "fsdp2_tp2.yaml", EPOCHS),
    Leg("first", "4 processes: FSDP over 2 x TP over 2", "fsdp2_tp2.yaml", 1),
    Leg("second", "4 processes: 2 stages x FSDP over 2", "pp2_fsdp2.yaml", 2, resume_from="first"),
    Leg("third", "1 process", "single.yaml", 3, resume_from="second"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """Where everything is, and how long an epoch is."""

    folder: Path
    steps_per_epoch: int

    @property
    def file(self) -> Path:
        """The consolidated checkpoint."""
        return self.folder / "model.pt"

    def log(self, leg: Leg) -> Path:
        """Return the file with the output of a leg."""
        return self.folder / f"{leg.name}.log"

    def checkpoint(self, name: str) -> Path:
        """Return the checkpoint that the leg of this name ends with."""
        epochs = next(leg.epochs for leg in LEGS if leg.name == name)
        step = epochs * self.steps_per_epoch
        return self.folder / name / "checkpoints" / f"epoch={epochs - 1}-step={step}.ckpt"

    def command(self, leg: Leg) -> list[str]:
        """Return the command line of a leg."""
        options = {
            "trainer.max_epochs": leg.epochs,
            "trainer.limit_train_batches": self.steps_per_epoch,
            "trainer.enable_progress_bar": "false",  # one bar for all legs, see `run`
            "trainer.logger.init_args.save_dir": self.folder.parent,
            "trainer.logger.init_args.name": self.folder.name,
            "trainer.logger.init_args.version": leg.name,
            "model.total_steps": EPOCHS * self.steps_per_epoch,
        }
        if leg.resume_from is not None:
            options["ckpt_path"] = self.checkpoint(leg.resume_from)
        configs = [f"--config={CONFIGS / name}" for name in ("transformer.yaml", leg.config)]
        return [
            sys.executable,
            str(EXAMPLES / "train.py"),
            "fit",
            *configs,
            *(f"--{name}={value}" for name, value in options.items()),
        ]

    def losses(self, name: str) -> dict[int, float]:
        """Return the loss of each step that the leg has written down so far."""
        path = self.folder / name / "metrics.csv"
        if not path.exists():
            return {}
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["step"]]  # the last one may be half written yet
        return {int(row["step"]): float(row["loss"]) for row in rows}


def main() -> None:
    started = time.monotonic()
    job = _job_from_command_line()
    seconds = {leg.name: 0.0 for leg in LEGS}
    steps = sum(_epochs_trained(leg) for leg in LEGS) * job.steps_per_epoch
    with Progress(steps) as progress:
        for leg in LEGS:
            progress.begin(leg, job.log(leg))
            seconds[leg.name] = run(job, leg, progress)
    show_losses(job)
    use_checkpoints(job)
    title("Seconds")
    for leg in LEGS:
        trained = _epochs_trained(leg) * job.steps_per_epoch
        print(f"{leg.name:13} {seconds[leg.name]:6.1f}   {trained} steps on {leg.topology}")
    print(f"{'all':13} {time.monotonic() - started:6.1f}")
    print(f"\nEverything is in {job.folder}: checkpoints, losses (metrics.csv) and the output of each leg (*.log)")


class Progress:
    """The progress over all legs: a bar on a terminal, else lines with the step and the time that is left.

    Args:
        steps: of all legs together.
    """

    def __init__(self, steps: int) -> None:
        self._bar = tqdm(total=steps, unit="step", disable=None)  # disabled unless stderr is a terminal
        self._total, self._before, self._done, self._told = steps, 0, 0, 0
        self._started = self._told_at = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, leg: Leg, log: Path) -> None:
        """Begin a leg, whose output goes to the file ``log``."""
        self._before = self._done
        self._bar.set_description(f"{leg.name} ({leg.topology})")
        self._bar.write(f"training {leg.name:13} on {leg.topology}; its output: {log}")
        sys.stdout.flush()

    def show(self, steps: int) -> None:
        """Show that the leg has trained so many steps."""
        self._done = self._before + steps
        self._bar.update(self._done - self._bar.n)
        now, is_whole = time.monotonic(), self._done == self._total
        if not self._bar.disable or self._done == self._told or (now - self._told_at < TOLD_S and not is_whole):
            return
        left = (now - self._started) / self._done * (self._total - self._done)
        print(f"step {self._done} of {self._total}, about {left:.0f} s left", flush=True)
        self._told, self._told_at = self._done, now


def run(job: Job, leg: Leg, progress: Progress) -> float:
    """Train one leg, showing its progress; returns the seconds it took."""
    log = job.log(leg)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(job.command(leg), stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                progress.show(len(job.losses(leg.name)))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        last = "\n".join(log.read_text().splitlines()[-40:])
        sys.exit(f"{last}\n\n{leg.name} failed with exit code {process.returncode}; its whole output is in {log}")
    progress.show(len(job.losses(leg.name)))
    return time.monotonic() - started


def show_losses(job: Job) -> None:
    """Print the curve of the uninterrupted run beside that of the resumed one."""
    whole = job.losses("uninterrupted")
    resumed: dict[int, float] = {}
    where: dict[int, str] = {}
    for leg in LEGS[1:]:
        losses = job.losses(leg.name)
        resumed |= losses
        where |= dict.fromkeys(losses, leg.topology)
    title("Loss (nats per byte): the same training without and with interruptions")
    print(f"{'step':>5}  {'uninterrupted':>13}  {'resumed':>9}  {'difference':>10}  resumed run on")
    for step in _shown_steps(job.steps_per_epoch):
        difference = resumed[step] - whole[step]
        print(f"{step + 1:5}  {whole[step]:13.6f}  {resumed[step]:9.6f}  {difference:10.1e}  {where[step]}")
    print(f"\nuninterrupted  {spark(whole)}\nresumed        {spark(resumed)}\n")
    for leg in LEGS[1:]:
        difference = max(abs(loss - whole[step]) for step, loss in job.losses(leg.name).items())
        found = "equal bit for bit" if difference == 0 else f"largest difference {difference:.1e}"
        print(f"{leg.name:7} leg, {leg.topology:35} {found}")
    print(
        "\nAll see the same windows of text in each step. The first leg computes on the topology of the uninterrupted\n"
        "run. The others load what was saved, bit for bit, but sum in another order: they differ by rounding."
    )


def use_checkpoints(job: Job) -> None:
    """Inspect and verify each leg's checkpoint, consolidate the last one; let plain torch generate from the result."""
    title("Checkpoints: `inspect` and `verify`")
    for leg in LEGS[1:]:
        checkpoint = job.checkpoint(leg.name)
        facts = json.loads(tool("lightning_shardckpt", "inspect", "--json", str(checkpoint)))
        mesh = " x ".join(f"{axis} {size}" for axis, size in facts["topology"].items() if size > 1) or "not sharded"
        ranks = f"{facts['world_size']} rank{'s' * (facts['world_size'] > 1)}"
        print(f"{leg.name:7} step {facts['step']:3}, {ranks} ({mesh}), {facts['bytes']:,} bytes")
        print(f"        {tool('lightning_shardckpt', 'verify', str(checkpoint)).replace(str(job.folder), '…')}")
    title(f"Consolidated to {job.file.name}; plain torch loads it and continues a text")
    tool("lightning_shardckpt.consolidate", str(job.checkpoint("third")), "--output_file", str(job.file))
    print(generate_from(job.file))


def generate_from(file: Path) -> str:
    """Build the model in this one process, fill it from a consolidated file, and generate."""
    import torch  # late: it takes seconds, and the legs should start at once
    from text import ByteTransformer, generate

    checkpoint = torch.load(file)
    hyper_parameters = checkpoint["hyper_parameters"]
    model = ByteTransformer(**{name: hyper_parameters[name] for name in ("width", "head_width", "depth", "context")})
    model.configure_model()
    model.load_state_dict(checkpoint["state_dict"])
    text = generate(model, b'The "assert" statement', 300)
    return "".join(character if character.isprintable() or character == "\n" else "·" for character in text)


def tool(module: str, *arguments: str) -> str:
    """Run one of the package's tools; returns what it prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def spark(losses: dict[int, float], width: int = 60) -> str:
    """Return the curve as one line of blocks.

    >>> spark({0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0})
    '█▆▃▁'
    """
    values = [losses[step] for step in sorted(losses)]
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    return "".join(SPARKS[int((mean - low) / (high - low or 1) * (len(SPARKS) - 1) + 0.5)] for mean in means)


def title(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


def _epochs_trained(leg: Leg) -> int:
    return leg.epochs if leg.resume_from is None else 1


def _shown_steps(steps_per_epoch: int) -> Sequence[int]:
    """About four steps per epoch, the first and the last among them."""
    apart = max(1, steps_per_epoch // 4)
    shown = {epoch * steps_per_epoch + step for epoch in range(EPOCHS) for step in range(0, steps_per_epoch, apart)}
    return sorted(shown | {(epoch + 1) * steps_per_epoch - 1 for epoch in range(EPOCHS)})


def _job_from_command_line() -> Job:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=240, help=f"of the uninterrupted run; a multiple of {EPOCHS}")
    parser.add_argument(
        "--dir", type=Path, default=Path("lightning_logs/main_job"), help="for all output; that of a former run goes"
    )
    arguments = parser.parse_args()
    if arguments.steps < EPOCHS or arguments.steps % EPOCHS:
        parser.error(f"--steps must be a multiple of {EPOCHS}, got {arguments.steps}")
    job = Job(arguments.dir.resolve(), arguments.steps // EPOCHS)
    job.folder.mkdir(parents=True, exist_ok=True)
    job.file.unlink(missing_ok=True)
    for leg in LEGS:
        shutil.rmtree(job.folder / leg.name, ignore_errors=True)
    return job


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
