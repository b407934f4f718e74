"""The tool consolidate under the name of Lightning's: ``python -m lightning_shardckpt.consolidate DIR``."""

import sys

from lightning_shardckpt.cli import run
from lightning_shardckpt.export.consolidation import consolidate as consolidate

if __name__ == "__main__":
    run(["consolidate", *sys.argv[1:]])
