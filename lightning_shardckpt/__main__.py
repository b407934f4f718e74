"""``python -m lightning_shardckpt``."""

import sys

from lightning_shardckpt.cli import main
from lightning_shardckpt.tools.command_line import run_process

if __name__ == "__main__":
    run_process(main, sys.argv[1:])
