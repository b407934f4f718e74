"""Run all cases, or some, on one topology: ``python -m tests.sweeps.twins TOPOLOGY [NAME …]``. Takes minutes.

``python -m tests.sweeps.twins resumed [NAME …]`` resumes on replicas what two ranks of FSDP saved;
``… fabric TOPOLOGY [NAME …]`` runs the scripts of Fabric, ``… gpu TOPOLOGY [NAME …]`` cases on GPUs, or on the pretend
device where there are none.
"""

from __future__ import annotations

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
from tests.sweeps.twins.fabric_run import scripts
from tests.sweeps.twins.fabric_scripts import SCRIPTS
from tests.sweeps.twins.run import (
    CASES,
    TOPOLOGIES,
    Found,
    difference,
    difference_of_stages,
    fits,
    is_pipelined,
    run,
    twins,
    twins_resumed,
)

_ALONE = partial(run_ranks, init_process_group=False)


def main(
    topology: str,
    *names: str,
    alone: Callable[..., list[Any]] = _ALONE,
    on_ranks: Callable[..., list[Any]] = run_ranks,
) -> int:
    """The number of cases that differ from their twins, or end with an error."""
    if topology == "gpu":
        ranks.on_real_gpus = torch.cuda.is_available()
        return main(*names, alone=run_on_gpus, on_ranks=run_on_gpus)
    if topology == "fabric":
        return _run_scripts(*names)
    if topology == "resumed":
        return sum(_tell(name, *_resumed(name)) for name in names or CASES)
    chosen = [name for name in names or CASES if fits(CASES[name], topology)]
    (expected,) = alone(1, twins, chosen, timeout_s=600)
    return sum(
        _tell(
            name,
            [rank[name] for rank in on_ranks(TOPOLOGIES[topology][0], run, [name], topology, timeout_s=120)],
            expected[name],
            stages=is_pipelined(topology),
        )
        for name in chosen
    )


def _run_scripts(topology: str, *names: str) -> int:
    """The number of scripts of Fabric that differ from their twins, or end with an error."""
    chosen = names or tuple(SCRIPTS)
    (expected,) = run_ranks(1, scripts, chosen, init_process_group=False, timeout_s=600)
    count = 0
    for name in chosen:
        ranks = [rank[name] for rank in run_ranks(TOPOLOGIES[topology][0], scripts, [name], topology, timeout_s=120)]
        found = {difference(rank, expected[name], 1e-10) for rank in ranks}
        what = "as on one process" if found == {""} else " | ".join(text.partition("\n")[0] for text in found)
        print(f"{name:28} {what}", flush=True)
        count += found != {""}
    return count


def _resumed(name: str) -> tuple[Sequence[Found], Found]:
    """The ranks, and their twin; those that saved, if they ended with an error."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (alone,) = run_ranks(1, twins, [name], folder, init_process_group=False, timeout_s=120)
        ranks = [rank[name] for rank in run_ranks(2, run, [name], "fsdp2", folder, timeout_s=120)]
        if any(found.error for found in (alone[name], *ranks)):
            return ranks, alone[name]
        (expected,) = run_ranks(1, twins_resumed, [name], folder, init_process_group=False, timeout_s=120)
        world = TOPOLOGIES["replicas"][0]
        resumed = run_ranks(world, run, [name], "replicas", folder, True, timeout_s=120)
        return [rank[name] for rank in resumed], expected[name]


def _tell(name: str, ranks: Sequence[Found], expected: Found, *, stages: bool = False) -> bool:
    """Print whether a case is as its twin; returns whether it is not."""
    tolerance = CASES[name].tolerance
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
    sys.exit(main(*sys.argv[1:]) > 0)
