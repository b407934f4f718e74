"""The tool consolidate under the name of Lightning's: ``python -m lightning_shardckpt.consolidate DIR``."""

from lightning_shardckpt.cli import console
from lightning_shardckpt.export.consolidation import consolidate as consolidate

if __name__ == "__main__":
    console("consolidate")
