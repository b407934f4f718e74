"""``python -m lightning_shardckpt``."""

from lightning_shardckpt.cli import console

if __name__ == "__main__":
    console()
