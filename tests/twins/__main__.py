"""Run all cases, or some, on one topology: ``python -m tests.twins TOPOLOGY [NAME …]``. Takes minutes."""

from __future__ import annotations

import sys

from tests.pool import run_ranks
from tests.twins.run import CASES, TOPOLOGIES, difference, difference_of_stages, fits, run, twins


def main(topology: str, *names: str) -> int:
    """The number of cases that differ from their twins, or end with an error."""
    chosen = [name for name in names or CASES if fits(CASES[name], topology)]
    (expected,) = run_ranks(1, twins, chosen, init_process_group=False, timeout_s=600)
    bad = 0
    for name in chosen:
        case, ranks = CASES[name], run_ranks(TOPOLOGIES[topology][0], run, [name], topology, timeout_s=120)
        if topology == "pp2" and not any(rank[name].error for rank in ranks):
            found = {difference_of_stages([rank[name] for rank in ranks], expected[name], case.tolerance)}
        else:
            found = {difference(rank[name], expected[name], case.tolerance) for rank in ranks}
        bad += found != {""}
        what = "as on one process" if found == {""} else " | ".join(text.partition("\n")[0] for text in found)
        print(f"{name:28} {what}")
    return bad


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
