"""``python -m lightning_shardckpt``."""

import sys

from lightning_shardckpt.cli import run

if __name__ == "__main__":
    run(sys.argv[1:])
