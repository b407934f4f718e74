"""``python -m tests.sweeps.faults [--short]``: every fault at every call, as tables."""

from __future__ import annotations

import argparse

from tests.support import pool
from tests.sweeps.faults.run import everything

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Inject faults into every call of every kind of save.")
    parser.add_argument("--short", action="store_true", help="a sample of the faults")
    short = parser.parse_args().short
    print(*pool.run_ranks(1, everything, short, timeout_s=3600, init_process_group=False))
    pool.stop_server()
