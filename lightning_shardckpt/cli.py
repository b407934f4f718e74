"""``python -m lightning_shardckpt {inspect,verify,consolidate} …``: the tools on the command line.

Exit status: 0, 1 for a problem, 2 for wrong usage. Problems go to stderr as a message, without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.text import count_text, progress, size_text

_PROG = "python -m lightning_shardckpt"


def run(argv: Sequence[str]) -> NoReturn:
    """Run one tool as this process."""
    signal.signal(signal.SIGTERM, _terminated)  # so that what is unfinished is removed
    sys.exit(main(argv))


def main(argv: Sequence[str]) -> int:
    """Run one tool; returns the exit status. Exits by itself for wrong usage and for help."""
    parsed = _parser().parse_args(list(argv))
    tool = parsed.subcommand
    arguments: Namespace = parsed[tool]
    try:
        status = {"inspect": _inspect, "verify": _verify, "consolidate": _consolidate}[tool](arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail at exit
        return 1
    except (ShardCkptError, OSError, ValueError) as error:
        print(f"{_PROG} {tool}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog=_PROG, description="Tools for sharded checkpoints. None needs a GPU or user code.")
    tools = parser.add_subcommands(title="tools")

    inspect = ArgumentParser(description="Shows what is in a checkpoint. Reads its indexes only.")
    inspect.add_argument("path", type=str, help="the checkpoint directory")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    inspect.add_argument("--tensors", type=str, metavar="PATTERN", help="only tensors whose name has this")
    inspect.add_argument("--all", action="store_true", help="long tables in full")
    tools.add_subcommand("inspect", inspect, help="what is in a checkpoint")

    verify = ArgumentParser(description="Compares every byte of a checkpoint with what was saved.")
    verify.add_argument("path", type=str, help="the checkpoint directory")
    verify.add_argument("--quick", action="store_true", help="structure and sizes only")
    tools.add_subcommand("verify", verify, help="whether a checkpoint is whole")

    consolidate = ArgumentParser(description="Converts a checkpoint to a single file that `torch.load()` reads.")
    consolidate.add_argument("checkpoint_folder", type=str, help="the checkpoint directory")
    consolidate.add_argument(
        "--output_file",
        type=str,
        help="must not exist yet; by default the name of the checkpoint with '.consolidated' appended",
    )
    tools.add_subcommand("consolidate", consolidate, help="one file for torch.load")
    return parser


def _inspect(arguments: Namespace) -> int:
    from lightning_shardckpt.inspect import show  # each tool imports what it needs

    print(show(arguments.path, arguments.tensors, arguments.all, arguments.json))
    return 0


def _verify(arguments: Namespace) -> int:
    from lightning_shardckpt.verify import verify

    with progress() as advance:
        report = verify(arguments.path, quick=arguments.quick, advance=advance)
    for finding in report.findings:
        print(finding)
    looked_at = f"{count_text(report.files, 'file')}, {size_text(report.nbytes)} of shards"
    if report.findings:
        print(f"{count_text(len(report.findings), 'problem')} in {arguments.path} ({looked_at})")
        return 1
    print(f"{arguments.path} is {'complete' if arguments.quick else 'whole'}: {looked_at}")
    return 0


def _consolidate(arguments: Namespace) -> int:
    from lightning_shardckpt.consolidate import consolidate

    consolidate(arguments.checkpoint_folder, arguments.output_file)
    return 0
