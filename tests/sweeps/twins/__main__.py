"""Run all cases, or some, on one topology: ``python -m tests.sweeps.twins TOPOLOGY [NAME …]``. Takes minutes.

``python -m tests.sweeps.twins resumed [NAME …]`` resumes on replicas what two ranks of FSDP saved;
``… fabric TOPOLOGY [NAME …]`` runs the scripts of Fabric, ``… gpu TOPOLOGY [NAME …]`` cases on GPUs, or on the pretend
device where there are none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.accelerator import ranks
from tests.accelerator.ranks import run_on_gpus
from tests.support.pool import run_ranks
from tests.sweeps.twins import run as runs
from tests.sweeps.twins.fabric import SCRIPTS, scripts
from tests.sweeps.twins.run import CASES, TOPOLOGIES, Found, difference, difference_of_stages, fits, is_pipelined

_ALONE = partial(run_ranks, init_process_group=False)


def main(
    topology: str, *names: str, alone: Callable[..., list[Any]] = _ALONE, on_ranks: Callable[..., list[Any]] = run_ranks
) -> int:
    """The number of cases that differ from their twins, or end with an error."""
    if topology == "gpu":
        ranks.on_real_gpus = torch.cuda.is_available()
        return main(*names, alone=run_on_gpus, on_ranks=run_on_gpus)
    if topology == "resumed":
        return sum(_tell(name, *_resumed(name)) for name in names or CASES)
    one, many, chosen = runs.twins, runs.run, [*(names or CASES)]
    if topology == "fabric":
        topology, *names = names
        one, many, chosen = scripts, scripts, [*(names or SCRIPTS)]
    else:
        chosen = [name for name in chosen if fits(CASES[name], topology)]
    (expected,) = alone(1, one, chosen, timeout_s=600)
    world, stages = TOPOLOGIES[topology][0], is_pipelined(topology)
    found = ((name, on_ranks(world, many, [name], topology, timeout_s=120)) for name in chosen)
    return sum(_tell(name, [rank[name] for rank in every], expected[name], stages=stages) for name, every in found)


def _resumed(name: str) -> tuple[Sequence[Found], Found]:
    """The ranks, and their twin; those that saved, if they ended with an error."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (alone,) = _ALONE(1, runs.twins, [name], folder)
        saving = [rank[name] for rank in run_ranks(2, runs.run, [name], "fsdp2", folder)]
        if any(found.error for found in (alone[name], *saving)):
            return saving, alone[name]
        (expected,) = _ALONE(1, runs.twins_resumed, [name], folder)
        return [rank[name] for rank in run_ranks(2, runs.run, [name], "replicas", folder, True)], expected[name]


def _tell(name: str, ranks: Sequence[Found], expected: Found, *, stages: bool = False) -> bool:
    """Print whether a case is as its twin; returns whether it is not."""
    tolerance = CASES[name].tolerance if name in CASES else 1e-10
    if expected.error:
        found = {expected.error}
    elif stages and not any(rank.error for rank in ranks):
        found = {difference_of_stages(ranks, expected, tolerance)}
    else:
        found = {difference(rank, expected, tolerance) for rank in ranks}
    what = "as on one process" if found == {""} else " | ".join(text.partition("\n")[0] for text in found)
    print(f"{name:28} {what}", flush=True)
    return found != {""}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", help=f"resumed, fabric, gpu, or one of {', '.join(TOPOLOGIES)}")
    parser.add_argument("names", metavar="NAME", nargs="*", help="of cases; all by default")
    arguments = parser.parse_args()
    sys.exit(main(arguments.topology, *arguments.names) > 0)
